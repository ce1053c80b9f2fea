"""The one replay: losses and checks run a rollout's observations through a network again."""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo._checks import typed
from eqx_ppo._tree import tree_where
from eqx_ppo._typing import State, Tree
from eqx_ppo.algorithms._transition import Transition
from eqx_ppo.networks import StatefulModule, StatefulModuleOutput, at_path
from eqx_ppo.ops import likelihood_ratio

_T = TypeVar("_T")


@typed
def replay(
    network: StatefulModule,
    network_state: State,
    fresh: Bool[Array, " B"],
    transitions: Transition,
    *,
    n_chunks: int = 1,
) -> StatefulModuleOutput:
    """Runs a recorded sequence through `network`, with the carry resets of the rollout.

    **Arguments:**

    - `network`: with the weights that produced the rollout, or later ones.
    - `network_state`: the carry at the first step, leaves `[B, ...]`.
    - `fresh`: which carries are at the start of an episode; those are made anew with
        `reset_state`, so that a trained initial state gets its gradient.
    - `transitions`: leaves `[T, B, ...]`.
    - `n_chunks`: splits the environments into this many parts, which are run one after
        another, and again when a gradient is taken. Extras and metrics are left out then.
    """
    parts = (network_state, fresh, transitions.obs, transitions.done, transitions.rollout_extras)
    if n_chunks == 1:
        return _run(network, parts)
    axes = (0, 0, 1, 1, 1)  # of the environments

    def run(part):
        out = _run(network, part)._replace(rollout_extras=None, metrics=None)
        return out._replace(next_state=()), out.next_state

    chunks = tuple(map(partial(_split, n_chunks=n_chunks), parts, axes))
    out, next_state = jax.lax.map(jax.checkpoint(run), chunks)
    return _join(out, 1)._replace(next_state=_join(next_state, 0))


def _run(network: StatefulModule, parts: tuple) -> StatefulModuleOutput:
    network_state, fresh, obs, done, extras = parts
    start = refresh(network, network_state, fresh)
    with at_path("", network, obs):
        return network.unroll(start, obs, done, extras)


def _split(tree: Tree, axis: int, *, n_chunks: int) -> Tree:
    """Cuts an axis into chunks, which become the first axis."""

    def split(leaf):
        shape = (*leaf.shape[:axis], n_chunks, -1, *leaf.shape[axis + 1 :])
        return jnp.moveaxis(leaf.reshape(shape), axis, 0)

    return jax.tree.map(split, tree)


def _join(tree: _T, axis: int) -> _T:
    """Undoes `_split`."""

    def join(leaf):
        leaf = jnp.moveaxis(leaf, 0, axis)
        return leaf.reshape((*leaf.shape[:axis], -1, *leaf.shape[axis + 2 :]))

    return jax.tree.map(join, tree)


@typed
def refresh(network: StatefulModule, network_state: State, fresh: Bool[Array, " B"]) -> State:
    """Makes the carries that are at the start of an episode anew from the current weights."""
    return tree_where(fresh, network.reset_state(network_state), network_state)


@typed
def replay_error(
    network: StatefulModule,
    network_state: State,
    transitions: Transition,
    fresh: Bool[Array, " B"] | None = None,
) -> Float[Array, ""]:
    """The largest `|ratio - 1|` between the replay of a rollout and the rollout itself.

    With the weights that produced the rollout it is 0 to float precision, whatever the
    network is made of: below 1e-5 while the standard deviations of the policy are at
    least 0.1, and growing in proportion to their inverse below. Anything larger means
    that the policy gradient is wrong.

    ```python
    state = network.initialize_state(n_envs, key=key)
    _, _, transitions = unroll_env(env, env_state, network, state, 20, key)
    assert replay_error(network, state, transitions) < 1e-5
    ```

    **Arguments:**

    - `network`: the network that produced the rollout, unchanged.
    - `network_state`, `fresh`: what `unroll_env` was given.
    - `transitions`: what it returned, leaves `[T, B, ...]`.
    """
    fresh = jnp.zeros(transitions.done.shape[1], jnp.bool_) if fresh is None else fresh
    replayed = replay(network, network_state, fresh, transitions).output
    ratios = jax.tree.map(
        likelihood_ratio, replayed.log_likelihoods, transitions.network_output.log_likelihoods
    )
    return jnp.max(jnp.stack([jnp.max(jnp.abs(ratio - 1.0)) for ratio in jax.tree.leaves(ratios)]))
