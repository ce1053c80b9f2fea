"""What tracing says about a state: its structure, its leaves and what was written into it."""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._typing import EnvState, Tree, TreeDef
from eqx_ppo.envs._protocol import TRUNCATION_KEYS

_FIELDS = ("obs", "reward", "done", "info", "metrics")
_DICTS = ("info", "metrics")
_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float)


class Leaf(NamedTuple):
    """A leaf of a state: its path below the state, and its kind."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    weak: bool

    def __str__(self) -> str:
        weak = " (weakly typed)" if self.weak else ""
        return f"{self.dtype}{list(self.shape)}{weak}"

    @property
    def is_key(self) -> bool:
        """Whether it holds typed PRNG keys."""
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)


@final
class Sketch(NamedTuple):
    """A state as it looks while it is traced.

    - `kind`: the name of its type.
    - `treedef`: its structure.
    - `leaves`: those that are arrays or numbers, in order.
    - `others`: path and type of those that are neither.
    - `missing`: fields of the protocol that it lacks.
    - `not_dicts`: fields that should be dictionaries, and are not.
    - `is_record`: whether it is a dataclass or a NamedTuple.
    """

    kind: str
    treedef: TreeDef
    leaves: tuple[Leaf, ...]
    others: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    not_dicts: tuple[str, ...]
    is_record: bool

    def within(self, field: str) -> list[Leaf]:
        """The leaves of a field of the state."""
        return [leaf for leaf in self.leaves if is_within(leaf.name, field)]

    @property
    def flags(self) -> list[Leaf]:
        """The flags of a time limit."""
        return [leaf for leaf in self.leaves if leaf.name in FLAGS]


FLAGS = tuple(f".info['{name}']" for name in TRUNCATION_KEYS)


def is_within(name: str, *fields: str) -> bool:
    """Whether a leaf of a state is part of one of its fields."""
    first = name.removeprefix(".").replace("[", ".").split(".")[0]
    return first in fields


def sketch(make: Callable[..., EnvState], *args: Tree) -> Sketch:
    """Traces `make(*args)`, a function that returns a state."""
    found = []

    def traced(*args):
        found.append(sketch_of(make(*args)))
        return ()

    jax.eval_shape(traced, *args)
    return found[-1]


def sketch_of(state: EnvState) -> Sketch:
    """The sketch of a state, in traced code or outside of it."""
    named = with_paths(state)
    fields = {field: read for field in _FIELDS if (read := _reader(state, field)) is not None}
    return Sketch(
        kind=type(state).__name__,
        treedef=jax.tree.structure(state),
        leaves=tuple(_leaf(name, leaf) for name, leaf in named if isinstance(leaf, _NUMBERS)),
        others=tuple(
            (name, type(leaf).__name__) for name, leaf in named if not isinstance(leaf, _NUMBERS)
        ),
        missing=tuple(field for field in _FIELDS if field not in fields),
        not_dicts=tuple(
            field
            for field in _DICTS
            if field in fields and not isinstance(fields[field](state), Mapping)
        ),
        is_record=dataclasses.is_dataclass(state)
        or (isinstance(state, tuple) and type(state) is not tuple),
    )


def with_paths(state: EnvState) -> list[tuple[str, Tree]]:
    """The leaves of a state with their paths below it, such as `.info['time']`."""
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def _reader(state: EnvState, field: str) -> Callable[[EnvState], Tree] | None:
    read = operator.attrgetter(field)
    try:
        read(state)
    except AttributeError:
        return None
    return read


def _leaf(name: str, leaf: Tree) -> Leaf:
    aval = jax.typeof(jnp.asarray(leaf))
    return Leaf(name, tuple(aval.shape), aval.dtype, aval.weak_type)
