"""What may differ between the parts of a run that was resumed."""

import warnings
from collections.abc import Iterator, Mapping

import jax
from jaxtyping import Array

from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import TrainingState, restart_episodes
from eqx_ppo.training._checkpoint import CheckpointMetadata, RunRecord
from eqx_ppo.training._device import Task

# Settings that say how long a run lasts and what it reports, not what it computes.
_FREE = (
    "checkpoint_every_steps",
    "console",
    "eval",
    "invalid_window",
    "max_invalid_share",
    "ppo.iterations_per_call",
    "ppo.logging_level",
    "ppo.logging_percentiles",
    "ppo.total_steps",
)


def warn_of_changes(saved: CheckpointMetadata, here: RunRecord) -> None:
    """Warns if the run goes on with other settings, or another backend, than it began with.

    Then it is not the run that it would have been without the interruption.
    """
    before = dict(_flat({**saved.run.config, "environment": saved.run.environment}))
    after = dict(_flat({**here.config, "environment": here.environment}))
    changed = [
        f"`{name}` was {before.get(name)!r} and is {after.get(name)!r}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and not _is_free(name)
    ]
    if saved.run.config and changed:
        warnings.warn(
            f"The run goes on with other settings than it began with: {'; '.join(changed)}.",
            stacklevel=6,
        )


def restart_on_host(task: Task, state: TrainingState, key: Array) -> TrainingState:
    """The state with new episodes, where those of the checkpoint cannot be continued."""
    warnings.warn(
        f"A `{type(task.env).__name__}` runs on the host, where its episodes cannot be restored: "
        "all begin anew. Everything else continues.",
        stacklevel=6,
    )
    ppo = task.config.ppo
    return jax.jit(lambda state, key: restart_episodes(task.env, state, ppo, key))(state, key)


def _flat(data: Mapping[str, Tree], prefix: str = "") -> Iterator[tuple[str, Tree]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in _FREE)
