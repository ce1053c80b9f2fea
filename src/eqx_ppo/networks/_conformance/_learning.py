"""Rules on what moves a module: statistics, gradients, and what is compiled anew."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._compare import as_numpy, is_unchanged, mismatches, named_leaves, snapshot
from eqx_ppo._rules import Fault, Faults
from eqx_ppo._typing import Tree
from eqx_ppo.networks._conformance._trial import (
    Trial,
    gradient_of,
    nudged,
    reset,
    scan,
    unroll,
    visible,
)
from eqx_ppo.networks._frozen import Statistics, trainable
from eqx_ppo.networks._module import StatefulModule

_NUDGES = (0.1, 1.0)
_LARGE = 1e3


def statistics(trial: Trial) -> Faults:
    """`update_statistics` gives a new module of the same kind, in which they have moved."""
    module = trial.module
    before = snapshot(module)
    new = module.update_statistics(trial.rollout.rollout_extras)
    if not is_unchanged(module, before):
        yield Fault("", "`update_statistics` changed the module in place. Return a new one.")
        return
    if type(new) is not type(module):
        yield Fault("", f"`update_statistics` must return the new module, not `{type(new)}`.")
        return
    arrays = [eqx.filter(tree, eqx.is_array) for tree in (new, module)]
    kinds = list(mismatches(*arrays))
    if kinds or jax.tree.structure(new) != jax.tree.structure(module):
        leaf, text = kinds[0] if kinds else ("", "a static field has changed")
        yield Fault(leaf, f"`update_statistics` must keep the module's structure: {text}.")
        return
    mask = trainable(module)
    moved = trial.difference(eqx.filter(new, mask), eqx.filter(module, mask), exact=True)
    if moved:
        yield Fault(moved.leaf, "`update_statistics` moved an array that is trained.")
    for name, node in _statistics(module):
        if _matters(trial, name, nudged(node, 0.5)) and not _is_learned(trial, name, new):
            yield Fault(
                name,
                "these statistics are used, but a rollout did not move them. Emit what they "
                "learn from in `rollout_extras`, and pass each child its own extras in "
                "`update_statistics` (`Container` does).",
            )


def _matters(trial: Trial, name: str, node: Tree, *, exact: bool = False) -> bool:
    """Whether the rollout is another one with `node` in the place of the one at `name`."""
    other = eqx.tree_at(_is_at(name), trial.module, node)
    out = scan(other, trial.start, trial.xs, trial.done, None)
    return trial.difference(visible(out), visible(trial.rollout), exact=exact) is not None


def _is_learned(trial: Trial, name: str, new: StatefulModule) -> bool:
    """Whether an update moved what is used, if not with these extras then with large ones.

    Some statistics, such as the largest value so far, do not move with every rollout.
    """
    if _matters(trial, name, dict(_statistics(new))[name], exact=True):
        return True
    extras = jax.tree.map(
        lambda leaf: leaf * jnp.asarray(_LARGE, leaf.dtype) if eqx.is_inexact_array(leaf) else leaf,
        trial.rollout.rollout_extras,
    )
    large = trial.module.update_statistics(extras)
    return _matters(trial, name, dict(_statistics(large))[name], exact=True)


def gradients(trial: Trial) -> Faults:
    """Gradients are finite, the same by `unroll`, and reach every leaf that matters."""
    given = (trial.start, trial.xs, trial.done, trial.rollout.rollout_extras)
    grads = gradient_of(trial.module, *given, True)
    for name, grad in named_leaves(grads):
        if not bool(jnp.all(jnp.isfinite(grad))):
            yield Fault(
                name,
                "the gradient is not finite. Look for a `where` with NaN or infinity on the side "
                "that is not taken, a square root at 0, or a norm of zeros.",
            )
            return
    by_scan = gradient_of(trial.module, *given, False)
    scale = max([float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(by_scan) if g.size] or [1.0])
    sides = [jax.tree.map(lambda g: g / (1.0 + scale), side) for side in (grads, by_scan)]
    found = trial.difference(*sides)
    if found:
        yield Fault(
            found.leaf,
            f"the gradient through `unroll` must equal that through the steps, but {found.text}.",
        )
        return
    silent = _without_gradient(grads)
    for by in _NUDGES if silent else ():
        silent &= _without_gradient(gradient_of(_nudged_params(trial.module, by), *given, True))
    for name in sorted(silent):
        if _depends_on(trial, name, trial.rollout.rollout_extras):
            yield Fault(
                name,
                "the output depends on this array, but no gradient reaches it. Remove the "
                "`stop_gradient` or rounding on the way, or, if it is not to be trained, put it "
                "into a `Constant`.",
            )
        elif _depends_on(trial, name, None):
            yield Fault(
                name,
                "the output of the rollout depends on this array, but that of the replay does "
                "not, so no gradient reaches it. Compute outputs and log-likelihoods anew in the "
                "replay and store only what was drawn, or, if it is not to be trained, put it "
                "into a `Constant`.",
            )


def _without_gradient(grads: Tree) -> set[str]:
    return {name for name, grad in named_leaves(grads) if not np.any(as_numpy(grad))}


def _depends_on(trial: Trial, name: str, extras: Tree) -> bool:
    """Whether the output of a sequence is another one when the array at `name` is moved."""

    def run(module):
        started = reset(module, trial.start)
        return visible(unroll(module, started, trial.xs, trial.done, extras))

    where, base = _is_at(name), run(trial.module)
    array = where(trial.module)
    moved = [eqx.tree_at(where, trial.module, nudged(array, by)) for by in _NUDGES]
    return any(trial.difference(run(module), base) is not None for module in moved)


def retracing(trial: Trial) -> Faults:
    """The next step and the next iteration use what is compiled already."""
    traces = 0

    @eqx.filter_jit
    def run(module, state, x):
        nonlocal traces
        traces += 1
        return module(state, x, None)

    @eqx.filter_jit
    def update(module, extras):
        return module.update_statistics(extras)

    first = run(trial.module, trial.start, trial.x)
    run(update(trial.module, trial.rollout.rollout_extras), first.next_state, trial.x)
    if traces > 1:
        yield Fault(
            "",
            "the next iteration would be compiled anew, because a field that is not an array has "
            "changed. Keep what moves in arrays, in the state or in `Statistics`.",
        )


def _is_statistics(node: Tree) -> bool:
    return isinstance(node, Statistics)


def _statistics(module: Tree) -> list[tuple[str, Statistics]]:
    found = named_leaves(module, is_leaf=_is_statistics)
    return [(name, node) for name, node in found if isinstance(node, Statistics)]


def _is_at(name: str) -> Callable[[Tree], Tree]:
    """A selector, for `equinox.tree_at`, of the node at a path."""
    return lambda module: dict(named_leaves(module, is_leaf=_is_statistics))[name]


def _nudged_params(module: Tree, by: float) -> Tree:
    """The module with every trained array moved."""
    params, static = eqx.partition(module, trainable(module))
    return eqx.combine(nudged(params, by), static)
