"""A batch of environments with one fixed state layout.

Users write `reset` and `step` for one environment. Their two results often differ in
dtypes or weak types, which would compile everything twice; and a state may hold leaves
that all environments share. `EnvSpec` fixes the layout once, and `BatchedEnv` maps the
environment over a batch in that layout.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Key

from eqx_ppo._tree import env_axes, replace
from eqx_ppo._typing import EnvState, Tree, TreeDef
from eqx_ppo.envs._protocol import Env, check_state
from eqx_ppo.envs._shared_leaves import first_dependent
from eqx_ppo.envs._wrappers import carry_over, stagger


class EnvSpec(NamedTuple):
    """The layout of one environment's state; hashable, so it can be static under `jit`."""

    treedef: TreeDef
    paths: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    def flatten(self, state: EnvState, source: str = "step") -> list[Array]:
        """The leaves of one state, cast to the layout's dtypes.

        **Arguments:**

        - `state`: of one environment.
        - `source`: the method that it comes from, for the error.

        **Raises:** `ValueError` if structure or shapes differ from the layout, or if its
        dtypes cannot hold a leaf.
        """
        paths, leaves, treedef = _flatten(state)
        _check_structure(self.paths, self.treedef, paths, treedef, f"`{source}`")
        return [
            _cast(leaf, expected, path, source)
            for leaf, expected, path in zip(leaves, self.leaves, paths, strict=True)
        ]

    def unflatten(self, leaves: list[Array]) -> EnvState:
        """The state that has these leaves."""
        return jax.tree.unflatten(self.treedef, leaves)


class PackedStates(NamedTuple):
    """States of many environments, row by row.

    A physics state has some hundred small leaves. Indexing them one by one costs as many
    operations, and as many kernels to compile; a table per dtype costs one.

    - `tables`: one `[N, width]` array per dtype.
    - `shared`: the leaves without an env axis, `None` for the others.
    """

    tables: list[Array]
    shared: list[Array | None]

    def where(self, mask: Bool[Array, " N"], other: "PackedStates") -> "PackedStates":
        """These rows where `mask`, else those of `other`; its shared leaves in any case."""
        pairs = zip(self.tables, other.tables, strict=True)
        return other._replace(tables=[jnp.where(mask[:, None], a, b) for a, b in pairs])


def env_spec(env: Env, act: Callable[[Tree], Tree]) -> EnvSpec:
    """Finds the state layout of `env` by tracing `reset` and `step` once.

    Dtypes are those that hold the results of both (an integer reward of 0 in `reset` does
    not truncate the float rewards of `step`).

    **Arguments:**

    - `env`: an environment.
    - `act`: the abstract action for the abstract observation of one environment
        (`jax.ShapeDtypeStruct` leaves).

    **Raises:** `ValueError` if `reset` and `step` return states of different structure or
    shapes, naming the leaves, or if the environment resets itself; `TypeError` for something
    that is no state.
    """
    spec = _trace(env.reset, jax.eval_shape(lambda: jax.random.key(0)))
    action = act(jax.eval_shape(lambda leaves: spec.unflatten(leaves).obs, spec.leaves))
    while (joined := _after_step(env, spec, action)) != spec:
        spec = joined  # a promoted dtype may promote others in turn
    return spec


