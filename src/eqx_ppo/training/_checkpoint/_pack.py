"""Arrays as one buffer of bytes, and a list of what is in it.

One large file is several times cheaper to write than many small ones. Every array has a
digest of its own, so that a changed bit is told apart from a right one.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_ppo._typing import Tree
from eqx_ppo.training._checkpoint._errors import DamagedCheckpointError
from eqx_ppo.training._checkpoint._fingerprint import array_text


class PackedLeaf(NamedTuple):
    """What one array in a buffer is.

    - `path`: its place.
    - `text`: dtype and shape.
    - `size`: in bytes.
    - `digest`: of its bytes.
    """

    path: str
    text: str
    size: int
    digest: str

    @classmethod
    def from_json(cls, data: Mapping[str, Tree]) -> Self:
        """The entry that `_asdict` was written from."""
        return cls(str(data["path"]), str(data["text"]), int(data["size"]), str(data["digest"]))


class Packed(NamedTuple):
    """A buffer `uint8[N]`, and the arrays that follow one another in it."""

    buffer: np.ndarray
    leaves: list[PackedLeaf]


def pack(paths: Sequence[str], arrays: Sequence[Array]) -> Packed:
    """Copies arrays into one buffer on the host; of PRNG keys their words."""
    words = [_words(array) for array in arrays]
    if jax.default_backend() != "cpu":
        for array in words:
            array.copy_to_host_async()
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in words]
    leaves = [
        PackedLeaf(path, array_text(array), part.size, _digest(part))
        for path, array, part in zip(paths, arrays, parts, strict=True)
    ]
    return Packed(np.concatenate([np.zeros(0, np.uint8), *parts]), leaves)


def unpack(packed: Packed, templates: Sequence[Array | jax.ShapeDtypeStruct | None]) -> list[Array]:
    """The arrays again.

    **Arguments:**

    - `packed`: whose leaves have the dtypes and shapes of `templates`.
    - `templates`: one for every leaf; `None` for those that are not wanted.

    **Raises:** `DamagedCheckpointError` if bytes are missing or have changed.
    """
    arrays = []
    for leaf, part, template in zip(packed.leaves, _parts(packed), templates, strict=True):
        if template is not None:
            _verify(leaf, part)
            arrays.append(_array(part, leaf, template))
    return arrays


def verify(packed: Packed) -> None:
    """Looks at all bytes.

    **Raises:** `DamagedCheckpointError` if some are missing or have changed.
    """
    for leaf, part in zip(packed.leaves, _parts(packed), strict=True):
        _verify(leaf, part)


def is_key(leaf: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array holds typed PRNG keys."""
    return _is_key_dtype(leaf.dtype)


@functools.cache
def _is_key_dtype(dtype: Tree) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _parts(packed: Packed) -> list[np.ndarray]:
    """The bytes of each array."""
    expected = sum(leaf.size for leaf in packed.leaves)
    if packed.buffer.size != expected:
        raise DamagedCheckpointError(
            f"its arrays should take {expected} bytes, but there are {packed.buffer.size}"
        )
    ends = np.cumsum([leaf.size for leaf in packed.leaves], dtype=np.int64)
    return np.split(packed.buffer, ends[:-1]) if packed.leaves else []


def _verify(leaf: PackedLeaf, part: np.ndarray) -> None:
    if _digest(part) != leaf.digest:
        raise DamagedCheckpointError(f"the bytes of `{leaf.path}` have changed on disk")


def _words(array: Array) -> Array:
    return jax.random.key_data(array) if is_key(array) else array


def _array(part: np.ndarray, leaf: PackedLeaf, template: Array | jax.ShapeDtypeStruct) -> Array:
    words = jax.eval_shape(_words, template)
    if math.prod(words.shape) * words.dtype.itemsize != leaf.size:
        raise DamagedCheckpointError(f"`{leaf.path}` has {leaf.size} bytes, not {leaf.text}")
    array = jnp.array(part.view(words.dtype).reshape(words.shape))
    if not is_key(template):
        return array
    implementation = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), template)
    return jax.random.wrap_key_data(array, impl=implementation[0])


def _digest(part: np.ndarray) -> str:
    return hashlib.sha256(part.data).hexdigest()[:16]
