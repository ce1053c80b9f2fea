"""Everything that one iteration of training hands to the next."""

from typing import NamedTuple, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Key

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._tree import replace, strong_type
from eqx_ppo._typing import KeyLike, Tree, TreeDef
from eqx_ppo.algorithms._config import PPOConfig
from eqx_ppo.algorithms._optimizer import make_optimizer
from eqx_ppo.algorithms._rollout import batched_env
from eqx_ppo.algorithms._step import Stepper
from eqx_ppo.algorithms._transition import RolloutState
from eqx_ppo.envs import (
    Env,
    EnvSpec,
    ResetStrategy,
    Wrapper,
    own_resets,
    warn_without_time_limit,
)
from eqx_ppo.networks import StatefulModule, trainable
from eqx_ppo.ops import Counter, new_counter


@final
class Remainder(NamedTuple):
    """What a network has besides arrays (functions, flags, structure); hashable."""

    treedef: TreeDef
    leaves: tuple[object, ...]


class Counts(NamedTuple):
    """Exact counts over a training run.

    - `steps`: environment steps.
    - `iterations`: rollouts with their updates.
    - `skipped_updates`: gradient steps left out because the gradient was not finite.
    - `invalid_steps`: environment steps that left the environment non-finite.
    """

    steps: Counter
    iterations: Counter
    skipped_updates: Counter
    invalid_steps: Counter


@final
class TrainingState(eqx.Module):
    """The state of training: arrays, and one static remainder.

    A plain pytree for `jax.jit`, with donation, `lax.scan` and `jax.vmap`; an equal state
    never retraces. `network` puts the module together again.
    """

    arrays: list[Array | None]
    optimizer_state: Tree
    rollout_state: RolloutState
    key: Key[Array, ""]
    counts: Counts
    remainder: Remainder = eqx.field(static=True)
    env_spec: EnvSpec = eqx.field(static=True)

    @property
    def network(self) -> StatefulModule:
        """The network with its current weights and statistics."""
        return join_network(self.arrays, self.remainder)

    def with_network(self, network: StatefulModule) -> Self:
        """The same state with another network of the same structure."""
        arrays, remainder = split_network(network)
        if remainder != self.remainder or _shapes(arrays) != _shapes(self.arrays):
            raise ValueError(
                "`with_network` needs a network of the structure that training began with: the "
                "same modules with the same functions, flags and array shapes, and other numbers."
            )
        return replace(self, arrays=arrays)


