"""Standard networks by name: what a run folder needs to build its network again."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias, final, runtime_checkable

import jax

from eqx_ppo._keys import as_key
from eqx_ppo._typing import KeyLike, Tree
from eqx_ppo.algorithms import make_sampler
from eqx_ppo.envs import Actions, ContinuousActions, Env, Wrapper
from eqx_ppo.networks import (
    GRU,
    LSTM,
    Dense,
    Flattener,
    Normalizer,
    Parallel,
    PPOAdapter,
    Sequential,
    StatefulModule,
    make_mlp_actor_critic,
    make_mlp_layers,
    make_recurrent_actor_critic,
)
from eqx_ppo.training._environments import find_source
from eqx_ppo.training._presets import load_preset

NetworkKind: TypeAlias = Literal["mlp", "lstm", "gru", "preset"]

_CELLS = {"lstm": LSTM, "gru": GRU}
_SMALL_OUTPUT = 1e-2  # as in `make_mlp_actor_critic`


@runtime_checkable
class _HasActionSize(Protocol):
    @property
    def action_size(self) -> Tree: ...


@runtime_checkable
class _DescribesActions(Protocol):
    @property
    def actions(self) -> Actions: ...


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A standard network: an actor and a critic on standardized observations.

    **Arguments:**

    - `kind`: a multilayer perceptron (`"mlp"`), a recurrent cell in actor and critic
        (`"lstm"`, `"gru"`), or the published network of the environment's preset (`"preset"`).
    - `actor_hidden_sizes`, `critic_hidden_sizes`: dense layers of the two, after the cell.
    - `hidden_features`: size of the recurrent state in the actor and in the critic.
    - `entropy_weight`: weight of the entropy bonus.

    **Raises:** `ValueError` for numbers out of range.
    """

    kind: NetworkKind = "mlp"
    actor_hidden_sizes: tuple[int, ...] = (64, 64, 64, 64)
    critic_hidden_sizes: tuple[int, ...] = (256, 256)
    hidden_features: int = 64
    entropy_weight: float = 1e-2

    def __post_init__(self) -> None:
        kinds = ("preset", "mlp", *_CELLS)
        if self.kind not in kinds:
            raise ValueError(f"`NetworkConfig.kind` must be one of {kinds}, but got {self.kind!r}.")
        for name in ("actor_hidden_sizes", "critic_hidden_sizes"):
            object.__setattr__(self, name, tuple(vars(self)[name]))
            if not all(isinstance(size, int) and size >= 1 for size in vars(self)[name]):
                raise ValueError(
                    f"`NetworkConfig.{name}` must be sizes of at least 1, but got "
                    f"{vars(self)[name]}."
                )
        if self.hidden_features < 1:
            raise ValueError(
                "`NetworkConfig.hidden_features` must be at least 1, but got "
                f"{self.hidden_features}."
            )

    def make_network(self, env: Env, env_name: str, *, key: KeyLike) -> StatefulModule:
        """Builds a network for an environment.

        Observations, actions and rewards may be dicts: actor and critic then see all of the
        observation, and have a head for each action and for each reward.

        **Arguments:**

        - `env`: with `action_size`, or `actions` as the adapters have.
        - `env_name`: whose preset is meant by `"preset"`.
        - `key`: a PRNG key.

        **Raises:** `ValueError` for an environment that has no preset, or does not describe its
        actions.
        """
        if self.kind == "preset":
            return self._make_preset(env, env_name, key)
        obs, rewards = jax.eval_shape(lambda key: _seen(env, key), jax.random.key(0))
        actions = _actions(env)
        is_flat = isinstance(obs, jax.ShapeDtypeStruct) and obs.ndim == 1
        if not is_flat or isinstance(actions, Mapping) or isinstance(rewards, Mapping):
            return self._make_with_heads(obs, actions, rewards, key)
        size, sampler = actions.size, make_sampler(actions, entropy_weight=self.entropy_weight)
        sizes = (self.actor_hidden_sizes, self.critic_hidden_sizes)
        if self.kind == "mlp":
            return make_mlp_actor_critic(obs.shape[0], size, *sizes, sampler=sampler, key=key)
        return make_recurrent_actor_critic(
            obs.shape[0],
            size,
            self.hidden_features,
            cell=_CELLS[self.kind],
            actor_hidden_sizes=self.actor_hidden_sizes,
            critic_hidden_sizes=self.critic_hidden_sizes,
            sampler=sampler,
            key=key,
        )

    def _make_preset(self, env: Env, env_name: str, key: KeyLike) -> StatefulModule:
        if not isinstance(env, Wrapper):
            raise ValueError("The network of a preset needs an environment with a time limit.")
        preset = dataclasses.replace(
            load_preset(find_source(env_name)[1]),
            actor_hidden_sizes=self.actor_hidden_sizes,
            critic_hidden_sizes=self.critic_hidden_sizes,
            entropy_weight=self.entropy_weight,
        )
        return preset.make_network(env, key=key)

    def _make_with_heads(
        self, obs: Tree, actions: Actions, rewards: Tree, key: KeyLike
    ) -> StatefulModule:
        shapes = jax.tree.map(lambda leaf: leaf.shape, obs)
        n_inputs = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(obs))
        actor_key, critic_key, action_key, value_key = jax.random.split(as_key(key), 4)
        actor, width = self._trunk(n_inputs, self.actor_hidden_sizes, actor_key)
        actor.append(_action_heads(width, actions, self.entropy_weight, action_key))
        critic, width = self._trunk(n_inputs, self.critic_hidden_sizes, critic_key)
        critic.append(_value_heads(width, rewards, value_key))
        adapter = PPOAdapter(action=Sequential(actor), value=Sequential(critic))
        return Sequential([Normalizer(shapes), adapter])

    def _trunk(
        self, n_inputs: int, sizes: tuple[int, ...], key: KeyLike
    ) -> tuple[list[StatefulModule], int]:
        """Everything below the heads, and how many features it has."""
        cell_key, dense_key = jax.random.split(as_key(key))
        layers: list[StatefulModule] = [Flattener()]
        if self.kind in _CELLS:
            layers.append(_CELLS[self.kind](n_inputs, self.hidden_features, key=cell_key))
            n_inputs = self.hidden_features
        if sizes:
            layers += make_mlp_layers([n_inputs, *sizes], key=dense_key)
        return layers, sizes[-1] if sizes else n_inputs


