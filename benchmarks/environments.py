"""Checks and trains every environment of Playground: `python -m benchmarks.environments`.

Each is put through `check_env` and then trained for three iterations at a small size, which
must compile the step once and leave every number finite. Prints a table. Exit status 1 if an
environment fails; a finding of `check_env` is no failure, it is in the table.
"""

import argparse
import dataclasses
import sys
import time
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp

import eqx_ppo as ep
from benchmarks._tables import readable, table
from eqx_ppo.envs import Env, playground_names

_ITERATIONS = 3
_N_ENVS = 16
_ROLLOUT_LENGTH = 5
_HEADER = (
    "environment",
    "check",
    "s to check",
    "s to compile",
    "steps/s",
    "reset / step",
    "trains",
)


@dataclasses.dataclass
class Row:
    """What is known of an environment, as the table shows it."""

    name: str
    check: str = "-"
    check_seconds: str = "-"
    compile_seconds: str = "-"
    speed: str = "-"
    reset_cost: str = "-"
    trains: str = "no"

    def cells(self) -> tuple[str, ...]:
        return dataclasses.astuple(self)


def main() -> int:
    """Runs all that are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ENV", help="all that can be loaded by default")
    names = parser.parse_args().names or playground_names()
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Playground gives many
    rows = []
    for name in names:
        row = Row(name)
        rows.append(row)
        try:
            examine(row)
        except Exception as error:
            row.trains = f"{type(error).__name__}: {error}".splitlines()[0]
        jax.clear_caches()
        print(" | ".join(row.cells()), flush=True)
    print(f"\n{table(_HEADER, [row.cells() for row in rows])}")
    failed = [row.name for row in rows if row.trains != "yes"]
    if failed:
        print(f"\ndo not train: {', '.join(failed)}")
    return 1 if failed else 0


def examine(row: Row) -> None:
    """Fills in a row, as far as it gets."""
    env = ep.EpisodeWrapper(ep.load_playground(row.name), 1000)
    start = time.perf_counter()
    try:
        report = ep.check_env(env)
        kinds = ", ".join(sorted({advice.rule for advice in report.advice}))
        row.check = f"passes ({kinds})" if kinds else "passes"
        row.reset_cost = f"{report.reset_cost:.1f}"
    except ep.ContractError as error:
        row.check = "; ".join(map(str, error.findings))
    row.check_seconds = f"{time.perf_counter() - start:.0f}"
    train(env, row)


def train(env: Env, row: Row) -> None:
    """Trains for a few iterations; the first one compiles."""
    config = ep.PPOConfig(
        n_envs=_N_ENVS, rollout_length=_ROLLOUT_LENGTH, n_epochs=2, n_minibatches=2
    )
    network = ep.make_mlp_actor_critic(
        env.observation_size, env.action_size, [32] * 2, [32] * 2, key=jax.random.key(0)
    )
    key = jax.random.key(1)
    state = jax.jit(lambda key: ep.new_training_state(env, network, config, key))(key)
    step = jax.jit(lambda state: ep.ppo_step(env, state, config), donate_argnums=0)
    seconds = []
    for _ in range(_ITERATIONS):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state))
        seconds.append(time.perf_counter() - start)
    usual = min(seconds[1:])
    row.compile_seconds = f"{seconds[0] - usual:.0f}"
    row.speed = readable(_N_ENVS * _ROLLOUT_LENGTH / usual, "")
    if step._cache_size() != 1:  # what JAX has compiled
        row.trains = f"compiles its step {step._cache_size()} times"
    elif not all_finite((eqx.filter(state.network, eqx.is_array), metrics)):
        row.trains = "leaves numbers that are not finite"
    else:
        row.trains = "yes"


def all_finite(tree: ep.TrainingState | tuple) -> bool:
    """Whether every floating-point number of a tree is finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves)


if __name__ == "__main__":
    sys.exit(main())
