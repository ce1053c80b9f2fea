"""The structure of a network in words: what is where, besides the numbers.

Two networks with equal fingerprints are made of the same modules, functions, flags and
arrays of the same shapes and dtypes, in the same order.
"""

import dataclasses
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import GetAttrKey, SequenceKey

from eqx_ppo._typing import Tree
from eqx_ppo.networks import Container, Sequential, StatefulModule

Fingerprint: TypeAlias = dict[str, str]
"""Paths, such as `network.layers[1].kernel`, to what is there, such as `float32[3, 64]`."""

_CODE = re.compile(r" \(code (\S+) \w+\)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN = 5
_LONGEST = 160


class _Entry(NamedTuple):
    path: str
    text: str
    is_array: bool = False


def fingerprint(network: StatefulModule) -> Fingerprint:
    """Every module, array, function and static field of a network, by its path."""
    return {entry.path: entry.text for entry in _walk(network, "network")}


def array_paths(network: StatefulModule) -> list[str]:
    """The paths of the arrays, in the order of `jax.tree.leaves`."""
    return [entry.path for entry in _walk(network, "network") if entry.is_array]


def array_text(array: Tree) -> str:
    """Dtype and shape, such as `float32[3, 64]`; of a key `key<fry>[]`."""
    return _array_text(array.dtype, array.shape)


@functools.lru_cache(maxsize=10_000)
def _array_text(dtype: Tree, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def differences(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """One line for every place that differs, without those inside it."""
    lines: list[str] = []
    reported: list[str] = []
    for path in dict.fromkeys([*saved, *here]):
        left, right = saved.get(path), here.get(path)
        if _agree(left, right) or any(_is_inside(path, other) for other in reported):
            continue
        reported.append(path)
        lines.append(
            f"`{path}`: {_shown(left) or 'nothing'} in the checkpoint, "
            f"{_shown(right) or 'nothing'} here"
        )
    return lines


def first_differences(saved: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The first few differences as an indented list, and how many more there are."""
    lines = differences(saved, here)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"\n  {line}" for line in lines[:_SHOWN] + more)


def _is_inside(path: str, other: str) -> bool:
    return path.startswith((other + ".", other + "["))


def _shown(text: str | None) -> str | None:
    if text is None or len(text) <= _LONGEST:
        return text
    return text[:_LONGEST] + " ..."


def _agree(saved: str | None, here: str | None) -> bool:
    """Whether two texts are the same; digests of code are those of one version of Python."""
    if saved is None or here is None:
        return saved is here
    if set(_CODE.findall(saved)) != set(_CODE.findall(here)):
        saved, here = _CODE.sub("", saved), _CODE.sub("", here)
    return saved == here


# --- The walk -----------------------------------------------------------------------------


def _walk(node: Tree, path: str) -> Iterator[_Entry]:
    """The node itself, its static fields, and everything inside it in the order of JAX."""
    if isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        yield _Entry(path, array_text(node), is_array=True)
        return
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)[0]
    if len(children) == 1 and children[0][0] == ():  # no node of a tree
        yield _Entry(path, _text(node))
        return
    yield _Entry(path, "None" if node is None else type(node).__qualname__)
    names = {key.name for (key, *_), _ in children if isinstance(key, GetAttrKey)}
    if dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            if field.name not in names and not isinstance(node, Sequential):
                yield _Entry(f"{path}.{field.name}", _text(vars(node)[field.name]))
    for keys, child in children:
        if isinstance(node, Container) and keys == (GetAttrKey("modules"),):
            for name, module in zip(node.names, node.modules, strict=True):
                yield from _walk(module, path + node.segment(name))
        else:
            yield from _walk(child, path + _segment(keys))


def _segment(keys: tuple[object, ...]) -> str:
    match keys:
        case (GetAttrKey(name=name),):
            return f".{name}"
        case (SequenceKey(idx=index),):
            return f"[{index}]"
    return jax.tree_util.keystr(keys)


# --- Words --------------------------------------------------------------------------------


def _text(value: Tree) -> str:
    """A value without arrays in words that are the same in every process."""
    match value:
        case functools.partial():
            return f"partial{_text((value.func, value.args, value.keywords))}"
        case dict():
            return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())}}}"
        case tuple() | list():
            kind = "" if type(value) in (tuple, list) else type(value).__qualname__
            return f"{kind}({', '.join(map(_text, value))})"
        case jax.Array() | np.ndarray():
            return array_text(value)
    if dataclasses.is_dataclass(value) and not callable(value):
        return f"{type(value).__qualname__}{_text(vars(value))}"
    return _name(value) if callable(value) else _plain(value)


def _name(function: Callable) -> str:
    """The name of a function or class, without its module, which may move."""
    if isinstance(function, types.FunctionType) and "<" in function.__qualname__:
        return function.__qualname__ + _code(function)
    try:
        return function.__qualname__
    except AttributeError:  # an object that can be called
        return _plain(function)


def _plain(value: object) -> str:
    return _ADDRESS.sub("", eqx.tree_pformat(value, width=10_000))


def _code(function: types.FunctionType) -> str:
    """A digest of what an unnamed or local function does, for this version of Python."""
    digest = hashlib.sha256()

    def add(code: types.CodeType) -> None:
        digest.update(code.co_code)
        digest.update(repr(code.co_names).encode())
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                add(constant)
            elif isinstance(constant, frozenset):  # whose order differs between processes
                digest.update(repr(sorted(map(repr, constant))).encode())
            else:
                digest.update(repr(constant).encode())

    add(function.__code__)
    for cell in function.__closure__ or ():
        seen = cell.cell_contents
        is_function = isinstance(seen, types.FunctionType)  # possibly the function itself
        digest.update((seen.__qualname__ if is_function else _text(seen)).encode())
    digest.update(_text(function.__defaults__).encode())
    return f" (code {sys.implementation.cache_tag} {digest.hexdigest()[:12]})"
