"""Trains on an environment that breaks at random: `python -m benchmarks.faults`.

In one of a hundred steps the physics state, the reward or the observation becomes NaN. The
run must reach its return all the same, with no weight or statistic ever non-finite, and
must report exactly as many bad steps as there were. Exit status 1 if it does not.

Episodes are a hundred steps long, then, and the evaluation is over a thousand: what comes late
is rarely trained on. Episodes that are cut off at random, without any fault, are as hard to
learn from. So the run is long, looks far ahead, and settles down toward its end.
"""

import argparse
import dataclasses
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqx_ppo as ep
from benchmarks._faults import FaultCount, FaultyWrapper


def main() -> int:
    """Trains, prints what was injected and what was reported, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartpoleBalance")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=5_000_000)
    parser.add_argument("--target", type=float, default=900.0)
    arguments = parser.parse_args()

    clean = ep.EpisodeWrapper(ep.load_playground(arguments.env), 1000)
    count = FaultCount()
    env = FaultyWrapper(clean, arguments.rate, count)
    network = ep.make_mlp_actor_critic(
        clean.observation_size,
        clean.action_size,
        [64] * 4,
        [256] * 2,
        key=jax.random.key(arguments.seed),
    )
    ppo = ep.PPOConfig(
        total_steps=arguments.total_steps, discounting_factor=0.995, gradient_clipping=1.0
    )
    n_iterations = -(-ppo.total_steps // ppo.steps_per_iteration)
    n_updates = n_iterations * ppo.n_epochs * ppo.n_minibatches
    schedule = optax.linear_schedule(1e-3, 0.0, n_updates)
    config = ep.TrainConfig(
        seed=arguments.seed,
        ppo=dataclasses.replace(ppo, learning_rate=schedule),
        eval=ep.EvalConfig(every_steps=100_000, n_envs=32),
        checkpoint_every_steps=1,  # every call of the compiled step
    )
    spoilt = []
    result = ep.train_ppo(
        env,
        network,
        config,
        eval_env=clean,
        checkpoint_fn=lambda state, steps: spoilt.append(not all_finite(state)),
    )
    state = result.training_state
    reported = int(state.counts.invalid_steps)
    returns = [row["eval/episode_reward/mean"] for row in result.eval_history]
    print(f"steps             {result.total_steps:>10,}")
    print(f"injected          {count.total:>10,}  (state, reward, observation: {count.by_kind})")
    print(f"reported          {reported:>10,}")
    print(f"skipped updates   {int(state.counts.skipped_updates):>10,}")
    print(f"non-finite states {sum(spoilt):>10,}  of {len(spoilt):,}")
    print(f"best return       {max(returns):>10.1f}  (last: {returns[-1]:.1f})")
    right = reported == count.total and not any(spoilt) and returns[-1] >= arguments.target
    return 0 if right else 1


def all_finite(state: ep.TrainingState) -> bool:
    """Whether weights, statistics and the optimizer's state are finite."""
    numbers = eqx.filter((state.arrays, state.optimizer_state), eqx.is_inexact_array)
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(numbers))


if __name__ == "__main__":
    sys.exit(main())
