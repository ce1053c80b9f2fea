"""nnx-ppo, by its `train_ppo` as its documentation shows it."""

import importlib.util
import time
from collections.abc import Callable
from typing import NamedTuple, final

import jax
import jax.numpy as jnp

from benchmarks._environments import Sizes, bare_env, is_playground, sizes_of
from benchmarks._gate import GatedRunner
from benchmarks._settings import Counts, Setting
from benchmarks.peers import Evaluation, Point, Runner
from eqx_ppo._typing import Tree

_FOR_EVER = 10**12


def ppo_arguments(setting: Setting, total_steps: int = _FOR_EVER) -> dict[str, Tree]:
    """Arguments of nnx-ppo's `PPOConfig`."""
    return {
        "n_envs": setting.n_envs,
        "rollout_length": setting.rollout_length,
        "total_steps": total_steps,
        "gae_lambda": setting.gae_lambda,
        "discounting_factor": setting.discounting,
        "clip_range": setting.clip_range,
        "learning_rate": setting.learning_rate,
        "n_epochs": setting.n_epochs,
        "n_minibatches": setting.n_minibatches,
    }


@final
class NnxPPO:
    """Its loop returns to the host after every iteration, and so does its runner."""

    name = "nnx-ppo"

    def refusal(self, setting: Setting) -> str | None:
        if importlib.util.find_spec("nnx_ppo") is None:
            return 'nnx-ppo is not installed; `pip install "eqx-ppo[benchmarks]"` brings it'
        return None

    def counts(self, setting: Setting) -> Counts:
        arguments = ppo_arguments(setting)
        steps = arguments["n_envs"] * arguments["rollout_length"]
        return Counts(
            env_steps=steps,
            gradient_steps=arguments["n_epochs"] * arguments["n_minibatches"],
            samples_per_gradient=steps // arguments["n_minibatches"],
        )

    def prepare(self, setting: Setting, seed: int) -> Runner:
        from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
        from nnx_ppo.algorithms.ppo import train_ppo

        env = _limited_env(setting)
        config = TrainConfig(
            ppo=PPOConfig(**ppo_arguments(setting)), eval=EvalConfig(enabled=False), seed=seed
        )

        def train(pause: Callable[[], None]) -> None:
            network = _make_network(setting, sizes_of(env), seed)
            train_ppo(env, network, config, log_fn=lambda metrics, steps: pause())

        return GatedRunner(train, chunk=1)

    def learn(
        self, setting: Setting, seed: int, total_steps: int, evaluation: Evaluation
    ) -> list[Point]:
        from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
        from nnx_ppo.algorithms.ppo import train_ppo

        env = _limited_env(setting)
        network = _make_network(setting, sizes_of(env), seed)
        config = TrainConfig(
            ppo=PPOConfig(**ppo_arguments(setting, total_steps)),
            eval=EvalConfig(
                every_steps=evaluation.every_steps,
                n_envs=evaluation.n_envs,
                max_episode_length=setting.episode_length,
            ),
            seed=seed,
        )
        points, start = [], time.perf_counter()

        def log(metrics, steps):
            if "eval/episode_reward/mean" in metrics:
                value = float(metrics["eval/episode_reward/mean"])
                points.append(Point(int(steps), time.perf_counter() - start, value))

        train_ppo(env, network, config, log_fn=log)
        return points


def _limited_env(setting: Setting) -> Tree:
    from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper

    env: Tree = bare_env(setting)
    if not is_playground(setting):
        env = _FloatDone(env)
    return EpisodeWrapper(env, setting.episode_length)


class _FloatDone(NamedTuple):
    """An environment whose `done` is a float from the start, as in MuJoCo Playground.

    nnx-ppo's wrapper makes it one in `step` and expects it of `reset`.
    """

    env: Tree

    def reset(self, rng):
        state = self.env.reset(rng)
        return state.replace(done=state.done.astype(jnp.float32))

    def step(self, state, action):
        return self.env.step(state, action)

    @property
    def observation_size(self) -> int:
        return self.env.observation_size

    @property
    def action_size(self) -> int:
        return self.env.action_size


def _make_network(setting: Setting, sizes: Sizes, seed: int) -> Tree:
    from flax import nnx
    from nnx_ppo.networks.adapter import PPOAdapter
    from nnx_ppo.networks.containers import Sequential
    from nnx_ppo.networks.factories import make_mlp_actor_critic, make_mlp_layers
    from nnx_ppo.networks.normalizer import Normalizer
    from nnx_ppo.networks.recurrent import LSTM
    from nnx_ppo.networks.sampling_layers import NormalTanhSampler

    rngs = nnx.Rngs(seed)
    if setting.network == "mlp":
        return make_mlp_actor_critic(
            sizes.obs,
            sizes.action,
            list(setting.actor_sizes),
            list(setting.critic_sizes),
            rngs,
            activation=jax.nn.swish,
            entropy_weight=setting.entropy_weight,
        )
    hidden = setting.lstm_features
    sampler = NormalTanhSampler(rngs, entropy_weight=setting.entropy_weight, min_std=1e-1)

    def layers(hidden_sizes, n_outputs):
        widths = [hidden, *hidden_sizes, n_outputs]
        dense = make_mlp_layers(widths, rngs, jax.nn.swish, activation_last_layer=False)
        return [LSTM(sizes.obs, hidden, rngs), *dense]

    actor = [*layers(setting.actor_sizes, 2 * sizes.action), sampler]
    critic = layers(setting.critic_sizes, 1)
    adapter = PPOAdapter(action=Sequential(actor), value=Sequential(critic))
    return Sequential([Normalizer(sizes.obs), adapter])
