"""Shape errors that say where, what was expected and what came."""

from collections.abc import Iterator
from contextlib import contextmanager

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_ppo._typing import Tree

_NOTE = "In module `network"


@contextmanager
def at_path(segment: str, module: object, x: Tree = None) -> Iterator[None]:
    """Adds the place of a child, and its input `x` if given, to any error that passes.

    Nested containers build one note, such as ``In module `network.layers[1].action` ``, each
    putting its own `segment` in front of what the inner ones wrote.
    """
    try:
        yield
    except Exception as error:
        notes = error.__dict__.setdefault("__notes__", [])
        if notes and notes[-1].startswith(_NOTE):
            notes[-1] = _NOTE + segment + notes[-1].removeprefix(_NOTE)
        else:
            seen = "" if x is None else f", whose input was {eqx.tree_pformat(x, width=1000)}"
            error.add_note(f"{_NOTE}{segment}` (`{type(module).__name__}`){seen}.")
        raise


def place_of(error: Exception, root: str) -> str:
    """The place that `at_path` gave an error below `root`."""
    for note in reversed(error.__dict__.get("__notes__", [])):
        if note.startswith(_NOTE):
            return root + note.removeprefix(_NOTE).split("`")[0]
    return root


def check_lead(what: str, tree: Tree, lead: tuple[int, ...]) -> None:
    """Checks that every leaf of `tree` starts with the axes `lead` (`(B,)` or `(T, B)`)."""
    names = "(B,)" if len(lead) == 1 else "(T, B)"
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape = jnp.shape(leaf)
        if shape[: len(lead)] != lead:
            raise ValueError(
                f"{what}{_where(path)} must lead with {names} = {lead}, but has shape {shape}. "
                "Every leaf carries one row per environment; give a scalar one value per "
                "environment."
            )


def check_closed(what: str, got: Tree, expected: Tree) -> None:
    """Checks that a module's new state has structure, shapes and dtypes of its old one."""
    if jax.tree.structure(got) != jax.tree.structure(expected):
        raise ValueError(
            f"{what} must have the structure of the incoming state, "
            f"{jax.tree.structure(expected)}, but has {jax.tree.structure(got)}."
        )
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (path, old), new in zip(paths, jax.tree.leaves(got), strict=True):
        before, after = _describe(old), _describe(new)
        if before != after:
            raise ValueError(
                f"{what}{_where(path)} must have the dtype and shape of the incoming state, "
                f"{before}, but has {after}. Cast it, or start from the right ones in "
                "`initialize_state`."
            )


def check_features(module: object, x: Array, features: tuple[int, ...], where: str = "") -> None:
    """Checks that `x` is one `[B, *features]` array."""
    shape = jnp.shape(x)
    if len(shape) != 1 + len(features) or shape[1:] != features:
        expected = ", ".join(["B", *map(str, features)])
        raise ValueError(
            f"`{type(module).__name__}` expected its input{where} to have shape [{expected}], "
            f"but got {list(shape)}. Check the size that it was built with against what comes "
            "before it."
        )


def check_keys(module: object, got: Tree, expected: Tree) -> None:
    """Checks that two trees have one structure, and names the leaves that differ if not."""

    def paths(tree):
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path) for path, _ in flat}

    if jax.tree.structure(got) == jax.tree.structure(expected):
        return
    missing, extra = sorted(paths(expected) - paths(got)), sorted(paths(got) - paths(expected))
    raise ValueError(
        f"`{type(module).__name__}` got an input of the wrong structure: missing "
        f"{missing or 'nothing'}, unexpected {extra or 'nothing'}. Expected the structure "
        f"{jax.tree.structure(expected)}, got {jax.tree.structure(got)}."
    )


def _describe(leaf: Tree) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _where(path: tuple[object, ...]) -> str:
    return f" at `{jax.tree_util.keystr(path)}`" if path else ""
