"""What differs by more than rounding: comparisons of leaves, and how rounding is amplified."""

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._tree import is_floating
from eqx_ppo._typing import EnvState

_TOLERANCE = 1e-4
_EPSILONS = 8  # of a dtype, where that is more than the tolerance
_NUDGE = 1e-6  # relative, some ten times the rounding of float32
_AMPLIFIED = 30.0  # what rounding may do, in terms of what a nudge does
_OF_SPREAD = 0.02  # what rounding may do to a reset, in terms of how resets differ


def nudged(state: EnvState, sign: float) -> EnvState:
    """The same state, with every floating-point number moved a little, up and down in turn."""

    def nudge(leaf):
        if not is_floating(leaf):
            return leaf
        values = np.asarray(leaf)
        signs = np.where(np.arange(values.size) % 2, 1.0, -1.0).reshape(values.shape)
        moved = values.astype(np.float64 if values.dtype.kind != "c" else np.complex128)
        sizes = np.where(np.isfinite(moved), np.abs(moved), 0.0)
        return jnp.asarray((moved + sign * _NUDGE * signs * (0.1 + sizes)).astype(values.dtype))

    return jax.tree.map(nudge, state)


def _is_inexact(values: np.ndarray) -> bool:
    return jnp.issubdtype(values.dtype, jnp.inexact)


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def slack_of_spread(values: np.ndarray) -> float:
    """How far rounding may move a leaf `[B, ...]` of a reset.

    Some of what the rows differ by: a reset may run physics for a while, and one cannot nudge
    what it starts from. Integers may be counts of iterations, and others do not round.
    """
    if not _is_inexact(values) and values.dtype.kind != "i":
        return 0.0
    return _OF_SPREAD * _distance(values, np.broadcast_to(values[:1], values.shape))


def slack_of_nudge(new: np.ndarray, old: np.ndarray) -> float:
    """How far rounding may move a leaf, if `new` is it after a nudge."""
    return _AMPLIFIED * _distance(new, old)


def _distance(new: np.ndarray, old: np.ndarray) -> float:
    if not _is_inexact(new):
        return float(np.any(new != old))
    with np.errstate(invalid="ignore"):
        apart = np.abs(_wide(new) - _wide(old))
    return float(np.max(apart, initial=0.0, where=np.isfinite(apart)))


def _same(new: np.ndarray, old: np.ndarray, limit: float) -> np.ndarray:
    if not _is_inexact(new):
        return np.asarray(new == old)
    a, b = _wide(new), _wide(old)
    with np.errstate(invalid="ignore"):
        return (np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b))


def unlike(new: np.ndarray, old: np.ndarray, slack: float) -> str:
    """How two leaves differ, if they do by more than rounding and `slack`."""
    if not _is_inexact(new):
        return "" if slack > 0.0 or np.array_equal(new, old) else _count(new, old, new == old)
    tolerance = max(_TOLERANCE, _EPSILONS * float(jnp.finfo(new.dtype).eps))
    scale = np.max(np.abs(_wide(old)), initial=0.0, where=np.isfinite(_wide(old)))
    same = _same(new, old, tolerance * (1.0 + float(scale)) + slack)
    return "" if same.all() else _count(new, old, same)


def not_identical(new: np.ndarray, old: np.ndarray) -> str:
    """How two leaves differ, if they are not the same bit by bit."""
    same = _same(new, old, 0.0)
    return "" if same.all() else _count(new, old, same)


def _count(new: np.ndarray, old: np.ndarray, same: np.ndarray) -> str:
    same = np.asarray(same)
    by = f", by up to {_distance(new, old):.1e}" if _is_inexact(new) else ""
    return f"{np.sum(~same)} of {same.size} numbers differ{by}"
