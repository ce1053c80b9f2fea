"""Trains a recurrent policy, exports it, and controls a pendulum by what was exported.

    python examples/deploy.py [--seed 0] [--total-steps 400000] [--folder pendulum_policy]

What is written needs neither this library nor Equinox: `load` uses JAX alone. Beside the
functions there is a `policy.json`, which says what goes in, what comes out, and how to run it.

Expect a return of about -200 (0 is best; -1200 before training) within two minutes, by the
exported policy as by the trained one.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax import export
from jaxtyping import PyTree

import eqx_ppo as ep
from eqx_ppo.algorithms import make_policy
from eqx_ppo.envs import Pendulum, RewardScalingWrapper
from eqx_ppo.networks import GRU, StatefulModule
from eqx_ppo.training import export_policy

EPISODE_LENGTH = 200


def train(total_steps: int, seed: int) -> tuple[StatefulModule, float]:
    """The trained network, and its return."""
    task = ep.EpisodeWrapper(Pendulum(), EPISODE_LENGTH)
    network = ep.make_recurrent_actor_critic(
        task.observation_size, task.action_size, 32, cell=GRU, key=jax.random.key(seed)
    )
    config = ep.TrainConfig(
        seed=seed,
        ppo=ep.PPOConfig(
            n_envs=128,
            rollout_length=25,
            total_steps=total_steps,
            learning_rate=1e-3,
            discounting_factor=0.95,
            n_epochs=8,
            gradient_clipping=1.0,
        ),
        eval=ep.EvalConfig(every_steps=100_000, max_episode_length=EPISODE_LENGTH),
    )
    result = ep.train_ppo(RewardScalingWrapper(task, 0.1), network, config, eval_env=task)
    return result.training_state.network, result.final_metrics["eval/episode_reward/mean"]


def load(folder: Path) -> list[Callable[..., PyTree]]:
    """`init`, `act` and `reset` of an exported policy. Here the library is not needed."""
    files = [folder / f"{name}.jax" for name in ("init", "act", "reset")]
    return [jax.jit(export.deserialize(bytearray(file.read_bytes())).call) for file in files]


def control(folder: Path, n_episodes: int) -> None:
    """Runs episodes on the host, one step after another, as a robot would."""
    init, act, reset = load(folder)
    env = Pendulum()
    env_reset, env_step = jax.jit(env.reset), jax.jit(env.step)
    carry = init(np.array([0, 0], np.uint32))  # the words of `jax.random.key(0)`
    returns, seconds = [], []
    for episode in range(n_episodes):
        state = env_reset(jax.random.key(episode))
        total = 0.0
        for _ in range(EPISODE_LENGTH):
            obs = np.asarray(state.obs)
            started = time.perf_counter()
            action, carry = jax.block_until_ready(act(carry, obs))
            seconds.append(time.perf_counter() - started)
            state = env_step(state, action)
            total += float(state.reward)
        carry = reset(carry, np.array(True))
        returns.append(total)
    print(f"Return of the exported policy: {np.mean(returns):.0f} ({n_episodes} episodes)")
    print(f"Time per action: {1e6 * np.median(seconds):.0f} microseconds")


def main() -> None:
    """Trains, exports and controls."""
    parser = argparse.ArgumentParser(description="Train a policy and use it without the library.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=400_000)
    parser.add_argument("--folder", type=Path, help="where the policy is kept; must not exist")
    arguments = parser.parse_args()

    network, trained_return = train(arguments.total_steps, arguments.seed)
    print(f"Return of the trained policy: {trained_return:.0f}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "pendulum_policy"
        export_policy(make_policy(network), folder, np.zeros(3, np.float32))
        print(f"Exported: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        description = json.loads((folder / "policy.json").read_text())
        for entry in description["carry"]:
            print(f"In the carry: {entry['name']}, {entry['dtype']}{entry['shape']}")
        control(folder, n_episodes=20)


if __name__ == "__main__":
    main()
