"""Exact counts past 2**32, without 64-bit integers on the device."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt32

from eqx_ppo._checks import typed


class Counter(NamedTuple):
    """An unsigned 64-bit count in two 32-bit words.

    float32 stops counting at 2**24 and int32 at 2**31; environment steps pass both.
    `int(counter)` gives the exact Python integer on the host.
    """

    high: UInt32[Array, "..."]
    low: UInt32[Array, "..."]

    def __int__(self) -> int:
        return (int(self.high) << 32) + int(self.low)


def new_counter(value: int = 0) -> Counter:
    """A counter that starts at `value` (a Python integer, at least 0)."""
    if value < 0:
        raise ValueError(f"A `Counter` cannot be negative, but got {value}.")
    words = (value >> 32, value & 0xFFFFFFFF)
    return Counter(*(jnp.array(np.uint32(word)) for word in words))


@typed
def add_count(counter: Counter, amount: int | Integer[Array, "..."]) -> Counter:
    """Adds a non-negative amount below 2**32 to `counter`, exactly."""
    amount = jnp.asarray(amount, jnp.uint32)
    low = counter.low + amount
    carry = (low < amount).astype(jnp.uint32)
    return Counter(counter.high + carry, low)


@typed
def count_as_float(counter: Counter) -> Float[Array, "..."]:
    """The count rounded to float32 (relative error 2**-24)."""
    return counter.high.astype(jnp.float32) * 2.0**32 + counter.low.astype(jnp.float32)
