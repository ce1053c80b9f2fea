"""The one replay: losses and checks run a rollout's observations through a network again."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo._checks import typed
from eqx_ppo._tree import tree_where
from eqx_ppo._typing import State
from eqx_ppo.algorithms._transition import Transition
from eqx_ppo.networks import StatefulModule, StatefulModuleOutput
from eqx_ppo.ops import likelihood_ratio


@typed
def replay(
    network: StatefulModule,
    network_state: State,
    fresh: Bool[Array, " B"],
    transitions: Transition,
) -> StatefulModuleOutput:
    """Runs a recorded sequence through `network`, with the carry resets of the rollout.

    **Arguments:**

    - `network`: with the weights that produced the rollout, or later ones.
    - `network_state`: the carry at the first step, leaves `[B, ...]`.
    - `fresh`: which carries are at the start of an episode; those are made anew with
        `reset_state`, so that a trained initial state gets its gradient.
    - `transitions`: leaves `[T, B, ...]`.
    """
    start = refresh(network, network_state, fresh)
    return network.unroll(start, transitions.obs, transitions.done, transitions.rollout_extras)


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
