"""The values that an object holds, to see whether a call changes them."""

import types

import jax
import numpy as np
from jax.core import Tracer

from eqx_ppo._compare import as_numpy

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_DEPTH = 6


def fingerprint(value: object, name: str = "env") -> dict[str, object]:
    """What can be compared of an object's attributes, and of theirs, by name.

    Arrays and numbers by value, everything else that has no attributes by identity.
    """
    found: dict[str, object] = {}
    _visit(value, name, found, set(), _DEPTH)
    return found


def _visit(value: object, name: str, found: dict[str, object], seen: set[int], depth: int) -> None:
    if isinstance(value, _PLAIN):
        found[name] = value
    elif isinstance(value, Tracer):
        found[name] = id(value)
    elif isinstance(value, jax.Array | np.ndarray):
        values = as_numpy(value) if isinstance(value, jax.Array) else value
        found[name] = (values.dtype, values.shape, hash(values.tobytes()))
    elif isinstance(value, _OPAQUE) or depth == 0:
        found[name] = id(value)
    else:
        found[name] = (type(value), id(value))
        if id(value) not in seen:
            seen.add(id(value))
            for part, inner in _parts(value).items():
                _visit(inner, name + part, found, seen, depth - 1)


def _parts(value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return {f"[{key!r}]": inner for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{index}]": inner for index, inner in enumerate(value)}
    if isinstance(value, set | frozenset):
        return {"": tuple(sorted(map(repr, value)))}
    try:
        return {f".{name}": inner for name, inner in vars(value).items()}
    except TypeError:
        return {}
