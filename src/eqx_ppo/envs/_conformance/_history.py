"""What a batch of environments does under random actions, episode after episode."""

from collections.abc import Callable
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._compare import as_numpy
from eqx_ppo._typing import EnvState
from eqx_ppo.envs._conformance._changes import ChangeRecorder, Changes
from eqx_ppo.envs._conformance._sketch import FLAGS, is_within


class BlowUp(NamedTuple):
    """Where numbers became non-finite, for the first time.

    - `step`: counted from 1; 0 is the reset.
    - `leaves`: paths of the leaves that show it.
    - `n_envs`: how many environments.
    """

    step: int
    leaves: tuple[str, ...]
    n_envs: int


@final
class Episodes(NamedTuple):
    """What a batch did over T steps; where an episode ended, it went on from its first state.

    - `done`: `[T, B]`, as the states say.
    - `flags`: the same for every flag of a time limit, by path.
    - `at_start`: `[T, B, leaves]`, where a leaf is what it was after the reset.
    - `changes`: what the steps did to each number of the state.
    - `blow_up`: the first one, if any.
    """

    done: np.ndarray
    flags: dict[str, np.ndarray]
    at_start: np.ndarray
    changes: Changes
    blow_up: BlowUp | None

    @property
    def ended(self) -> np.ndarray:
        """`[T, B]`, where an episode came to its end."""
        return np.logical_or.reduce([self.done, *self.flags.values()])


def run_episodes(
    paths: tuple[str, ...],
    starts: EnvState,
    advance: Callable[[EnvState, np.ndarray, int], EnvState],
    n_steps: int,
) -> Episodes:
    """Runs a batch, up to the first step that is not finite.

    **Arguments:**

    - `paths`: of the leaves of a state.
    - `starts`: the first states.
    - `advance`: the next states, from the states, which of them have ended, and the number of
        the step.
    """
    start = leaves_of(starts)
    state, before, ended = starts, start, np.zeros(len(start[0]), bool)
    dones, flags, at_starts, blow_up = [], [], [], _at_reset(paths, start)
    recorder = ChangeRecorder(start)
    for step in range(n_steps):
        state = advance(state, ended, step)
        after = leaves_of(state)
        begun = [_where(ended, first, old) for first, old in zip(start, before, strict=True)]
        blow_up = blow_up or _blow_up(step + 1, paths, begun, after)
        by_path = dict(zip(paths, after, strict=True))
        dones.append(np.asarray(state.done).astype(bool))
        flags.append({name: by_path[name].astype(bool) for name in FLAGS if name in by_path})
        at_starts.append(np.stack(list(map(_rows_equal, after, start)), axis=-1))
        ended = np.logical_or.reduce([dones[-1], *flags[-1].values()])
        recorder.add(begun, after, ended)
        before = after
        if blow_up:
            break
    stacked = {name: np.stack([flag[name] for flag in flags]) for name in flags[0]}
    changes = recorder.changes()
    return Episodes(np.stack(dones), stacked, np.stack(at_starts), changes, blow_up)


def leaves_of(state: EnvState) -> list[np.ndarray]:
    """The leaves of a batch of states."""
    return [as_numpy(leaf) for leaf in jax.tree.leaves(state)]


def is_finite(values: np.ndarray) -> np.ndarray:
    """Where numbers are finite; integers always are."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return np.ones(values.shape, bool)
    return np.isfinite(values if values.dtype.kind in "fc" else values.astype(np.float32))


def _at_reset(paths: tuple[str, ...], start: list[np.ndarray]) -> BlowUp | None:
    bad = {
        path: np.any(~is_finite(leaf).reshape(len(leaf), -1), axis=1)
        for path, leaf in zip(paths, start, strict=True)
        if is_within(path, "obs")
    }
    return _first_blow_up(0, bad)


def _blow_up(
    step: int, paths: tuple[str, ...], before: list[np.ndarray], after: list[np.ndarray]
) -> BlowUp | None:
    bad = {}
    for path, old, new in zip(paths, before, after, strict=True):
        wrong = ~is_finite(new)
        if np.any(wrong) and not is_within(path, "obs", "reward"):
            wrong &= is_finite(old)
        bad[path] = np.any(wrong.reshape(len(new), -1), axis=1)
    return _first_blow_up(step, bad)


def _first_blow_up(step: int, bad: dict[str, np.ndarray]) -> BlowUp | None:
    leaves = tuple(path for path, rows in bad.items() if np.any(rows))
    if not leaves:
        return None
    return BlowUp(step, leaves, int(np.sum(np.any(list(bad.values()), axis=0))))


def _where(mask: np.ndarray, one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return np.where(mask.reshape(-1, *(1,) * (one.ndim - 1)), one, two)


def _is_nan(values: np.ndarray) -> np.ndarray:
    return values != values  # noqa: PLR0124 (`isnan` refuses integers)


def _rows_equal(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    same = (one == two) | (_is_nan(one) & _is_nan(two))
    return np.all(same.reshape(len(one), -1), axis=1)


def is_constant(leaf: np.ndarray) -> bool:
    """Whether a leaf is the same in all environments."""
    return bool(np.all(_rows_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))))
