"""Rules on whole episodes: these run a batch for a while under random actions."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from eqx_ppo._rules import Fault, Faults
from eqx_ppo.envs._conformance._history import Episodes, is_constant, is_finite, leaves_of
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
    if any(_is_back(group) and _begins_anew(group) for group in _groups(trial)):
        yield Fault(
            "next_state",
            "every step that ended an episode returned a state like that of a reset, though no "
            "other step did: the environment seems to reset itself. Return the true last state; "
            "the library puts a fresh one in its place. If it is the true last state, say so: "
            '`allow=("own resets",)`.',
        )


def ends_at_start(trial: Trial) -> Faults:
    """Episodes end at their start, in some leaves, though nothing else says `own resets`."""
    groups = [group for group in _groups(trial) if _is_back(group)]
    if groups and not any(map(_begins_anew, groups)):
        names = [
            path for path, chosen in zip(trial.spec.paths, groups[0].leaves, strict=True) if chosen
        ]
        yield Fault(
            f"next_state{names[0]}",
            "is where the reset puts it whenever an episode ends, and at no other time. The state "
            "does not leap there, so that this may well be right; an environment that resets "
            "itself must return the true last state instead.",
        )


class _Group(NamedTuple):
    """Whether the state is back at its start, `[T, B]`, in the sense of some of its leaves.

    - `leaves`: which they are, `[leaves]`.
    - `others`: which ones would leap, too, if a reset had put them there.
    """

    episodes: Episodes
    leaves: np.ndarray
    others: np.ndarray
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
    moving = np.array([leaf.dtype != np.uint32 for leaf in leaves_of(trial.starts)])  # no keys
    for chosen in (own & constant, own & constant & outside, own & outside):
        if np.any(chosen):
            back = np.all(found.at_start[:, :, chosen], axis=-1)
            yield _Group(found, chosen, own & outside & moving & ~constant & ~chosen, back)


def _is_back(group: _Group) -> bool:
    """Whether the state is at its start where an episode ended, and nowhere else."""
    ended = group.episodes.ended
    later = ended & ~np.concatenate([np.ones_like(ended[:1]), ended[:-1]])  # not in one step
    return bool(np.sum(later) > 1 and np.all(group.back[later]) and not np.any(group.back[~ended]))


def _begins_anew(group: _Group) -> bool:
    """Whether the state leaps to its start: one may also walk back to it, or count in a circle."""
    changes = group.episodes.changes
    others = not np.any(group.others) or changes.jump(group.others)
    return others and changes.jump(group.leaves)


def finite(trial: Trial) -> Faults:
    """Numbers stay finite under random actions; sentinels that were not finite may stay."""
    blow_up = trial.episodes.blow_up
    if blow_up is None:
        yield from _finite_kept(trial)
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


def _finite_kept(trial: Trial) -> Faults:
    """What is carried over from finite states is finite."""
    if trial.kept is None:
        return
    kept, ended = trial.kept
    leaves = zip(trial.spec.paths, leaves_of(kept), leaves_of(trial.starts), strict=True)
    for path, after, before in leaves:
        if np.any((~is_finite(after) & is_finite(before))[ended]):
            yield Fault(
                f"fresh{path}",
                "`carry_over` made it non-finite at the end of an episode, where it was finite. "
                "Look for a division by 0, such as a mean over no episodes.",
            )
            return


def _first_step(mask: np.ndarray) -> str:
    return f"first at step {int(np.argmax(np.any(mask, axis=1))) + 1}"
