"""A network whose modules take notes while it runs.

In the place of every module stands an instance of a subclass of its class, which notes what
passes. So modules are found by their place in the tree, whoever calls them, and look like
themselves to everyone.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, SequenceKey

from eqx_ppo._typing import State, Tree
from eqx_ppo.networks._container import Container
from eqx_ppo.networks._module import StatefulModule, StatefulModuleOutput

KeyPath: TypeAlias = tuple[object, ...]


# --- Places -------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a module is: as error messages say it, and as a path in the tree."""

    path: str
    keys: KeyPath
    module: StatefulModule


def places_of(module: StatefulModule, path: str, keys: KeyPath) -> Iterator[Place]:
    """The module, and all modules inside it."""
    yield Place(path, keys, module)
    for child in children_of(module):
        yield from places_of(child.module, path + child.path, keys + child.keys)


def children_of(module: StatefulModule) -> list[Place]:
    """The modules inside `module`, but not those inside of them."""
    flat = jax.tree_util.tree_flatten_with_path(module, is_leaf=_is_inside(module))[0]
    return [
        Place(_segment(module, keys), keys, node)
        for keys, node in flat
        if isinstance(node, StatefulModule)
    ]


def _is_inside(module: StatefulModule) -> Callable[[object], bool]:
    return lambda node: isinstance(node, StatefulModule) and node is not module


def _segment(parent: StatefulModule, keys: KeyPath) -> str:
    """How error messages address a child."""
    match keys:
        case (GetAttrKey(name="modules"), SequenceKey(idx=index)) if isinstance(parent, Container):
            return parent.segment(parent.names[index])
    return jax.tree_util.keystr(keys)


# --- Probes -------------------------------------------------------------------------------


class Size(NamedTuple):
    """How large a state is, per environment; a PRNG key counts as its words."""

    numbers: int
    bytes: int


class Notes(NamedTuple):
    """What the probes saw, by path: outputs without batch axis, and sizes of states."""

    outputs: dict[str, Tree]
    states: dict[str, Size]


@final
class _Recorder:
    """Takes the notes of one module. Compared by identity, as a static field has to be."""

    def __init__(self, path: str, notes: Notes):
        self._path = path
        self._notes = notes

    def output(self, output: Tree) -> None:
        self._notes.outputs[self._path] = jax.tree.map(_sample_of, output)

    def state(self, state: State) -> None:
        leaves = [_sample_of(leaf) for leaf in jax.tree.leaves(state)]
        numbers = sum(leaf.size for leaf in leaves)
        self._notes.states[self._path] = Size(
            numbers, sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        )


def _sample_of(leaf: Tree) -> jax.ShapeDtypeStruct:
    """One row of a batch; of a PRNG key its words."""
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))


def with_probes(module: StatefulModule, path: str, notes: Notes) -> StatefulModule:
    """The same module, in which it and all modules inside it note what passes."""
    nodes, treedef = jax.tree.flatten(module, is_leaf=_is_inside(module))
    children = iter(children_of(module))
    for index, node in enumerate(nodes):
        if isinstance(node, StatefulModule):
            nodes[index] = with_probes(node, path + next(children).path, notes)
    probe = object.__new__(_probe_class(type(module)))
    fields = {**vars(treedef.unflatten(nodes)), "_recorder": _Recorder(path, notes)}
    for name, value in fields.items():
        object.__setattr__(probe, name, value)  # modules are immutable to everyone else
    return probe


@functools.cache
def _probe_class(cls: type[StatefulModule]) -> type[StatefulModule]:
    """A subclass of a module's class that looks like it and reports to its recorder.

    Without a recorder is only what a module makes of its own class while it runs.
    """

    def __call__(self, state, x, rollout_extras=None):  # noqa: N807
        out = cls.__call__(self, state, x, rollout_extras)
        if isinstance(out, StatefulModuleOutput) and self._recorder is not None:
            self._recorder.output(out.output)
        return out

    def initialize_state(self, batch_size, *, key):
        state = cls.initialize_state(self, batch_size, key=key)
        if self._recorder is not None:
            self._recorder.state(state)
        return state

    namespace = {
        "__annotations__": {"_recorder": _Recorder},
        "__call__": __call__,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_recorder": eqx.field(static=True, default=None),
        "initialize_state": initialize_state,
    }
    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(namespace))
