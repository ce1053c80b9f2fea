"""Settings as readable JSON, and back."""

import contextlib
import dataclasses
import enum
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import EvalConfig, LoggingLevel, PPOConfig
from eqx_ppo.envs import CachedReset, FreshReset, HostReset, PooledReset, ResetStrategy
from eqx_ppo.training._config import TrainConfig

_STRATEGIES = {kind.__name__: kind for kind in (FreshReset, PooledReset, CachedReset, HostReset)}


def config_to_json(config: TrainConfig) -> dict[str, Tree]:
    """The settings of a run as nested dicts, lists, strings, numbers, booleans and `None`.

    Every field is there, by name. Strict JSON: a float that is infinite becomes the string
    `"inf"`. Reset strategies and arrays are dicts with a `"kind"`, logging levels lists of
    names. A schedule or a reset strategy of your own is recorded by its name, and cannot be
    read back.
    """
    return _encode_record(config)


def config_from_json(data: Mapping[str, Tree]) -> TrainConfig:
    """The settings that `config_to_json` has written.

    A field that is missing has its default. Settings made of numbers, choices, arrays and
    the library's own reset strategies come back exactly.

    **Raises:** `ValueError` for an unknown field, a value out of range, and what is recorded
    by its name alone (a schedule): put `None` in its place, and the schedule back with
    `dataclasses.replace`.
    """
    return _decode_record(TrainConfig, data, "TrainConfig")


# --- To JSON ------------------------------------------------------------------------------


def _encode_record(record: object) -> dict[str, Tree]:
    return {
        field.name: _encode(vars(record)[field.name])
        for field in dataclasses.fields(record)  # pyright: ignore[reportArgumentType]
    }


def _encode(value: object) -> Tree:
    encoded: Tree = {"kind": "code", "description": _name(value)}
    match value:
        case None | bool() | str():
            encoded = value
        case enum.Flag():
            encoded = [member.name for member in value]
        case int() | np.integer():
            encoded = int(value)
        case float() | np.floating():
            encoded = float(value) if math.isfinite(value) else str(float(value))
        case tuple() | list():
            encoded = [_encode(part) for part in value]
        case np.ndarray() | jax.Array():
            encoded = {"kind": "array", "dtype": str(value.dtype), "value": value.tolist()}
        case ResetStrategy() if type(value) in _STRATEGIES.values():
            encoded = {"kind": type(value).__name__, **_encode_record(value)}
        case TrainConfig() | PPOConfig() | EvalConfig():
            encoded = _encode_record(value)
    return encoded


def _name(value: object) -> str:
    """`cosine_decay_schedule.<locals>.schedule`, or the representation without addresses."""
    if callable(value):
        with contextlib.suppress(AttributeError):
            return value.__qualname__
    return repr(value).split(" at 0x")[0]


# --- From JSON ----------------------------------------------------------------------------


def _decode_record(kind: Callable[..., Tree], data: Tree, where: str) -> Tree:
    if not isinstance(data, Mapping):
        raise ValueError(f"`{where}` must be an object with fields, but got {data!r}.")
    known = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ValueError(f"`{where}` has no fields {unknown}; its fields are {known}.")
    values = {name: _decode(name, value, f"{where}.{name}") for name, value in data.items()}
    return kind(**values)


def _decode(name: str, value: Tree, where: str) -> Tree:
    decode = _DECODERS.get(name)
    if decode is not None and value is not None:
        return decode(value, where)
    match value:
        case {"kind": "array", "dtype": dtype, "value": numbers}:
            return jnp.asarray(numbers, jnp.dtype(dtype))
        case {"kind": "code", "description": description}:
            raise _unreadable(where, description)
        case "inf" | "-inf" | "nan":
            return float(value)
    return value


def _decode_level(names: Tree, where: str) -> LoggingLevel:
    level = LoggingLevel.NONE
    if not isinstance(names, list | tuple):
        raise ValueError(f"`{where}` must be a list of families, but got {names!r}.")
    for name in names:
        if name not in LoggingLevel.__members__:
            raise ValueError(
                f"`{where}` has no family {name!r}; there are {list(LoggingLevel.__members__)}."
            )
        level |= LoggingLevel[name]
    return level


def _decode_strategy(data: Tree, where: str) -> ResetStrategy:
    if not isinstance(data, Mapping):
        raise ValueError(f'`{where}` must be an object with a "kind", but got {data!r}.')
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind == "code":
        raise _unreadable(where, fields.get("description"))
    if kind not in _STRATEGIES:
        raise ValueError(
            f"`{where}` has the unknown kind {kind!r}; there are {sorted(_STRATEGIES)}."
        )
    return _decode_record(_STRATEGIES[kind], fields, where)


def _unreadable(where: str, description: object) -> ValueError:
    return ValueError(
        f"`{where}` was {description}, which is code and cannot be read from a file. Put `None` "
        "in its place, and give it again with `dataclasses.replace`."
    )


_DECODERS: dict[str, Callable[[Tree, str], Tree]] = {
    "ppo": lambda data, where: _decode_record(PPOConfig, data, where),
    "eval": lambda data, where: _decode_record(EvalConfig, data, where),
    "reset_strategy": _decode_strategy,
    "logging_level": _decode_level,
    "logging_percentiles": lambda data, _: tuple(data),
}