def split_network(network: StatefulModule) -> tuple[list[Array | None], Remainder]:
    """A network as its arrays and the rest."""
    leaves, treedef = jax.tree.flatten(network)
    leaves = [jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    leaves = [strong_type(leaf) if eqx.is_array(leaf) else leaf for leaf in leaves]
    arrays = [leaf if eqx.is_array(leaf) else None for leaf in leaves]
    others = tuple(None if eqx.is_array(leaf) else leaf for leaf in leaves)
    return arrays, Remainder(treedef, others)


def _shapes(arrays: list[Array | None]) -> list[str | None]:
    return [None if array is None else f"{array.dtype}{array.shape}" for array in arrays]


def join_network(arrays: list[Array | None], remainder: Remainder) -> StatefulModule:
    """Undoes `split_network`."""
    pairs = zip(arrays, remainder.leaves, strict=True)
    leaves = [other if array is None else array for array, other in pairs]
    return jax.tree.unflatten(remainder.treedef, leaves)


@typed
def new_training_state(
    env: Env,
    network: StatefulModule,
    config: PPOConfig,
    key: KeyLike,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> TrainingState:
    """The start of training.

    Pure: under `jax.jit` its leaves own their buffers, so that they can be donated, and
    `network` itself is not part of the result. The environments are reset by the first step,
    and spread over their episode if they have a `stagger` method.

    **Arguments:**

    - `env`: written for one environment.
    - `network`: outputs a `PPONetworkOutput`.
    - `config`: of the run.
    - `key`: a PRNG key.
    - `optimizer`: an `optax` optimizer instead of the one that `config` describes.

    **Raises:** `ValueError` where environment and network do not fit each other.

    **Warns:** `TimeLimitWarning` for an environment that cannot report a time limit.
    """
    network_key, reset_key, next_key = jax.random.split(as_key(key), 3)
    optimizer = make_optimizer(config, optimizer)
    arrays, remainder = split_network(network)
    network = join_network(arrays, remainder)  # without NumPy arrays
    rollout_state, spec = _first_states(env, network, config, (network_key, reset_key))
    innermost = env.unwrapped if isinstance(env, Wrapper) else env
    warn_without_time_limit(innermost, rollout_state.env_state)
    return TrainingState(
        arrays=jax.tree.map(jnp.copy, arrays),
        optimizer_state=jax.tree.map(
            strong_type, optimizer.init(eqx.filter(network, trainable(network)))
        ),
        rollout_state=rollout_state,
        key=next_key,
        counts=Counts(*(new_counter() for _ in Counts._fields)),
        remainder=remainder,
        env_spec=spec,
    )


@typed
def restart_episodes(
    env: Env, training_state: TrainingState, config: PPOConfig, key: KeyLike
) -> TrainingState:
    """The same training state, with new episodes in all environments.

    Weights, statistics, the optimizer's state and the counts stay; environments and carries
    begin anew. For training that goes on where the states of the environments do not: on the
    host after a checkpoint (see `GymnasiumEnv`), or in another environment.

    **Arguments:**

    - `env`: the environment to go on in.
    - `training_state`: from earlier training, with any number of environments.
    - `config`: of the training to come.
    - `key`: a PRNG key for the new episodes.

    **Raises:** `ValueError` where environment and network do not fit each other.
    """
    network_key, reset_key = jax.random.split(as_key(key))
    rollout_state, spec = _first_states(
        env, training_state.network, config, (network_key, reset_key)
    )
    return replace(training_state, rollout_state=rollout_state, env_spec=spec)


def _first_states(
    env: Env, network: StatefulModule, config: PPOConfig, keys: tuple[KeyLike, KeyLike]
) -> tuple[RolloutState, EnvSpec]:
    """The state before all episodes, and the layout of the environment's states."""
    network_key, reset_key = keys
    network_state = network.initialize_state(config.n_envs, key=network_key)
    network_state = jax.tree.map(strong_type, network_state)
    batched = batched_env(env, network, network_state, config.n_envs)
    _check_resets(env, config.reset_strategy)
    stepper = Stepper(batched, network, config.reset_strategy, config.logging_level)
    state = stepper.start(network_state, config.n_envs, reset_key)
    _check_fit(network, network_state, state.env_state, config)
    return state, batched.spec


def _check_resets(env: Env, strategy: ResetStrategy) -> None:
    needed = own_resets(env, strategy)
    if strategy != needed:
        raise ValueError(
            f"`{type(env).__name__}` works with the reset strategy `{needed}` alone, but the "
            f"configuration has `{strategy}`. Set `PPOConfig(reset_strategy={needed})`."
        )


def _check_fit(
    network: StatefulModule,
    network_state: Tree,
    env_state: Tree,
    config: PPOConfig,
) -> None:
    output = jax.eval_shape(
        lambda state, obs: network(state, obs, None).output, network_state, env_state.obs
    )
    values = jax.tree.structure(output.value_estimates)
    rewards = jax.tree.structure(env_state.reward)
    if values != rewards:
        raise ValueError(
            "The network's value estimates must have the structure of the environment's "
            f"rewards, but the network gives {values} and the environment {rewards}. Give the "
            "value port one head per reward."
        )
    samplers = jax.tree.structure(output.log_likelihoods)
    if samplers != rewards and not config.combine_advantages:
        raise ValueError(
            "Without `combine_advantages` each sampler learns from the reward of its name, so "
            "both must have one structure, but the samplers form "
            f"{samplers} and the rewards {rewards}. Set `combine_advantages=True` to let every "
            "sampler learn from the sum of all rewards."
        )
