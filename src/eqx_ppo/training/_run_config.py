"""Everything that a run is made of, as one record that fits a JSON file."""

import dataclasses
from collections.abc import Mapping
from typing import final

import jax

from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import EvalConfig, PPOConfig
from eqx_ppo.envs import Env
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training._config import TrainConfig
from eqx_ppo.training._config_json import config_from_json, config_to_json
from eqx_ppo.training._environments import EnvConfig, find_source
from eqx_ppo.training._network_config import (
    NetworkConfig,
    NetworkKind,
    default_network_config,
)
from eqx_ppo.training._presets import load_preset
from eqx_ppo.training._video import VideoConfig


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run that can be built from names and numbers alone, as the command line does.

    ```python
    config = default_run_config("Pendulum")
    env, eval_env = config.env.make_env(), config.env.make_eval_env()
    train_ppo(env, config.make_network(env), config.train, eval_env=eval_env)
    ```

    **Arguments:**

    - `env`: the environment.
    - `network`: the network.
    - `train`: of `train_ppo`; its seed is that of the network too.
    - `video`: of the videos.
    """

    env: EnvConfig
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    video: VideoConfig = dataclasses.field(default_factory=VideoConfig)

    def make_network(self, env: Env) -> StatefulModule:
        """Builds the untrained network of the run.

        **Arguments:**

        - `env`: from `env.make_env()`.

        **Raises:** see `NetworkConfig.make_network`.
        """
        key = jax.random.key(self.train.seed)
        return self.network.make_network(env, self.env.name, key=key)

    def to_json(self) -> dict[str, Tree]:
        """The run as dicts, lists, strings and numbers."""
        return {
            "env": dataclasses.asdict(self.env),
            "network": dataclasses.asdict(self.network),
            "train": config_to_json(self.train),
            "video": dataclasses.asdict(self.video),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Tree]) -> "RunConfig":
        """Undoes `to_json`.

        **Raises:** `ValueError` for fields that are missing or unknown, or values that a
        record refuses.
        """
        parts = {"env", "network", "train", "video"}
        if not isinstance(data, Mapping) or set(data) != parts:
            found = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(
                f"The configuration of a run must have the parts {sorted(parts)}, but has {found}."
            )
        try:
            train = config_from_json(data["train"])
        except TypeError as error:
            raise ValueError(f"`train` in the configuration of a run: {error}") from error
        return cls(
            env=_record(EnvConfig, "env", data["env"]),
            network=_record(NetworkConfig, "network", data["network"]),
            train=train,
            video=_record(VideoConfig, "video", data["video"]),
        )


def default_run_config(
    env_name: str, *, preset: bool = False, network: NetworkKind | None = None
) -> RunConfig:
    """Settings that an environment is trained with in minutes, or those of its preset.

    **Arguments:**

    - `env_name`: of the environment.
    - `preset`: begin with the published settings for it; see `load_preset`.
    - `network`: `"mlp"` by default, or with `preset` the network of the preset.

    **Raises:** `ValueError` for an environment that is unknown, or has no preset.
    """
    kind = network or ("preset" if preset else "mlp")
    source, bare_name = find_source(env_name)
    action_repeat = 1
    if preset:
        settings = load_preset(bare_name)
        action_repeat, train = settings.action_repeat, settings.config
    else:
        settings = source.customs(bare_name)
        train = _train_config(settings.ppo)
    env = EnvConfig(
        name=env_name,
        max_len=settings.max_len,
        action_repeat=action_repeat,
        reward_scale=settings.reward_scale,
    )
    return RunConfig(env=env, network=default_network_config(kind, env_name), train=train)


def _train_config(ppo: PPOConfig) -> TrainConfig:
    """With ten evaluations and five checkpoints."""
    evaluation = EvalConfig(every_steps=ppo.total_steps // 10, n_envs=32)
    return TrainConfig(ppo=ppo, eval=evaluation, checkpoint_every_steps=2 * evaluation.every_steps)


def _record(kind: type, name: str, values: Tree) -> Tree:
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(values, Mapping) or not set(values) <= fields:
        unknown = sorted(set(values) - fields) if isinstance(values, Mapping) else values
        raise ValueError(
            f"`{name}` in the configuration of a run must have fields of `{kind.__name__}`, but "
            f"has {unknown}."
        )
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"`{name}` in the configuration of a run: {error}") from error
