"""Trains on an environment that breaks at random: `python -m benchmarks.faults`.

In one of a hundred steps the physics state, the reward or the observation becomes NaN. The
run must reach its return all the same and hold it over five evaluations in a row, with no weight or
statistic ever non-finite, and must report exactly as many bad steps as there were. Exit status 1
if it does not.

Episodes are a hundred steps long, then, and an evaluation takes a thousand: what comes late is
rarely trained on, and a policy that held the pole for a thousand steps may forget to. That has
nothing to do with faults: with `--cut`, which cuts episodes off at random instead, at time
limits, runs swing as well. So the run is long and looks far ahead.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqx_ppo as ep
from benchmarks._faults import CutWrapper, FaultCount, FaultyWrapper

_HELD = 5


def main() -> int:
    """Trains, prints what was injected and what was reported, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartpoleBalance")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=5_000_000)
    parser.add_argument("--target", type=float, default=900.0)
    parser.add_argument("--cut", action="store_true", help="time limits instead of faults")
    arguments = parser.parse_args()

    clean = ep.EpisodeWrapper(ep.load_playground(arguments.env), 1000)
    count = FaultCount()
    env = (
        CutWrapper(clean, arguments.rate)
        if arguments.cut
        else FaultyWrapper(clean, arguments.rate, count)
    )
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
    held = longest_run(value >= arguments.target for value in returns)
    print(f"held              {held:>10,}  evaluations in a row of at least {arguments.target:g}")
    right = reported == count.total and not any(spoilt) and held >= _HELD
    return 0 if right else 1


def longest_run(hits: Iterable[bool]) -> int:
    """How many in a row are true, at most."""
    return max((sum(run) for _, run in itertools.groupby(hits)), default=0)


def all_finite(state: ep.TrainingState) -> bool:
    """Whether weights, statistics and the optimizer's state are finite."""
    numbers = eqx.filter((state.arrays, state.optimizer_state), eqx.is_inexact_array)
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(numbers))


if __name__ == "__main__":
    sys.exit(main())
