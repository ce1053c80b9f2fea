"""Random actions for an environment under test."""

import operator
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_ppo._typing import Tree
from eqx_ppo.envs._actions import ContinuousActions, DiscreteActions, MultiDiscreteActions
from eqx_ppo.envs._protocol import Env

Sampler: TypeAlias = Callable[[Array], Tree]
"""Draws a batch of actions, one for each of several PRNG keys."""

_KINDS = (ContinuousActions, DiscreteActions, MultiDiscreteActions)
_LARGEST = 2**31 - 2  # integer that is drawn


class _Range(NamedTuple):
    """From where to where a leaf of the action is drawn, both included; in its own dtype."""

    low: Array
    high: Array


def action_sampler(env: Env, sample_action: Tree) -> Sampler:
    """Draws actions as the user says or, by `None`, as `env.actions` or `env.action_size` does.

    **Raises:** `ValueError` if none of them says what an action is.
    """
    if callable(sample_action):
        return jax.jit(jax.vmap(lambda key: jax.tree.map(jnp.asarray, sample_action(key))))
    ranges = _declared_ranges(env) if sample_action is None else _ranges_around(sample_action)
    return lambda keys: _draw(ranges, keys)


def _declared_ranges(env: Env) -> Tree:
    actions = declared(env, "actions")
    if all(isinstance(part, _KINDS) for part in jax.tree.leaves(actions)) and actions:
        return jax.tree.map(_range_of, actions)
    sizes = declared(env, "action_size")
    if sizes is None or not all(map(_is_size, jax.tree.leaves(sizes, is_leaf=_is_shape))):
        said = "no `action_size`" if sizes is None else f"`action_size = {sizes!r}`"
        raise ValueError(
            f"`check_env` must know what an action of `{type(env).__name__}` is: the environment "
            f"has {said}, and no `sample_action` was given. Pass one action, such as "
            "`jnp.zeros(2)`, or a function that draws one from a key."
        )
    zeros = jax.tree.map(lambda size: jnp.zeros(size, jnp.float32), sizes, is_leaf=_is_shape)
    return _ranges_around(zeros)


def declared(env: Env, name: str) -> Tree:
    """An attribute that environments may have, or `None`."""
    try:
        return operator.attrgetter(name)(env)
    except AttributeError:
        return None


def _is_shape(node: Tree) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int | np.integer) for size in node)


def _is_size(node: Tree) -> bool:
    return _is_shape(node) or (isinstance(node, int | np.integer) and not isinstance(node, bool))


def _range_of(actions: ContinuousActions | DiscreteActions | MultiDiscreteActions) -> _Range:
    if isinstance(actions, DiscreteActions):
        return _Range(jnp.int32(0), jnp.int32(actions.n - 1))
    if isinstance(actions, MultiDiscreteActions):
        high = jnp.asarray(actions.sizes, jnp.int32) - jnp.int32(1)
        return _Range(jnp.zeros_like(high), high)
    low, high = (np.asarray(bound, np.float32) for bound in (actions.low, actions.high))
    # Where there is no bound, within 1 of the other one or of 0.
    above, below = np.where(np.isfinite(high), high - 2, -1), np.where(np.isfinite(low), low + 2, 1)
    low, high = np.where(np.isfinite(low), low, above), np.where(np.isfinite(high), high, below)
    return _Range(jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32))


def _ranges_around(example: Tree) -> Tree:
    def around(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = jnp.zeros(leaf.shape, leaf.dtype)
        leaf = jnp.asarray(leaf)
        ones = jnp.ones_like(leaf)
        if leaf.dtype == jnp.bool_:
            return _Range(jnp.zeros_like(leaf), ones)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return _Range(jnp.zeros_like(leaf), ones * jnp.max(leaf, initial=1))
        return _Range(-ones, ones)

    return jax.tree.map(around, example)


@jax.jit  # once for all environments with actions of one kind
def _draw(ranges: Tree, keys: Array) -> Tree:
    """An action for each key."""
    leaves, treedef = jax.tree.flatten(ranges, is_leaf=lambda node: isinstance(node, _Range))

    def draw(key):
        parts = jax.random.split(key, max(len(leaves), 1))
        drawn = [_draw_leaf(leaf, part) for leaf, part in zip(leaves, parts, strict=False)]
        return jax.tree.unflatten(treedef, drawn)

    return jax.vmap(draw)(keys)


def _draw_leaf(leaf: _Range, key: Array) -> Array:
    shape, dtype = leaf.low.shape, leaf.low.dtype
    if dtype == jnp.bool_:
        return jax.random.bernoulli(key, shape=shape)
    if jnp.issubdtype(dtype, jnp.integer):
        low, high = (jnp.minimum(end, _LARGEST).astype(jnp.int32) for end in leaf)
        return jax.random.randint(key, shape, low, high + 1, jnp.int32).astype(dtype)
    low, high = (end.astype(jnp.float32) for end in leaf)
    return jax.random.uniform(key, shape, jnp.float32, low, high).astype(dtype)
