"""Small actor-critic networks and modules for tests.

The heads start with plain LeCun weights (the factories scale the actor's last layer down to
a hundredth), so that an action depends visibly on everything below it.
"""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

from eqx_ppo.envs import Env
from eqx_ppo.networks import (
    GRU,
    LSTM,
    Delay,
    Dense,
    Lift,
    Normalizer,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    PPONetworkOutput,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
    StatelessModule,
    make_mlp_actor_critic,
    make_recurrent_actor_critic,
)
from tests.helpers.envs import DictEnv, ScriptedEnv


def policy(n_features, n_actions, key, **sampler):
    """An action port: one linear layer and a sampler."""
    options = {"entropy_weight": 1e-2} | sampler
    return Sequential([Dense(n_features, 2 * n_actions, key=key), NormalTanhSampler(**options)])


def heads(n_features, n_actions, key, **sampler):
    """Linear action and value ports on shared features."""
    keys = jax.random.split(key)
    return PPOAdapter(
        action=policy(n_features, n_actions, keys[0], **sampler),
        value=Dense(n_features, 1, key=keys[1]),
    )


def dict_heads(n_features, sizes, key):
    """One action port and one value port for every part of a dictionary."""
    keys = iter(jax.random.split(key, 2 * len(sizes)))
    actors = {name: policy(n_features, size, next(keys)) for name, size in sizes.items()}
    critics = {name: Dense(n_features, 1, key=next(keys)) for name in sizes}
    return PPOAdapter(action=Parallel(actors), value=Parallel(critics))


def concatenate(obs):
    return jnp.concatenate(jax.tree.leaves(obs))


class Counter(StatefulModule):
    """Outputs a count `[B, 1]` that starts at 0 and rises by one per step."""

    def initialize_state(self, batch_size, *, key):
        return jnp.zeros(batch_size, jnp.float32)

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state[:, None], state + 1.0)


class CountingPolicy(StatefulModule):
    """A whole network: the value estimate is a count of steps, the action 0."""

    def initialize_state(self, batch_size, *, key):
        return jnp.zeros(batch_size, jnp.float32)

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)

    def __call__(self, state, x, rollout_extras=None):
        output = PPONetworkOutput(
            actions=jnp.zeros((state.shape[0], 1), jnp.float32),
            log_likelihoods=jnp.zeros_like(state),
            value_estimates=state,
        )
        return StatefulModuleOutput(output, state + 1.0)


class ObservedValue(StatelessModule):
    """A whole network: the value estimate is the first feature of the observation."""

    def __call__(self, state, x, rollout_extras=None):
        output = PPONetworkOutput(
            actions=jnp.zeros((x.shape[0], 1), jnp.float32),
            log_likelihoods=jnp.zeros(x.shape[0], jnp.float32),
            value_estimates=x[:, 0],
        )
        return StatefulModuleOutput(output, state)


class NotReplayed(StatelessModule):
    """A faulty layer: it adds something in the rollout that the replay leaves out."""

    def __call__(self, state, x, rollout_extras=None):
        in_replay = rollout_extras is not None
        return StatefulModuleOutput(x if in_replay else x + 0.3, state, rollout_extras=x)


class PoisonedGradient(StatelessModule):
    """The identity, whose gradient is `bad` if any input of the batch is beyond `limit`."""

    limit: float
    bad: float = float("nan")

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(_poison(x, self.limit, self.bad), state)


@jax.custom_vjp
def _poison(x, limit, bad):
    return x


_poison.defvjp(
    lambda x, limit, bad: (x, (x, limit, bad)),
    lambda saved, cotangent: (
        jnp.where(jnp.any(jnp.abs(saved[0]) > saved[1]), saved[2], cotangent),
        jnp.zeros((), jnp.float32),
        jnp.zeros((), jnp.float32),
    ),
)


SCRIPTED = ScriptedEnv((0, 1, 0, 0, 1), (0, 0, 0, 0, 1))
DICT = DictEnv(lengths=(2, 3, 5))


