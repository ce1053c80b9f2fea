"""A trained network as a policy: observations in, actions out, the carry in the caller's hands.

It steps the network as rollout and evaluation do. What is left out is the value port.
"""

from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike

from eqx_ppo._checks import typed
from eqx_ppo._tree import strong_type
from eqx_ppo._typing import Extras, KeyLike, State, Tree
from eqx_ppo.algorithms._replay import refresh
from eqx_ppo.networks import (
    PPOAdapter,
    PPONetworkOutput,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
    StatelessModule,
    at_path,
)


@final
class PolicyCarry(eqx.Module):
    """What a `Policy` hands from one step to the next.

    - `network_state`: the carry of its modules, leaves `[B, ...]`; B is 1 for a single
        environment.
    - `batched`: whether observations and actions have a batch axis.
    """

    network_state: State
    batched: bool = eqx.field(static=True)


@final
class Policy(eqx.Module):
    """Acts with a trained network; made by `make_policy`.

    A pytree, and pure: compile its methods with `eqx.filter_jit`, scan or vmap them.
    Normalizers, delays, recurrent layers and samplers work as in training.

    ```python
    policy = make_policy(network)
    act = eqx.filter_jit(policy.act)
    carry = policy.init(jax.random.key(0))
    action, carry = act(carry, obs)
    ```

    - `network`: the network, without what only its value estimates need.
    - `deterministic`: whether it acts by the mode of its distribution.
    """

    network: StatefulModule
    deterministic: bool = eqx.field(static=True)

    @typed
    def init(self, key: KeyLike, batch_size: int | None = None) -> PolicyCarry:
        """The carry at the start of the first episodes.

        **Arguments:**

        - `key`: a PRNG key, from which all noise comes. With the key that a network's
            `initialize_state` was given, the policy draws the noise of that network's rollout.
        - `batch_size`: the number of environments; `None` for a single one, whose
            observations, actions and `done` have no batch axis.

        **Raises:** `ValueError` for a batch size below 1, `TypeError` for a boolean.
        """
        if isinstance(batch_size, bool):
            raise TypeError(f"`batch_size` must be an int or `None`, but got {batch_size}.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"`batch_size` must be at least 1, but got {batch_size}. Leave it out for a "
                "single environment without a batch axis."
            )
        n_envs = 1 if batch_size is None else batch_size
        state = self.network.initialize_state(n_envs, key=key)
        state = jax.tree.map(strong_type, state)
        fresh = refresh(self.network, state, jnp.ones(n_envs, jnp.bool_))
        return PolicyCarry(fresh, batch_size is not None)

    @typed
    def act(self, carry: PolicyCarry, obs: Tree) -> tuple[Tree, PolicyCarry]:
        """One step.

        **Arguments:**

        - `carry`: from `init`, `reset` or the step before.
        - `obs`: the observation, JAX or NumPy arrays: leaves `[B, *feat]`, or `[*feat]` for a
            single environment.

        **Returns:** the action, leaves `[B, A]` or `[A]`, and the carry for the next step.

        **Raises:** `TypeError` for a network that does not output a `PPONetworkOutput`, and
        the modules' errors for an observation that does not fit.
        """
        obs = jax.tree.map(jnp.asarray, obs)
        if not carry.batched:
            obs = jax.tree.map(lambda leaf: leaf[None], obs)
        with at_path("", self.network, obs):
            out = self.network(carry.network_state, obs, None)
        if not isinstance(out.output, PPONetworkOutput):
            raise TypeError(
                "A policy needs a network that outputs a `PPONetworkOutput`, but got a "
                f"`{type(out.output).__name__}`. Put a `PPOAdapter` at its end."
            )
        actions = out.output.actions
        if not carry.batched:
            actions = jax.tree.map(lambda leaf: leaf[0], actions)
        return actions, PolicyCarry(out.next_state, carry.batched)

    @typed
    def reset(self, carry: PolicyCarry, done: ArrayLike) -> PolicyCarry:
        """The carry with every ended episode's part as at the start of an episode.

        Call it after the step that ended an episode, before the first step of the next.

        **Arguments:**

        - `carry`: the carry after the step.
        - `done`: nonzero where an episode ended, of any dtype: `[B]`, or a scalar for a
            single environment.

        **Raises:** `ValueError` for a `done` of another shape.
        """
        done = jnp.asarray(done).astype(jnp.bool_)
        if done.ndim != int(carry.batched):
            expected = "one value per environment, [B]" if carry.batched else "a scalar"
            raise ValueError(
                f"`done` must be {expected}, because the carry was made "
                f"{'with' if carry.batched else 'without'} a `batch_size`, but has shape "
                f"{done.shape}."
            )
        done = jnp.atleast_1d(done)
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(carry.network_state) if leaf.ndim}
        if sizes and done.shape[0] not in sizes:
            raise ValueError(
                f"`done` has {done.shape[0]} values, but the carry is that of "
                f"{min(sizes)} environments. Give one value for each."
            )
        state = refresh(self.network, carry.network_state, done)
        return PolicyCarry(state, carry.batched)


@typed
def make_policy(network: StatefulModule, *, deterministic: bool = True) -> Policy:
    """A policy from a trained network.

    The value port of a `PPOAdapter` at the end of the network is left out, with its carry.
    What else only the value estimates need costs nothing under `jit`.

    **Arguments:**

    - `network`: outputs a `PPONetworkOutput`; it is not changed.
    - `deterministic`: act by the mode of the policy, and by the mean of every bottleneck,
        instead of sampling.
    """
    network = _without_value_port(network)
    if deterministic:
        network = eqx.nn.inference_mode(network)
    return Policy(network, deterministic)


def _without_value_port(network: StatefulModule) -> StatefulModule:
    """The same network with nothing computed in the value port.

    Only where the adapter's output is the network's: elsewhere a container of the user may
    act by the value. Children keep their places, and so the keys of their noise.
    """
    if isinstance(network, PPOAdapter):
        return PPOAdapter(action=network.action, value=_NoValue())
    if isinstance(network, Sequential) and len(network):
        *layers, last = network.layers
        return Sequential([*layers, _without_value_port(last)])
    return network


@final
class _NoValue(StatelessModule):
    """Stands in the value port of a policy: zeros `[B]`."""

    def __call__(
        self, state: State, x: Tree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        n_envs = jax.tree.leaves(x)[0].shape[0]
        return StatefulModuleOutput(jnp.zeros(n_envs, jnp.float32), state)
