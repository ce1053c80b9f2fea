"""A policy as functions of plain arrays, so that it can leave the library."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array

from eqx_ppo._typing import Tree, TreeDef
from eqx_ppo.algorithms import Policy, PolicyCarry
from eqx_ppo.training._export._jaxpr import sources
from eqx_ppo.training._export._plain import plain_tree

BatchSize: TypeAlias = int | Literal["any"] | None
"""How many environments an exported policy serves; see `export_policy`."""


@final
class Program(NamedTuple):
    """A policy as three functions of arrays in dicts, lists and tuples.

    - `init(key) -> carry`, `act(carry, obs) -> (action, carry)`, `reset(carry, done) -> carry`.
        The carry is a list of arrays of plain dtypes: what future actions depend on and
        nothing else, with the words of a PRNG key in the place of the key.
    - `key`, `carry`, `obs`, `done`, `action`: shapes and dtypes.
    - `names`: where in the network's state each entry of the carry has its place.
    - `generators`: the PRNG of those entries that are the words of keys.
    """

    init: Callable[[Array], list[Array]]
    act: Callable[[list[Array], Tree], tuple[Tree, list[Array]]]
    reset: Callable[[list[Array], Array], list[Array]]
    key: jax.ShapeDtypeStruct
    carry: list[jax.ShapeDtypeStruct]
    obs: Tree
    done: jax.ShapeDtypeStruct
    action: Tree
    names: tuple[str, ...]
    generators: tuple[str | None, ...]


def make_program(policy: Policy, obs: Tree, batch_size: BatchSize) -> Program:
    """The program of a policy, for observations like `obs`, which has no batch axis.

    For any batch size each row is a policy for a single environment.
    """
    obs = jax.eval_shape(lambda: jax.tree.map(_as_array, obs))
    if batch_size != "any":
        return _without_dead_carry(_program(policy, obs, batch_size))
    (size,) = export.symbolic_shape("b")
    one = _without_dead_carry(_program(policy, obs, None))
    return one._replace(
        init=jax.vmap(one.init),
        act=jax.vmap(one.act),
        reset=jax.vmap(one.reset),
        key=_batched(one.key, size),
        carry=_batched(one.carry, size),
        obs=_batched(one.obs, size),
        done=_batched(one.done, size),
        action=_batched(one.action, size),
    )


def _program(policy: Policy, obs: Tree, batch_size: int | None) -> Program:
    """The program with the whole of the network's state as its carry."""
    layout = _layout(policy, batch_size)
    obs = obs if batch_size is None else _batched(obs, batch_size)
    obs_form = plain_tree(obs)

    def init(key):
        return layout.pack(policy.init(_as_key(key), batch_size))

    def act(leaves, plain_obs):
        action, carry = policy.act(layout.unpack(leaves), obs_form.restore(plain_obs))
        return plain_tree(action).strip(action), layout.pack(carry)

    def reset(leaves, done):
        return layout.pack(policy.reset(layout.unpack(leaves), done))

    action, _ = jax.eval_shape(act, layout.leaves, obs_form.strip(obs))
    return Program(
        init=init,
        act=act,
        reset=reset,
        key=_KEY,
        carry=layout.leaves,
        obs=obs_form.strip(obs),
        done=jax.ShapeDtypeStruct(() if batch_size is None else (batch_size,), jnp.bool_),
        action=action,
        names=layout.names,
        generators=layout.generators,
    )


_KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def _as_key(words: Array) -> Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _as_array(leaf: Tree) -> Tree:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _batched(tree: Tree, size) -> Tree:
    """With an axis of `size`, which may be symbolic, in front of every leaf."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), tree)


# --- The carry as a list of arrays ----------------------------------------------------------


@final
class _Layout(NamedTuple):
    """How a policy's carry is written as a list of arrays of plain dtypes.

    `generators` names the PRNG of those leaves that are keys. The carry of a single
    environment has no batch axis.
    """

    treedef: TreeDef
    names: tuple[str, ...]
    leaves: list[jax.ShapeDtypeStruct]
    generators: tuple[str | None, ...]
    batched: bool

    def pack(self, carry: PolicyCarry) -> list[Array]:
        leaves = jax.tree.leaves(carry.network_state)
        leaves = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]
        return leaves if self.batched else [leaf[0] for leaf in leaves]

    def unpack(self, leaves: Sequence[Array]) -> PolicyCarry:
        leaves = leaves if self.batched else [leaf[None] for leaf in leaves]
        leaves = [
            leaf if generator is None else jax.random.wrap_key_data(leaf, impl=generator)
            for leaf, generator in zip(leaves, self.generators, strict=True)
        ]
        return PolicyCarry(jax.tree.unflatten(self.treedef, leaves), self.batched)


def _layout(policy: Policy, batch_size: int | None) -> _Layout:
    found = []

    def init(key):
        carry = policy.init(_as_key(key), batch_size)
        flat, treedef = jax.tree_util.tree_flatten_with_path(carry.network_state)
        names = tuple(f"state{jax.tree_util.keystr(path)}" for path, _ in flat)
        generators = tuple(
            str(jax.random.key_impl(leaf)) if _is_key(leaf) else None for _, leaf in flat
        )
        layout = _Layout(treedef, names, [], generators, carry.batched)
        found.append(layout)
        return layout.pack(carry)

    leaves = jax.eval_shape(init, _KEY)
    return found[-1]._replace(leaves=leaves)


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# --- What of the carry is alive -------------------------------------------------------------


def _without_dead_carry(program: Program) -> Program:
    """The same program with only those entries of the carry that some action depends on.

    In a deterministic policy the keys are dead; so is a state that only the values need.
    """
    alive = _alive(program)

    def narrow(leaves):
        return [leaves[index] for index in alive]

    def widen(leaves):
        known = dict(zip(alive, leaves, strict=True))
        return [
            known[index] if index in known else jnp.zeros(leaf.shape, leaf.dtype)
            for index, leaf in enumerate(program.carry)
        ]

    def act(leaves, obs):
        action, carry = program.act(widen(leaves), obs)
        return action, narrow(carry)

    return program._replace(
        init=lambda key: narrow(program.init(key)),
        act=act,
        reset=lambda leaves, done: narrow(program.reset(widen(leaves), done)),
        carry=narrow(program.carry),
        names=tuple(narrow(program.names)),
        generators=tuple(narrow(program.generators)),
    )


def _alive(program: Program) -> list[int]:
    """The entries of the carry that an action depends on, at once or by way of others."""
    act = sources(jax.make_jaxpr(program.act)(program.carry, program.obs))
    reset = sources(jax.make_jaxpr(program.reset)(program.carry, program.done))
    n_actions, n_carry = len(jax.tree.leaves(program.action)), len(program.carry)
    feeds = [after | fresh for after, fresh in zip(act[n_actions:], reset, strict=True)]
    alive: set[int] = set()
    reached = set().union(*act[:n_actions])
    while not reached <= alive:
        alive |= reached
        reached = {i for index in alive if index < n_carry for i in feeds[index]}
    return sorted(index for index in alive if index < n_carry)