def _flat_network(layers, n_features):
    """Layers from the observation `[B, 2]` of `SCRIPTED` to features, and the heads."""

    def build(key):
        keys = jax.random.split(key)
        return Sequential([*layers(keys[0]), heads(n_features, 1, keys[1])])

    return build


def _dict_network(layers):
    """Layers on the observation of `DICT`, then a recurrent trunk, and one head per part."""

    def build(key):
        keys = jax.random.split(key, 3)
        trunk = [Lift(concatenate), LSTM(5, 6, trainable_initial_state=True, key=keys[1])]
        return Sequential([*layers(keys[0]), *trunk, dict_heads(6, DICT.action_size, keys[2])])

    return build


def _recurrent_actor_critic(key):
    """The factory's network, with a last actor layer of ordinary size."""
    network = make_recurrent_actor_critic(2, 1, 5, cell=GRU, key=key)
    return eqx.tree_at(lambda net: net[1].action[-2].kernel, network, replace_fn=lambda k: 100 * k)


_FLAT = jnp.zeros(2, jnp.float32)
_NESTED = {"goal": jnp.zeros(2, jnp.float32), "proprio": jnp.zeros(3, jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, its environment, and what a faulty replay of it would get wrong."""

    env: Env
    build: Callable[[jax.Array], StatefulModule]
    remembers: bool = False
    normalizes: bool = False


CASES = {
    "mlp": Case(
        SCRIPTED,
        lambda key: make_mlp_actor_critic(2, 1, [6], [5], normalize_obs=False, key=key),
    ),
    "shared_trunk": Case(
        SCRIPTED, _flat_network(lambda key: [Dense(2, 6, activation=jnp.tanh, key=key)], 6)
    ),
    "lstm": Case(SCRIPTED, _flat_network(lambda key: [LSTM(2, 6, key=key)], 6), remembers=True),
    "gru": Case(SCRIPTED, _flat_network(lambda key: [GRU(2, 6, key=key)], 6), remembers=True),
    "lstm_trained_start": Case(
        SCRIPTED,
        _flat_network(lambda key: [LSTM(2, 6, trainable_initial_state=True, key=key)], 6),
        remembers=True,
    ),
    "gru_trained_start": Case(
        SCRIPTED,
        _flat_network(lambda key: [GRU(2, 6, trainable_initial_state=True, key=key)], 6),
        remembers=True,
    ),
    "recurrent_actor_and_critic": Case(
        SCRIPTED, _recurrent_actor_critic, remembers=True, normalizes=True
    ),
    "delay": Case(SCRIPTED, _flat_network(lambda key: [Delay(_FLAT, 2)], 2), remembers=True),
    "normalizer_on_top": Case(
        SCRIPTED,
        _flat_network(lambda key: [Normalizer(2), Dense(2, 6, activation=jnp.tanh, key=key)], 6),
        normalizes=True,
    ),
    "normalizer_behind_delay": Case(
        SCRIPTED,
        _flat_network(lambda key: [Delay(_FLAT, 2, 1.0), Normalizer(2)], 2),
        remembers=True,
        normalizes=True,
    ),
    "normalizer_after_encoder": Case(
        SCRIPTED,
        _flat_network(lambda key: [Dense(2, 6, activation=jnp.tanh, key=key), Normalizer(6)], 6),
        normalizes=True,
    ),
    "everything": Case(
        SCRIPTED,
        _flat_network(
            lambda key: [
                Normalizer(2),
                Dense(2, 4, activation=jnp.tanh, key=key),
                Delay(jnp.zeros(4, jnp.float32), 1),
                Normalizer(4),
                LSTM(4, 6, trainable_initial_state=True, key=key),
            ],
            6,
        ),
        remembers=True,
        normalizes=True,
    ),
    "dict": Case(DICT, _dict_network(lambda key: []), remembers=True),
    "dict_normalizer": Case(
        DICT,
        _dict_network(lambda key: [Normalizer({"goal": 2, "proprio": 3})]),
        remembers=True,
        normalizes=True,
    ),
    "dict_delay": Case(
        DICT,
        _dict_network(lambda key: [Delay(_NESTED, 2), Normalizer({"goal": 2, "proprio": 3})]),
        remembers=True,
        normalizes=True,
    ),
}
