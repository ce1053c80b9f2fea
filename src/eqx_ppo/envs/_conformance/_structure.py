"""Rules on what must agree between the functions of an environment; these only trace them."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._rules import Fault, Faults
from eqx_ppo._typing import Tree
from eqx_ppo.envs._batched import holds
from eqx_ppo.envs._conformance._actions import declared
from eqx_ppo.envs._conformance._shapes import among
from eqx_ppo.envs._conformance._sketch import Leaf, Sketch, sketch
from eqx_ppo.envs._conformance._trial import Trial
from eqx_ppo.envs._protocol import SupportsCarryOver, SupportsStagger


class _Hook(NamedTuple):
    """A function besides `reset` and `step`, what its result is called, and what it is."""

    function: str
    name: str
    found: Sketch


def closed_state(trial: Trial) -> Faults:
    """Everything that returns a state returns one of the structure and shapes of `reset`'s."""
    before = trial.reset_sketch
    yield from _unlike(before, trial.stepped.sketch, "step", "next_state")
    for function, name, found in _hooks(trial, trial.abstract_leaves):
        yield from _unlike(before, found, function, name)


def _hooks(trial: Trial, leaves: Sequence[jax.ShapeDtypeStruct]) -> Iterator[_Hook]:
    """What the environment has of `stagger` and `carry_over`, traced on such states."""
    env, treedef, key = trial.env, trial.reset_sketch.treedef, trial.abstract_key

    def rebuilt(leaves: Tree) -> Tree:
        return jax.tree.unflatten(treedef, leaves)

    if isinstance(env, SupportsStagger):
        found = sketch(lambda leaves, key: env.stagger(rebuilt(leaves), key), leaves, key)
        yield _Hook("stagger", "staggered", found)
    if isinstance(env, SupportsCarryOver):
        found = sketch(
            lambda ended, fresh: env.carry_over(rebuilt(ended), rebuilt(fresh)), leaves, leaves
        )
        yield _Hook("carry_over", "fresh", found)


def _unlike(before: Sketch, after: Sketch, function: str, name: str) -> Faults:
    if before.treedef != after.treedef:
        names = [
            {leaf.name for leaf in found.leaves} | {path for path, _ in found.others}
            for found in (before, after)
        ]
        lost, added = sorted(names[0] - names[1]), sorted(names[1] - names[0])
        parts = [f"lacks {among(lost)}"] if lost else []
        parts += [f"adds {among(added)}"] if added else []
        parts = parts or ["has another type, static field or container"]
        yield Fault(
            name + (added or lost or [""])[0],
            f"`{function}` must return a state of the structure that `reset` returns, but its "
            f"state {' and '.join(parts)}. Put every key of `info` and `metrics` into `reset` "
            "too, and keep what changes in arrays.",
        )
        return
    for old, new in zip(before.leaves, after.leaves, strict=True):
        if old.shape != new.shape:
            yield Fault(
                name + new.name,
                f"`{function}` must keep the shape that `reset` gives it, but it is {new} instead "
                f"of {old}.",
            )


def dtypes(trial: Trial) -> Faults:
    """The dtypes of `reset` and `step` can be joined without loss (see the advice otherwise).

    What `stagger` and `carry_over` return fits into them.
    """
    for old, new in pairs(trial):
        if old.dtype == new.dtype:
            continue
        joined = join(old, new)
        if joined is None or _loses(old.dtype, joined) or _loses(new.dtype, joined):
            kept = "nothing holds both" if joined is None else f"joined, {joined} loses numbers"
            yield Fault(
                f"next_state{new.name}",
                f"is {new} after `step` and {old} after `reset`, and {kept}. Give it one dtype in "
                "both.",
            )
            return
    expected = [_joined(old, new) for old, new in pairs(trial)]
    for function, name, found in _hooks(trial, expected):
        for old, new in zip(expected, found.leaves, strict=True):
            if not holds(old.dtype, new.dtype):
                yield Fault(
                    name + new.name,
                    f"is {new} after `{function}`, but {old.dtype} after `reset` and `step`, which "
                    "cannot hold it. Cast it.",
                )


def pairs(trial: Trial) -> list[tuple[Leaf, Leaf]]:
    """Every leaf as `reset` and as `step` returns it."""
    return list(zip(trial.reset_sketch.leaves, trial.stepped.sketch.leaves, strict=True))


def join(old: Leaf, new: Leaf) -> np.dtype | None:
    """The dtype that the library gives a leaf of two dtypes, or `None` if there is none."""
    if old.is_key or new.is_key:
        return None
    try:
        return jnp.promote_types(old.dtype, new.dtype)
    except jax.dtypes.TypePromotionError:  # under strict promotion
        return None


def _joined(old: Leaf, new: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(old.shape, old.dtype if old.dtype == new.dtype else join(old, new))


def _loses(dtype: np.dtype, joined: np.dtype) -> bool:
    """Whether numbers of usual size change in the cast: 32-bit integers in a float do not."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return False
    if jnp.issubdtype(joined, jnp.integer):
        narrow, wide = jnp.iinfo(dtype), jnp.iinfo(joined)
        return narrow.min < wide.min or narrow.max > wide.max
    return jnp.finfo(joined).bits < min(32, jnp.iinfo(dtype).bits * 2)


def sizes(trial: Trial) -> Faults:
    """`observation_size` and `action_size`, where there are such, are those of the real thing."""
    observations = [leaf.shape for leaf in trial.reset_sketch.within("obs")]
    actions = jax.tree.leaves(trial.abstract_action)
    for name, shapes, kind in (
        ("observation_size", observations, "observations"),
        (
            "action_size",
            [None if _is_discrete(leaf) else leaf.shape for leaf in actions],
            "actions",
        ),
    ):
        size = declared(trial.env, name)
        if size is not None and not _fits(size, shapes):
            yield Fault(
                name,
                f"says {size!r}, but {kind} have {_spoken(shapes)}. Networks are built by it: give "
                f"the size of the last axis, in the tree of the {kind}.",
            )


def _is_discrete(leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether an action is a choice, whose size may be the number of choices."""
    return jnp.issubdtype(leaf.dtype, jnp.integer)


def _fits(size: Tree, shapes: list[tuple[int, ...] | None]) -> bool:
    each = jax.tree.leaves(size)  # a tuple may hold a size for each part of a tuple
    if len(each) == len(shapes) and all(map(_fits_one, each, shapes)):
        return True
    said = jax.tree.leaves(size, is_leaf=_is_shape)
    if len(said) == len(shapes):
        return all(map(_fits_one, said, shapes))
    if len(said) != 1 or not isinstance(said[0], int | np.integer):
        return False
    known = [shape for shape in shapes if shape is not None]
    return len(known) < len(shapes) or said[0] == sum(map(math.prod, known))  # of all, flattened


def _is_shape(node: Tree) -> bool:
    return isinstance(node, tuple | list) and all(isinstance(n, int | np.integer) for n in node)


def _fits_one(size: Tree, shape: tuple[int, ...] | None) -> bool:
    if shape is None:
        return True
    if isinstance(size, tuple | list):
        return tuple(size) == shape
    return size == (shape[-1] if shape else 1)


def _spoken(shapes: list[tuple[int, ...] | None]) -> str:
    what = "shape" if len(shapes) == 1 else "the shapes"
    known = [str(list(shape)) for shape in shapes if shape is not None]
    return f"{what} {', '.join(known) or 'of choices'}"
