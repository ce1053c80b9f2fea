"""Helpers on pytrees of arrays: per-env selection, reshaping of leading axes, records."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_ppo._checks import typed
from eqx_ppo._typing import Tree

_T = TypeVar("_T")


def expand_to(mask: Array, leaf: Array) -> Array:
    """Appends axes of length 1 to `mask` until it has the rank of `leaf`."""
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))


@typed
def tree_where(
    done: Bool[Array, " B"], on_true: Tree, on_false: Tree, *, single: Tree = None
) -> Tree:
    """Selects per environment between two states of the same structure.

    A leaf with an env axis (`[B, ...]`) takes row `b` from `on_true` where `done[b]`, else
    from `on_false`. A leaf without one (model data shared by all environments) is taken
    from `on_false`, the *stepped* state, whatever `done` says. Leaves that are the very
    same array on both sides are passed through.

    **Arguments:**

    - `done`: which environments take `on_true`.
    - `on_true`, `on_false`: for example the reset and the stepped state.
    - `single`: the (abstract) state of one environment, as `jax.eval_shape(env.reset, key)`
        gives it, or just the sequence of its leaves. A leaf has an env axis if its shape is
        `(B, *single.shape)`, and has none if its shape is that of `single`. Without it,
        scalars are taken as shared and every other leaf must lead with `B`.

    **Raises:** `ValueError` for a leaf that fits neither form, or two sides that differ in
    structure or shape.
    """
    leaves, treedef = jax.tree.flatten(on_false)
    others, other_treedef = jax.tree.flatten(on_true)
    if treedef != other_treedef:
        raise ValueError(
            "`tree_where` got two states of different structure. Both must come from the same "
            f"environment or module.\nOn true: {other_treedef}\nOn false: {treedef}"
        )
    axes = env_axes(on_false, done.shape[0], single)
    chosen = []
    for other, leaf, has_axis in zip(others, leaves, axes, strict=True):
        if other is leaf or not has_axis:
            chosen.append(leaf)
        elif jnp.shape(other) != jnp.shape(leaf):
            raise ValueError(
                f"`tree_where` got a leaf of two shapes: {jnp.shape(other)} on the true side, "
                f"{jnp.shape(leaf)} on the false side. Both states must come from the same "
                "environment or module."
            )
        else:
            chosen.append(jnp.where(expand_to(done, leaf), other, leaf))
    return jax.tree.unflatten(treedef, chosen)


def env_axes(state: Tree, batch: int, single: Tree = None) -> tuple[bool, ...]:
    """Tells for each leaf of a batched `state`, in order, whether it has an env axis.

    See `tree_where` for the rule and the error. The answer is a flat tuple, because a tree
    of booleans would put placeholders through the constructor of a user's state.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    if single is None:
        shapes = [jnp.shape(leaf)[1:] for _, leaf in leaves]
    else:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(single)]
    flags = []
    for (path, leaf), shape in zip(leaves, shapes, strict=True):
        actual = jnp.shape(leaf)
        if actual not in ((batch, *shape), shape):
            raise ValueError(
                f"The leaf `{jax.tree_util.keystr(path)}` has shape {actual}. Expected "
                f"{(batch, *shape)} (one row per environment) or {shape} (shared by all "
                "environments)."
            )
        flags.append(actual == (batch, *shape))
    return tuple(flags)


def take_rows(state: _T, index: Array) -> _T:
    """Takes the environments `index` out of a batched state, all leaves `[B, ...]`."""
    return jax.tree.map(lambda leaf: leaf[index], state)


def merge_time(tree: _T) -> _T:
    """Reshapes leaves `[T, B, *feat]` to `[T*B, *feat]`."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree
    )


def split_time(tree: _T, length: int) -> _T:
    """Reshapes leaves `[T*B, *feat]` to `[T, B, *feat]`, with `T = length`.

    **Raises:** `ValueError` for a scalar.
    """

    def split(leaf):
        if leaf.ndim == 0:
            raise ValueError(
                "A sequence returned a scalar where one value per step and environment was "
                "expected. Everything that a module returns, penalty and metrics included, must "
                "lead with the batch axis [B]: sum or average over features only."
            )
        return leaf.reshape(length, leaf.shape[0] // length, *leaf.shape[1:])

    return jax.tree.map(split, tree)


def replace(record: _T, **changes: object) -> _T:
    """A copy of a dataclass or NamedTuple with some fields changed; the original stays."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return dataclasses.replace(record, **changes)
    if isinstance(record, tuple):
        return record._replace(**changes)  # pyright: ignore[reportAttributeAccessIssue]
    raise TypeError(
        f"An environment state must be a dataclass (`flax.struct`, `chex`, `eqx.Module` or "
        f"plain) or a NamedTuple, so that its fields can be replaced, but got "
        f"`{type(record).__name__}`."
    )


def are_finite(tree: Tree) -> list[Bool[Array, "..."]]:
    """Which elements of the floating-point leaves of `tree` are finite."""
    return [jnp.isfinite(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]


def all_finite(tree: Tree) -> Bool[Array, ""]:
    """The same as `all_true(are_finite(tree))`, in few operations.

    `0 * x` is NaN where `x` is not finite (which `jax_debug_nans` reports), so one sum per shape
    tells, and no array of truth values is written.
    """
    zeros: dict[tuple, Array] = {}
    for leaf in filter(is_floating, jax.tree.leaves(tree)):
        zero, kind = leaf * jnp.zeros((), leaf.dtype), (leaf.shape, leaf.dtype)
        zeros[kind] = zeros[kind] + zero if kind in zeros else zero
    return all_true([jnp.sum(zero) == 0 for zero in zeros.values()])


def strong_type(leaf: Array) -> Array:
    """The same array with a definite dtype: weak types recompile."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def strong_arrays(tree: _T) -> _T:
    """The same tree, with every leaf (a number of Python's, too) an array of definite dtype."""
    return jax.tree.map(lambda leaf: strong_type(jnp.asarray(leaf)), tree)


def stay_finite(new: Tree, old: Tree) -> list[Bool[Array, "..."]]:
    """Which floating-point elements of `new` are finite, or were not in `old` either."""
    return [
        jnp.isfinite(leaf) | ~jnp.isfinite(before)
        for leaf, before in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if is_floating(leaf)
    ]


def all_true(tests: list[Bool[Array, "..."]]) -> Bool[Array, ""]:
    """Whether every element of every array is true.

    Arrays of one shape are combined before they are reduced: a reduction is several kernels to
    compile and to run.
    """
    by_shape: dict[tuple[int, ...], Array] = {}
    for test in tests:
        known = by_shape.get(test.shape)
        by_shape[test.shape] = test if known is None else known & test
    reduced = [jnp.all(test) for test in by_shape.values()]
    return jnp.all(jnp.stack(reduced)) if reduced else jnp.array(True)


def can_hold(dtype: jnp.dtype, value: float) -> bool:
    """Whether an array of `dtype` can hold `value` without cutting anything off it."""
    if dtype == jnp.bool_:
        return value in (0, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        return float(value).is_integer() and jnp.iinfo(dtype).min <= value <= jnp.iinfo(dtype).max
    return True


def is_floating(leaf: object) -> bool:
    """Whether `leaf` is an array of floating-point (or complex) numbers."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
