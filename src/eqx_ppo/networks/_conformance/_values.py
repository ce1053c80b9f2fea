"""Rules on what a module computes: these run it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._typing import Tree
from eqx_ppo.networks._conformance._fault import Fault, Faults
from eqx_ppo.networks._conformance._trial import (
    Trial,
    as_numpy,
    is_unchanged,
    reset,
    rows,
    scan,
    snapshot,
    step,
    unroll,
    visible,
)


def initial_state(trial: Trial) -> Faults:
    """`reset_state` of an initial state gives it again."""
    found = trial.difference(reset(trial.module, trial.start), trial.start, within="state")
    if found:
        yield Fault(
            found.leaf,
            f"`reset_state` of a state from `initialize_state` must give it again, but "
            f"{found.text}. The first episode would start unlike all others.",
        )


def purity(trial: Trial) -> Faults:
    """A call changes nothing that a later one sees, and keeps nothing that it was given."""
    module = trial.module
    before = snapshot((module, trial.middle, trial.x))
    first, second = (module(trial.middle, trial.x, None) for _ in range(2))
    found = trial.difference(second, first, exact=True)
    if found:
        yield Fault(
            found.leaf,
            f"two calls with the same state and input must return the same, but {found.text}. "
            "Keep what changes in the carry state, and draw noise from keys in it.",
        )
    if not is_unchanged((module, trial.middle, trial.x), before):
        yield Fault("", "a call changed the module or its input in place. Return new values.")
    try:
        with jax.checking_leaks():
            jax.make_jaxpr(lambda state, x: visible(module(state, x, None)))(trial.middle, trial.x)
    except Exception as error:
        if "Leaked" not in str(error):
            raise
        yield Fault(
            "",
            "a call stored an array outside what it returns (in a list, a global or a closure), "
            "which is a leaked tracer in compiled code. Return it in the state or the metrics.",
        )


def jit_equals_eager(trial: Trial) -> Faults:
    """The compiled module computes what the eager one does."""
    found = trial.difference(trial.module(trial.middle, trial.x, None), trial.stepped)
    if found:
        yield Fault(
            found.leaf,
            f"must be the same under `jit` and without it, but {found.text}. Do not branch on "
            "Python state or on whether arrays are traced.",
        )


def per_sample(trial: Trial) -> Faults:
    """Permuting, slicing or changing samples does just that to the results."""
    n_envs = trial.size.n_envs
    order = np.roll(np.arange(n_envs)[::-1], 1)
    for phase, extras in (("rollout", None), ("replay", trial.stepped.rollout_extras)):
        given = (trial.middle, trial.x, extras)
        base = step(trial.module, *given)
        permuted = step(trial.module, *rows(given, order))
        single = step(trial.module, *rows(given, np.array([1])))
        others = np.arange(1, n_envs)
        changed = step(trial.module, *jax.tree.map(_change_first, given))
        tests = {
            "permuting the batch must permute": (permuted, rows(base, order)),
            "a batch of one must give its row of": (single, rows(base, np.array([1]))),
            "changing one sample must not touch the others in": (
                rows(changed, others),
                rows(base, others),
            ),
        }
        for text, (got, expected) in tests.items():
            found = trial.difference(got, expected)
            if found:
                yield Fault(
                    found.leaf,
                    f"{text} every result ({phase}), but {found.text}. Compute each sample on its "
                    "own; what needs the whole batch belongs in `update_statistics`.",
                )
                return
    got = reset(trial.module, rows(trial.middle, order))
    expected = rows(reset(trial.module, trial.middle), order)
    found = trial.difference(got, expected, within="reset_state")
    if found:
        yield Fault(
            found.leaf,
            f"permuting the batch must permute the reset state, but {found.text}.",
        )


def replay(trial: Trial) -> Faults:
    """With unchanged weights the replay gives the outputs and states of the rollout."""
    for name in ("output", "regularization_loss", "next_state"):
        got, expected = (out._asdict()[name] for out in (trial.replayed, trial.rollout))
        found = trial.difference(got, expected, within=name)
        if found:
            yield Fault(
                found.leaf,
                f"the replay must give what the rollout gave, but {found.text}. Emit in "
                "`rollout_extras` what the replay cannot compute again (the value that was "
                "drawn, before any clipping), and move the state alike in both.",
            )
            return


def sequence(trial: Trial) -> Faults:
    """`unroll` equals a scan of the steps, in the rollout and in the replay."""
    in_rollout = unroll(trial.module, trial.start, trial.xs, trial.done, None)
    pairs = (
        ("with extras", trial.unrolled, trial.replayed),
        ("without extras", in_rollout, trial.rollout),
    )
    for phase, got, expected in pairs:
        found = trial.difference(got, expected)
        if found:
            yield Fault(
                found.leaf,
                f"`unroll` {phase} must equal a scan of the steps with resets, but {found.text}. "
                "Compare with `StatefulModule.unroll(module, ...)`.",
            )
            return


def keys(trial: Trial) -> Faults:
    """Noise differs between environments, from step to step, and after a reset."""
    if not trial.is_random:
        return
    n_steps, n_envs = trial.size.n_steps, trial.size.n_envs
    same = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1, :1], leaf.shape), trial.xs)
    never, always = (jnp.full((n_steps, n_envs), value) for value in (False, True))
    out = scan(trial.module, trial.start, same, never, None)
    table = _numbers(out.output, n_steps, n_envs)  # [T, B, numbers]
    by_env = np.moveaxis(table, 1, 0).reshape(n_envs, -1)
    is_continuous = np.unique(by_env[0]).size > n_steps // 2
    n_distinct = len(np.unique(by_env, axis=0))
    if n_distinct == 1 or (is_continuous and n_distinct < n_envs):
        yield Fault(
            "state",
            f"{n_envs} environments with equal inputs drew {n_distinct} different sequences of "
            "noise. Give each environment a key of its own (see `RandomModule`).",
        )
        return
    if not _holds_keys(trial.start):
        return
    restarted = scan(trial.module, trial.start, same, always, None)
    for text, series in (
        ("at every step", table),
        ("after every reset", _numbers(restarted.output, n_steps, n_envs)),
    ):
        if np.all(series == series[:1]):
            yield Fault(
                "state",
                f"the same noise was drawn {text}. Advance the count of draws in `next_state`, "
                "and leave it alone in `reset_state`.",
            )
            return


def _change_first(leaf: Tree) -> Tree:
    if not eqx.is_inexact_array(leaf):
        return leaf
    return leaf.at[0].add(jnp.asarray(0.7, leaf.dtype))


def _numbers(output: Tree, n_steps: int, n_envs: int) -> np.ndarray:
    """Everything in an output as one table `[T, B, numbers]`."""
    leaves = [as_numpy(leaf).reshape(n_steps, n_envs, -1) for leaf in jax.tree.leaves(output)]
    return np.concatenate([leaf.astype(np.float64) for leaf in leaves], axis=-1)


def _holds_keys(state: Tree) -> bool:
    return any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state))
