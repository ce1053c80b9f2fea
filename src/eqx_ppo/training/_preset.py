"""A preset: everything that a training run on one environment of MuJoCo Playground needs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self, final

import jax

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import KeyLike, Tree
from eqx_ppo.algorithms import EvalConfig, PPOConfig
from eqx_ppo.envs import (
    ActionRepeatWrapper,
    EpisodeWrapper,
    RewardScalingWrapper,
    Wrapper,
    load_playground,
)
from eqx_ppo.networks import (
    Filter,
    Flattener,
    Normalizer,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
    StatefulModule,
    make_mlp_layers,
)
from eqx_ppo.training._config import TrainConfig

_ACTOR_OBS = "state"  # the part of a structured observation that every actor sees
_MIN_STD = 1e-3
_INITIAL_STD = 1.0


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything that a training run on one environment of MuJoCo Playground needs.

    ```python
    preset = load_preset("CartpoleBalance")
    env = preset.make_env()
    network = preset.make_network(env, key=jax.random.key(0))
    result = train_ppo(env, network, preset.config, eval_env=preset.make_eval_env())
    ```

    Change numbers by `with_ppo` and `dataclasses.replace`.

    **Arguments:**

    - `name`: whose settings these are.
    - `env_name`: the environment that `make_env` loads.
    - `needs_models`: whether that needs robot models, which `load_playground` does not
        download. The others load offline.
    - `ppo`: settings of the algorithm. Steps are counted in actions.
    - `entropy_weight`: weight of the entropy bonus.
    - `actor_hidden_sizes`, `critic_hidden_sizes`: hidden layers of the two networks.
    - `critic_obs_key`: the part of a structured observation that the critic sees; the actor
        sees `"state"`. An observation that is one array is seen by both.
    - `max_len`: actions in an episode.
    - `action_repeat`: steps of the environment per action.
    - `reward_scale`: factor on the rewards in training.
    - `n_evals`: evaluations in a run after the one at its start, at least 1.
    - `n_eval_envs`: episodes per evaluation.

    **Raises:** `ValueError` if `n_evals` is not at least 1.
    """

    name: str
    env_name: str
    needs_models: bool
    ppo: PPOConfig
    entropy_weight: float
    actor_hidden_sizes: tuple[int, ...]
    critic_hidden_sizes: tuple[int, ...]
    critic_obs_key: str = _ACTOR_OBS
    max_len: int = 1000
    action_repeat: int = 1
    reward_scale: float = 1.0
    n_evals: int = 9
    n_eval_envs: int = 128

    def __post_init__(self) -> None:
        if self.n_evals < 1:
            raise ValueError(
                f"`Preset.n_evals` must be at least 1, but got {self.n_evals}. To train without "
                "evaluations set `enabled=False` in the `EvalConfig` of `config`."
            )

    @property
    def config(self) -> TrainConfig:
        """Settings of the run, with evaluations and checkpoints spread evenly over it.

        Evaluations sample actions, as the published ones do.
        """
        every_steps = max(1, math.ceil(self.ppo.total_steps / self.n_evals))
        evaluation = EvalConfig(
            every_steps=every_steps,
            n_envs=self.n_eval_envs,
            max_episode_length=self.max_len,
            deterministic=False,
        )
        return TrainConfig(ppo=self.ppo, eval=evaluation, checkpoint_every_steps=every_steps)

    def with_ppo(self, **changes: Tree) -> Self:
        """The preset with other values for some fields of its `PPOConfig`.

        ```python
        load_preset("CartpoleBalance").with_ppo(n_envs=256, total_steps=5_000_000)
        ```

        **Raises:** `TypeError` for a field that `PPOConfig` does not have, `ValueError` for
        values that do not fit each other.
        """
        return dataclasses.replace(self, ppo=dataclasses.replace(self.ppo, **changes))

    @typed
    def make_env(self, *, config_overrides: Mapping[str, Tree] | None = None) -> Wrapper:
        """Loads the environment to train in: with time limit, action repeat and reward scale.

        **Arguments:**

        - `config_overrides`: see `load_playground`, which also says what it raises.
        """
        env = self.make_eval_env(config_overrides=config_overrides)
        return RewardScalingWrapper(env, self.reward_scale)

    @typed
    def make_eval_env(self, *, config_overrides: Mapping[str, Tree] | None = None) -> Wrapper:
        """Loads the environment to evaluate in: that of `make_env`, with its own rewards."""
        env = load_playground(self.env_name, config_overrides=config_overrides)
        if self.action_repeat > 1:
            env = ActionRepeatWrapper(env, self.action_repeat)
        return EpisodeWrapper(env, self.max_len)

    @typed
    def make_network(self, env: Wrapper, *, key: KeyLike) -> StatefulModule:
        """The published network: two multilayer perceptrons on standardized observations.

        Swish activations, LeCun uniform kernels, and a normal distribution squashed by tanh
        whose deviation is at least 1e-3.

        **Arguments:**

        - `env`: from `make_env`.
        - `key`: a PRNG key.

        **Raises:** `ValueError` if the observation lacks the part that a port sees.
        """
        obs = jax.eval_shape(lambda key: env.reset(key).obs, jax.random.key(0))
        standardize = self._standardize(obs)
        sampler = NormalTanhSampler(entropy_weight=self.entropy_weight, min_std=_MIN_STD)
        n_parameters = sampler.input_size(env.action_size)
        actor_key, critic_key = jax.random.split(as_key(key))
        actor = _port(obs, _ACTOR_OBS, [*self.actor_hidden_sizes, n_parameters], actor_key)
        critic = _port(obs, self.critic_obs_key, [*self.critic_hidden_sizes, 1], critic_key)
        adapter = PPOAdapter(action=Sequential([*actor, sampler]), value=Sequential(critic))
        return Sequential([*standardize, adapter])

    def _standardize(self, obs: Tree) -> list[StatefulModule]:
        """A normalizer of the observation, or of the parts of it that a port sees."""
        if not isinstance(obs, Mapping):
            return [Normalizer(obs.shape, initial_std=_INITIAL_STD)]
        keys = sorted({_ACTOR_OBS, self.critic_obs_key})
        if not set(keys) <= set(obs):
            raise ValueError(
                f"The networks of preset `{self.name}` see {keys}, but the observation of the "
                f"environment has {sorted(obs)}. Set `critic_obs_key` by `dataclasses.replace`, or "
                "build a network of your own."
            )
        shapes = {name: obs[name].shape for name in keys}
        return [
            Filter({name: name for name in keys}),
            Normalizer(shapes, initial_std=_INITIAL_STD),
        ]


def _port(obs: Tree, part: str, sizes: list[int], key: KeyLike) -> list[StatefulModule]:
    """A multilayer perceptron on an observation, or on the part of it that it sees."""
    select, seen = [], obs
    if isinstance(obs, Mapping):
        select, seen = [Filter({part: part}), Flattener()], obs[part]
    layers = make_mlp_layers([math.prod(seen.shape), *sizes], activation_last_layer=False, key=key)
    return [*select, *layers]
