"""Rules on whole episodes: these run a batch for a while under random actions."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from eqx_ppo._rules import Fault, Faults
from eqx_ppo.envs._conformance._history import Episodes, is_constant, leaves_of
from eqx_ppo.envs._conformance._sketch import FLAGS, is_within
from eqx_ppo.envs._conformance._trial import Trial


def episode_end(trial: Trial) -> Faults:
    """A reset is not the end of an episode; at a time limit flag and `done` are set."""
    start = trial.starts
    for name, leaf in zip(trial.spec.paths, jax.tree.leaves(start), strict=True):
        if name in FLAGS or is_within(name, "done"):
            count = int(np.sum(np.asarray(leaf).astype(bool)))
            if count:
                yield Fault(
                    f"state{name}",
                    f"is set after {count} of {trial.size.n_envs} resets, so that the episode is "
                    "over before it begins.",
                )
    found = trial.episodes
    for name, flag in found.flags.items():
        if np.any(flag & ~found.done):
            yield Fault(
                f"next_state{name}",
                f"is set without `done` ({_first_step(flag & ~found.done)}). At a time limit set "
                "both: `done` ends the episode, and the flag says why.",
            )
    if len(found.flags) > 1:
        first, second = found.flags.values()
        if np.any(first ^ second):
            names = " and ".join(f"`{name.removeprefix('.')}`" for name in found.flags)
            yield Fault(
                f"next_state{FLAGS[0]}",
                f"{names} disagree ({_first_step(first ^ second)}). Keep one of them.",
            )


def own_resets(trial: Trial) -> Faults:
    """The state that ends an episode is its last one, not the first of the next."""
    if any(map(_is_back, _groups(trial))):
        yield Fault(
            "next_state",
            "every step that ended an episode returned a state like that of a reset, though no "
            "other step did: the environment seems to reset itself. Return the true last state; "
            "the library puts a fresh one in its place.",
        )


class _Group(NamedTuple):
    """Whether the state is back at its start, `[T, B]`, in the sense of some of its leaves."""

    episodes: Episodes
    back: np.ndarray


def _groups(trial: Trial) -> Iterator[_Group]:
    """The leaves by which a reset could be known.

    Those that are the same after every reset, with and without `info` (a wrapper's count
    goes on there); and all outside of `info`, for an environment that keeps its first state.
    """
    found, paths = trial.episodes, trial.spec.paths
    constant = np.array([is_constant(leaf) for leaf in leaves_of(trial.starts)])
    own = np.array([not is_within(path, "reward", "done", "metrics") for path in paths])
    own &= np.array([path not in FLAGS for path in paths])
    outside = np.array([not is_within(path, "info") for path in paths])
    for chosen in (own & constant, own & constant & outside, own & outside):
        if np.any(chosen):
            yield _Group(found, np.all(found.at_start[:, :, chosen], axis=-1))


def _is_back(group: _Group) -> bool:
    """Whether the state is at its start where an episode ended, and nowhere else."""
    ended = group.episodes.ended
    later = ended & ~np.concatenate([np.ones_like(ended[:1]), ended[:-1]])  # not in one step
    return bool(np.sum(later) > 1 and np.all(group.back[later]) and not np.any(group.back[~ended]))


def finite(trial: Trial) -> Faults:
    """Numbers stay finite under random actions; sentinels that were not finite may stay."""
    blow_up = trial.episodes.blow_up
    if blow_up is None:
        return
    first, *others = blow_up.leaves
    also = f", and {len(others)} other leaves with it" if others else ""
    when = f"at step {blow_up.step} under random actions" if blow_up.step else "after the reset"
    yield Fault(
        ("next_state" if blow_up.step else "state") + first,
        f"non-finite {when}, in {blow_up.n_envs} of {trial.size.n_envs} "
        f"environments{also}. Look for a division by 0, a root or logarithm of a negative number, "
        "or a physics step that is too long; training would throw such steps away.",
    )


def _first_step(mask: np.ndarray) -> str:
    return f"first at step {int(np.argmax(np.any(mask, axis=1))) + 1}"
