"""PRNG keys at the library's boundary: one form inside, both forms accepted."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from eqx_ppo._typing import KeyLike

_RAW_KEY_IMPLEMENTATIONS = {2: "threefry2x32", 4: "rbg"}


def as_key(key: KeyLike) -> PRNGKeyArray:
    """Returns `key` as one typed PRNG key.

    **Arguments:**

    - `key`: a typed key (`jax.random.key(0)`, any implementation) or a raw one
        (`jax.random.PRNGKey(0)`: `uint32[2]`, or `uint32[4]` for `rbg`).

    **Raises:** `TypeError` for anything else, an integer seed or a batch of keys included.
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim == 0:
            return key
        got = f"a batch of keys of shape {key.shape}"
    elif isinstance(key, jax.Array) and key.dtype == jnp.uint32:
        if key.ndim == 1 and key.shape[0] in _RAW_KEY_IMPLEMENTATIONS:
            return jax.random.wrap_key_data(key, impl=_RAW_KEY_IMPLEMENTATIONS[key.shape[0]])
        got = f"an array uint32{list(key.shape)}"
    else:
        got = f"`{key!r}` of type `{type(key).__name__}`"
    raise TypeError(
        f"`key` must be one PRNG key, such as `jax.random.key(0)`, but got {got}. "
        "Turn an integer seed into a key with `jax.random.key(seed)`, and take one key out "
        "of a batch by indexing it."
    )
