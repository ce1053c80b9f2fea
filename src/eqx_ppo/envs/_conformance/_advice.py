"""What is legitimate, and yet worth knowing: reported, never raised."""

from collections.abc import Callable

import jax
import numpy as np

from eqx_ppo._compare import as_numpy
from eqx_ppo._report import Finding
from eqx_ppo._rules import Fault, Faults
from eqx_ppo.envs._conformance._calls import key_leaves, matters, repeated_calls
from eqx_ppo.envs._conformance._episodes import ends_at_start
from eqx_ppo.envs._conformance._sketch import is_within
from eqx_ppo.envs._conformance._structure import join, pairs
from eqx_ppo.envs._conformance._trial import Trial

_DEAR = 5.0  # steps for a reset, from where on its strategy matters


def dtypes(trial: Trial) -> Faults:
    """`reset` and `step` differ in dtypes or weak types."""
    different = [(old, new) for old, new in pairs(trial) if old[2:] != new[2:]]
    if not different:
        return
    old, new = different[0]
    more = f" (and {len(different) - 1} other leaves)" if len(different) > 1 else ""
    yield Fault(
        f"next_state{new.name}",
        f"is {new} after `step` and {old} after `reset`{more}. The library makes it "
        f"{join(old, new)} in both; code of your own that compiles `step` would do so twice.",
    )


def written_in_place(trial: Trial) -> Faults:
    """`step` writes into the metrics that it is given."""
    written = [name for name in trial.stepped.written if is_within(name, "metrics")]
    if written:
        yield Fault(
            f"state{written[0]}",
            "`step` writes into the `metrics` of the state that it was given. Compiled code does "
            "not mind; where you step by hand, the old state changes.",
        )


def rounding(trial: Trial) -> Faults:
    """Equal calls differ by rounding."""
    for name, one, two in repeated_calls(trial):
        found = trial.identical(one, two, "state" if name == "reset" else "next_state")
        if found:
            yield Fault(
                found.leaf,
                f"two equal calls of `{name}` differ by rounding ({found.text}), so that runs do "
                "not repeat bit by bit.",
            )
            return


def starts(trial: Trial) -> Faults:
    """All resets are alike."""
    leaves = map(as_numpy, jax.tree.leaves(trial.starts))
    if trial.size.n_envs > 1 and all(np.all(leaf == leaf[:1]) for leaf in leaves if leaf.size):
        yield Fault(
            "state",
            "every reset returns the same state, whatever its key. If episodes should begin in "
            "different ways, draw from the key.",
        )


def still_keys(trial: Trial) -> Faults:
    """A key that is drawn from stays the same over an episode."""
    for index, name in key_leaves(trial):
        words, after = (
            as_numpy(jax.tree.leaves(batch)[index]) for batch in (trial.starts, trial.after)
        )
        if np.all(words == after) and matters(trial, index) and not _counts(trial):
            yield Fault(
                f"state{name}",
                "stays the same, though `step` draws from it: every step of an episode gets the "
                "same numbers. If that is not meant, split it and return the new one.",
            )


def _counts(trial: Trial) -> bool:
    """Whether the state counts steps, so that a key may be combined with the count."""
    before, after = (
        [as_numpy(leaf) for leaf in jax.tree.leaves(batch)] for batch in (trial.middle, trial.after)
    )
    for old, new in zip(before, after, strict=True):
        if old.ndim == 1 and old.dtype.kind in "iuf" and len({*(new - old).tolist()} - {0}) == 1:
            return True
    return False


def time_limit(trial: Trial) -> Faults:
    """No episode ended, and none can be cut off."""
    found = trial.episodes
    if not found.flags and not np.any(found.done):
        yield Fault(
            "state.info",
            f"no episode ended in {len(found.done)} steps of random actions, and there is no flag "
            "of a time limit. Unless episodes always end by themselves, wrap the environment in "
            "`EpisodeWrapper(env, max_len)`.",
        )


ADVICE: dict[str, Callable[[Trial], Faults]] = {
    "dtypes": dtypes,
    "metrics in place": written_in_place,
    "rounding": rounding,
    "starts": starts,
    "still keys": still_keys,
    "time limit": time_limit,
    "own resets": ends_at_start,
}


def advise(trial: Trial, path: str, cost: float) -> list[Finding]:
    """All that is worth knowing of an environment that breaks no rule."""
    found = [Finding(name, path, *fault) for name, test in ADVICE.items() for fault in test(trial)]
    return found + [Finding("reset cost", path, *fault) for fault in on_resets(cost)]


def on_resets(cost: float) -> list[Fault]:
    """What follows from the cost of a reset, in steps."""
    if cost < _DEAR:
        return []
    return [
        Fault(
            "",
            f"a reset takes as long as {cost:.0f} steps. The default, `PooledReset`, makes one per "
            f"episode, which adds {cost:.0f} steps to the cost of each; `FreshReset` would make "
            f"every step at which one begins {1 + cost:.0f} times as slow. If episodes are short, "
            "`CachedReset` costs nothing, with one start per environment.",
        )
    ]
