"""Trains a recurrent policy on a task that no policy without memory can solve.

    python examples/memory.py [--seed 0] [--total-steps 300000]

`Recall` shows a cue of -1 or +1 once, stays blank for a few steps, and then rewards
`cue * action`. The best return is 1. Without memory the action cannot depend on the cue,
whose mean is 0, so the expected return of a multilayer perceptron is exactly 0.
"""

import argparse

import jax

import eqx_ppo as ep
from eqx_ppo.envs import Recall


def main() -> None:
    """Trains both kinds of network under the same settings and compares them."""
    parser = argparse.ArgumentParser(description="Train with and without memory on a memory task.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=300_000)
    parser.add_argument("--delay", type=int, default=5, help="blank steps before the answer")
    arguments = parser.parse_args()

    env = Recall(delay=arguments.delay)
    key = jax.random.key(arguments.seed)
    networks = {
        "LSTM": ep.make_recurrent_actor_critic(2, 1, 32, key=key),
        "MLP": ep.make_mlp_actor_critic(2, 1, [32, 32], [32, 32], key=key),
    }
    config = ep.TrainConfig(
        seed=arguments.seed,
        ppo=ep.PPOConfig(
            n_envs=128,
            rollout_length=16,
            total_steps=arguments.total_steps,
            learning_rate=1e-3,
        ),
        eval=ep.EvalConfig(every_steps=100_000, n_envs=512, max_episode_length=env.delay + 2),
    )
    for name, network in networks.items():
        print(f"{name}:", flush=True)
        result = ep.train_ppo(env, network, config)
        final = result.final_metrics["eval/episode_reward/mean"]
        print(f"{name}: final return {final:.2f} of {env.MAX_RETURN}\n")


if __name__ == "__main__":
    main()
