"""Comparing trees of arrays, and saying where they differ: for the checkers of users' own code."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_ppo._typing import Tree


class Difference(NamedTuple):
    """A leaf by which two trees differ, and what is different."""

    leaf: str
    text: str


def signature(leaf: Tree) -> str:
    """Dtype, shape and weakness of a leaf: what decides on a recompilation."""
    weak = " (weakly typed)" if jax.typeof(leaf).weak_type else ""
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}{weak}"


def named_leaves(
    tree: Tree, prefix: str = "", is_leaf: Callable[[Tree], bool] | None = None
) -> list[tuple[str, Tree]]:
    """The leaves of a tree with their paths, as one writes them: `next_state['h']`."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [((prefix + jax.tree_util.keystr(path)).removeprefix("."), leaf) for path, leaf in flat]


def mismatches(got: Tree, expected: Tree, within: str = "") -> Iterator[Difference]:
    """Leaves in which two trees differ in structure, shape, dtype or weak type."""
    one, two = named_leaves(got, within), named_leaves(expected, within)
    if jax.tree.structure(got) != jax.tree.structure(expected):
        names = sorted({name for name, _ in one} ^ {name for name, _ in two})
        yield Difference(
            names[0] if names else within,
            f"the structure {jax.tree.structure(got)} instead of {jax.tree.structure(expected)}",
        )
        return
    for (name, new), (_, old) in zip(one, two, strict=True):
        if signature(new) != signature(old):
            yield Difference(name, f"{signature(new)} instead of {signature(old)}")


def differences(
    got: Tree, expected: Tree, tolerance: float, within: str = ""
) -> Iterator[Difference]:
    """Leaves in which two trees of arrays differ, in kind or by more than the tolerance."""
    different = list(mismatches(got, expected, within))
    if different:
        yield from different
        return
    pairs = zip(named_leaves(got, within), jax.tree.leaves(expected), strict=True)
    for (name, new), old in pairs:
        a, b = as_numpy(new), as_numpy(old)
        if np.issubdtype(a.dtype, np.inexact) or a.dtype.kind == "V":
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            a, b = a.astype(wide), b.astype(wide)
            same = np.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
            by = f", by up to {np.nanmax(np.abs(a - b)):.1e}" if not same.all() else ""
        else:
            same, by = a == b, ""
        if not np.all(same):
            yield Difference(name, f"{np.sum(~same)} of {same.size} numbers differ{by}")


def as_numpy(leaf: Array) -> np.ndarray:
    """The numbers of an array; those of a PRNG key are its words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def snapshot(tree: Tree) -> Tree:
    """The values of a tree, in memory of their own."""
    return jax.tree.map(lambda leaf: as_numpy(leaf).copy() if eqx.is_array(leaf) else leaf, tree)


def is_unchanged(tree: Tree, before: Tree) -> bool:
    """Whether a tree still has the values of its snapshot."""
    return jax.tree.structure(tree) == jax.tree.structure(before) and all(
        map(_is_same, jax.tree.leaves(snapshot(tree)), jax.tree.leaves(before))
    )


def _is_same(one: Tree, two: Tree) -> bool:
    if not isinstance(one, np.ndarray):
        return one is two or one == two
    return np.array_equal(one, two, equal_nan=bool(np.issubdtype(one.dtype, np.inexact)))