@final
class BatchedEnv:
    """`reset` and `step` of an environment over a batch, in the layout of `spec`."""

    def __init__(self, env: Env, spec: EnvSpec):
        """**Arguments:**

        - `env`: the environment, written for one instance.
        - `spec`: its layout, from `env_spec`.
        """
        self.env = env
        self.spec = spec

    def reset(self, keys: Key[Array, " B"]) -> EnvState:
        """One fresh state per key, leaves `[B, ...]`."""
        return self.spec.unflatten(
            jax.vmap(lambda key: self.spec.flatten(self.env.reset(key), "reset"))(keys)
        )

    def blank(self, n_rows: int, key: Key[Array, ""]) -> EnvState:
        """States of zeros that are `done`, leaves `[n_rows, ...]`, where none is there yet.

        Keys in them are of the kind that a reset with `key` gives.
        """
        leaves = self.spec.leaves
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves):
            reset = jax.eval_shape(lambda key: self.spec.flatten(self.env.reset(key), "reset"), key)
            leaves = tuple(reset)
        state = self.spec.unflatten([jnp.zeros((n_rows, *x.shape), x.dtype) for x in leaves])
        return replace(state, done=jnp.ones_like(state.done))

    def step(self, state: EnvState, actions: Tree) -> EnvState:
        """One step of every environment; shared leaves stay shared."""
        return self.map(self.env.step, state, actions)

    def map(
        self,
        fn: Callable[[EnvState, Tree], EnvState],
        state: EnvState,
        xs: Tree,
        source: str = "step",
    ) -> EnvState:
        """Applies `fn(single_state, x)` to every environment of a batched state.

        `source` is the method that `fn` is, for errors.

        **Raises:** `ValueError` if a leaf that all environments share would become a different
        one for each of them.
        """
        batch = jax.tree.leaves(xs)[0].shape[0]
        in_axes = self._vmap_axes(state, batch)

        def on_leaves(leaves, x):
            return self.spec.flatten(fn(self.spec.unflatten(leaves), x), source)

        def mapped(out_axes):
            return jax.vmap(on_leaves, in_axes=(in_axes, 0), out_axes=out_axes)

        args = (jax.tree.leaves(state), xs)
        try:
            return self.spec.unflatten(mapped(in_axes)(*args))
        except ValueError as error:
            culprit = first_dependent(mapped, in_axes, args)
            if culprit is None:
                raise
            raise ValueError(
                f"The leaf `{self.spec.paths[culprit]}` of the environment's state is shared by "
                f"all environments (shape {self.spec.leaves[culprit].shape}, without an env axis), "
                f"but `{source}` makes it depend on one of them. Give it an env axis from the "
                "start, as `jax.vmap(env.reset)` does, or leave it as it is."
            ) from error

    @property
    def staggered_leaves(self) -> tuple[int, ...]:
        """Which leaves of a state change where it is spread over its first episode."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return self._changed(lambda state, key: stagger(self.env, state, key), key, "stagger")

    def stagger(self, fresh: EnvState, keys: Key[Array, " B"]) -> EnvState:
        """The `fresh` states, each at another time of its episode."""

        def on_state(state, key):
            return stagger(self.env, state, key)

        return self.map(on_state, fresh, keys, "stagger")

    @property
    def carried_leaves(self) -> tuple[int, ...]:
        """Which leaves of a state may come from the end of the episode before."""

        def kept(fresh, ended):
            return carry_over(self.env, self.spec.unflatten(ended), fresh)

        return self._changed(kept, self.spec.leaves, "carry_over")

    def _changed(
        self, function: Callable[[EnvState, Tree], EnvState], x: Tree, source: str
    ) -> tuple[int, ...]:
        """Which leaves of a state `function(state, x)` does not return as they are."""

        def on_leaves(leaves, x):
            return self.spec.flatten(function(self.spec.unflatten(leaves), x), source)

        traced = jax.make_jaxpr(on_leaves)(list(self.spec.leaves), x).jaxpr
        pairs = enumerate(zip(traced.invars, traced.outvars, strict=False))
        return tuple(index for index, (before, after) in pairs if before is not after)

    def carry_over(self, ended: EnvState, fresh: EnvState) -> EnvState:
        """The `fresh` states, with what each environment keeps of its `ended` one."""
        batch = jnp.shape(fresh.done)[0]
        in_axes = (self._vmap_axes(ended, batch), self._vmap_axes(fresh, batch))

        def on_leaves(ended, fresh):
            kept = carry_over(self.env, self.spec.unflatten(ended), self.spec.unflatten(fresh))
            return self.spec.flatten(kept, "carry_over")

        leaves = jax.vmap(on_leaves, in_axes)(jax.tree.leaves(ended), jax.tree.leaves(fresh))
        return self.spec.unflatten(leaves)

    def axes(self, state: EnvState, batch: int) -> tuple[bool, ...]:
        """Which leaves of a batched state have an env axis."""
        return env_axes(state, batch, self.spec.leaves)

    def _vmap_axes(self, state: EnvState, batch: int) -> list[int | None]:
        return [0 if has_axis else None for has_axis in self.axes(state, batch)]

    def pack(
        self, state: EnvState, n_rows: int, *, like: PackedStates | None = None
    ) -> PackedStates:
        """A batch of states as one table per dtype, which is cheap to index by row.

        Shared are the leaves without an env axis, or those that are shared in `like`.
        """
        leaves = jax.tree.leaves(state)
        if like is None:
            axes = self.axes(state, n_rows)
        else:
            axes = tuple(shared is None for shared in like.shared)
            self._check_axes(leaves, axes, n_rows)
        tables = {}
        for leaf, expected, has_axis in zip(leaves, self.spec.leaves, axes, strict=True):
            if has_axis:
                tables.setdefault(expected.dtype, []).append(leaf.reshape(n_rows, -1))
        shared = [None if has_axis else leaf for leaf, has_axis in zip(leaves, axes, strict=True)]
        return PackedStates([jnp.concatenate(parts, axis=1) for parts in tables.values()], shared)

    def unpack(self, packed: PackedStates) -> EnvState:
        """Undoes `pack`, for as many rows as the tables have."""
        return self.spec.unflatten(self.leaves(packed))

    def leaves(self, packed: PackedStates) -> list[Array]:
        """The leaves of `unpack`."""
        leaves = list(packed.shared)
        for index, (table, columns) in self._places(packed).items():
            rows = packed.tables[table]
            shape = (rows.shape[0], *self.spec.leaves[index].shape)
            leaves[index] = rows[:, columns].reshape(shape)
        return [leaf for leaf in leaves if leaf is not None]

    def put(
        self, packed: PackedStates, leaves: dict[int, Array], mask: Bool[Array, " N"]
    ) -> PackedStates:
        """The same rows with some leaves, given by their position, replaced where `mask`."""
        tables, places = list(packed.tables), self._places(packed)
        for index, leaf in leaves.items():
            table, columns = places[index]
            old = tables[table][:, columns]
            new = jnp.where(mask[:, None], leaf.reshape(old.shape), old)
            tables[table] = tables[table].at[:, columns].set(new)
        return packed._replace(tables=tables)

    def _places(self, packed: PackedStates) -> dict[int, tuple[int, slice]]:
        """In which table and columns the leaves with an env axis are."""
        # By the layout's dtypes: a table of keys may be of another implementation.
        places, numbers, used = {}, {}, {}
        pairs = zip(self.spec.leaves, packed.shared, strict=True)
        for index, (expected, shared) in enumerate(pairs):
            if shared is not None:
                continue
            table = numbers.setdefault(expected.dtype, len(numbers))
            start = used.get(table, 0)
            used[table] = start + math.prod(expected.shape)
            places[index] = (table, slice(start, used[table]))
        return places

    def _check_axes(self, leaves: list[Array], axes: tuple[bool, ...], n_rows: int) -> None:
        layout = zip(self.spec.paths, self.spec.leaves, leaves, axes, strict=True)
        for path, expected, leaf, has_axis in layout:
            if has_axis and jnp.shape(leaf) != (n_rows, *expected.shape):
                raise ValueError(
                    f"The leaf `{path}` of a fresh state has shape {jnp.shape(leaf)}, but "
                    f"{(n_rows, *expected.shape)} in the environments that are running. Both must "
                    "have one row per environment, or neither."
                )

    def canonicalize(self, state: EnvState) -> EnvState:
        """A batched state from elsewhere, such as `jax.vmap(env.reset)`, in this layout."""
        paths, leaves, treedef = _flatten(state)
        _check_structure(self.spec.paths, self.spec.treedef, paths, treedef, "The given state")
        cast = [
            _cast_dtype(jnp.asarray(leaf), expected.dtype)
            for leaf, expected in zip(leaves, self.spec.leaves, strict=True)
        ]
        return self.spec.unflatten(cast)


def _after_step(env: Env, spec: EnvSpec, action: Tree) -> EnvSpec:
    """The layout that holds both a state of layout `spec` and what `step` makes of it."""
    after = _trace(lambda leaves, a: env.step(spec.unflatten(leaves), a), spec.leaves, action)
    _check_structure(spec.paths, spec.treedef, after.paths, after.treedef, "`step`")
    return spec._replace(leaves=tuple(map(_join, spec.leaves, after.leaves, spec.paths)))


def _flatten(state: EnvState) -> tuple[tuple[str, ...], list[Array], TreeDef]:
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    paths = tuple(jax.tree_util.keystr(path) for path, _ in with_paths)
    return paths, [leaf for _, leaf in with_paths], treedef


def _trace(fn: Callable[..., EnvState], *args: Tree) -> EnvSpec:
    """The layout of what `fn` returns.

    The state is taken apart inside the traced function, so that its constructor only ever
    sees arrays.
    """
    found = []

    def leaves_of(*args):
        state = fn(*args)
        check_state(state)
        paths, leaves, treedef = _flatten(state)
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
                raise TypeError(
                    f"The leaf `{path}` of the environment's state must be an array or a number, "
                    f"but is a `{type(leaf).__name__}`. Keep it in a static field, or out of the "
                    "state."
                )
        found.append((treedef, paths))
        return leaves

    leaves = jax.eval_shape(leaves_of, *args)
    treedef, paths = found[-1]
    return EnvSpec(treedef, paths, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))


def _check_structure(paths, treedef, other_paths, other_treedef, source: str) -> None:
    if treedef == other_treedef:
        return
    missing, extra = sorted(set(paths) - set(other_paths)), sorted(set(other_paths) - set(paths))
    way_out = (
        "Put every key of `info` and `metrics` into `reset` too."
        if source.startswith("`")
        else "Give the states of this very environment, with all its wrappers."
    )
    raise ValueError(
        f"All states of an environment must have one structure, that of `reset`, but {source} "
        f"lacks {missing or 'nothing'} and adds {extra or 'nothing'}. {way_out}\n"
        f"`reset`: {treedef}\n{source}: {other_treedef}"
    )


def _join(first, second, path: str) -> jax.ShapeDtypeStruct:
    if first.shape != second.shape:
        raise ValueError(
            f"The leaf `{path}` of the environment's state has shape {first.shape} after `reset` "
            f"but {second.shape} after `step`. Both must agree."
        )
    if first.dtype == second.dtype:
        return first
    return jax.ShapeDtypeStruct(first.shape, jnp.promote_types(first.dtype, second.dtype))


def _cast(leaf: Tree, expected: jax.ShapeDtypeStruct, path: str, source: str) -> Array:
    if jnp.shape(leaf) != expected.shape:
        raise ValueError(
            f"The leaf `{path}` of the environment's state has shape {jnp.shape(leaf)} after "
            f"`{source}`, but {expected.shape} was expected from `reset`."
        )
    leaf = jnp.asarray(leaf)
    if not holds(expected.dtype, leaf.dtype):
        raise ValueError(
            f"The leaf `{path}` of the environment's state has dtype {leaf.dtype} after "
            f"`{source}`, but {expected.dtype} after `reset` and `step`, which cannot hold it."
        )
    return _cast_dtype(leaf, expected.dtype)


def holds(dtype, other) -> bool:
    """Whether a leaf of dtype `other` can be kept as one of `dtype`."""
    if dtype == other or jnp.issubdtype(other, jax.dtypes.extended):
        return True
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other) == dtype


def _cast_dtype(leaf: Array, dtype) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, dtype)  # also drops weak types