def default_network_config(kind: NetworkKind, env_name: str) -> NetworkConfig:
    """A network of that kind with its customary sizes.

    **Raises:** `ValueError` if the environment has no preset and `kind` is `"preset"`.
    """
    if kind == "mlp":
        return NetworkConfig()
    if kind != "preset":
        return NetworkConfig(kind=kind, actor_hidden_sizes=(), critic_hidden_sizes=())
    preset = load_preset(find_source(env_name)[1])
    return NetworkConfig(
        kind=kind,
        actor_hidden_sizes=preset.actor_hidden_sizes,
        critic_hidden_sizes=preset.critic_hidden_sizes,
        entropy_weight=preset.entropy_weight,
    )


def _seen(env: Env, key: KeyLike) -> tuple[Tree, Tree]:
    state = env.reset(key)
    return state.obs, state.reward


def _actions(env: Env) -> Actions:
    """What actions the environment takes; numbers in [-1, 1] where it only says how many."""
    inner = env.unwrapped if isinstance(env, Wrapper) else env
    if isinstance(inner, _DescribesActions):
        return inner.actions
    if not isinstance(inner, _HasActionSize):
        raise ValueError(
            f"`{type(inner).__name__}` has neither `actions` nor `action_size`, so that no network "
            "can be built for it by name."
        )
    return jax.tree.map(lambda n: ContinuousActions((-1.0,) * n, (1.0,) * n), inner.action_size)


def _action_heads(
    width: int, actions: Actions, entropy_weight: float, key: KeyLike
) -> StatefulModule:
    """One sampler per action."""
    if isinstance(actions, Mapping):
        keys = jax.random.split(as_key(key), len(actions))
        return Parallel(
            {
                name: _action_heads(width, part, entropy_weight, part_key)
                for (name, part), part_key in zip(actions.items(), keys, strict=True)
            }
        )
    sampler = make_sampler(actions, entropy_weight=entropy_weight)
    small = jax.nn.initializers.variance_scaling(_SMALL_OUTPUT**2, "fan_in", "uniform")
    head = Dense(width, sampler.input_size(actions.size), kernel_init=small, key=key)
    return Sequential([head, sampler])


def _value_heads(width: int, rewards: Tree, key: KeyLike) -> StatefulModule:
    """One value per reward."""
    if isinstance(rewards, Mapping):
        keys = jax.random.split(as_key(key), len(rewards))
        return Parallel(
            {
                name: _value_heads(width, part, part_key)
                for (name, part), part_key in zip(rewards.items(), keys, strict=True)
            }
        )
    return Dense(width, 1, key=key)
