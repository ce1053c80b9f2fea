"""This library, by `train_ppo` as a user calls it."""

import time
from collections.abc import Callable
from typing import final

import equinox as eqx
import jax

from benchmarks._environments import Sizes, limited_env, sizes_of
from benchmarks._gate import GatedRunner
from benchmarks._settings import Counts, Setting
from benchmarks.peers import Evaluation, Point, Runner
from eqx_ppo import EvalConfig, PPOConfig, TrainConfig, train_ppo
from eqx_ppo.networks import (
    NormalTanhSampler,
    StatefulModule,
    make_mlp_actor_critic,
    make_recurrent_actor_critic,
)
from eqx_ppo.networks._factories import _SMALL_OUTPUT

_FOR_EVER = 10**12


def ppo_config(setting: Setting, total_steps: int = _FOR_EVER) -> PPOConfig:
    """Everything that the setting does not say is the library's default."""
    return PPOConfig(
        n_envs=setting.n_envs,
        rollout_length=setting.rollout_length,
        total_steps=total_steps,
        n_epochs=setting.n_epochs,
        n_minibatches=setting.n_minibatches,
        learning_rate=setting.learning_rate,
        discounting_factor=setting.discounting,
        gae_lambda=setting.gae_lambda,
        clip_range=setting.clip_range,
    )


def make_network(setting: Setting, sizes: Sizes, seed: int) -> StatefulModule:
    """The actor-critic of the setting."""
    network = _make_network(setting, sizes, seed)
    return _begun_alike(network) if setting.begin_alike else network


def _make_network(setting: Setting, sizes: Sizes, seed: int) -> StatefulModule:
    sampler = NormalTanhSampler(entropy_weight=setting.entropy_weight)
    key = jax.random.key(seed)
    if setting.network == "lstm":
        return make_recurrent_actor_critic(
            sizes.obs,
            sizes.action,
            setting.lstm_features,
            actor_hidden_sizes=setting.actor_sizes,
            critic_hidden_sizes=setting.critic_sizes,
            sampler=sampler,
            key=key,
        )
    return make_mlp_actor_critic(
        sizes.obs,
        sizes.action,
        setting.actor_sizes,
        setting.critic_sizes,
        sampler=sampler,
        key=key,
    )


def _begun_alike(network: StatefulModule) -> StatefulModule:
    """The network with the last layer of its actor at LeCun's scale, as all others."""

    def kernel(network):
        *_, last, _ = network.modules[-1].action.modules  # the sampler comes after it
        return last.kernel

    return eqx.tree_at(kernel, network, replace_fn=lambda weights: weights / _SMALL_OUTPUT)


@final
class EqxPPO:
    """The chunk of iterations per compiled call is the default of `PPOConfig`."""

    name = "eqx-ppo"

    def refusal(self, setting: Setting) -> str | None:
        del setting
        return None

    def counts(self, setting: Setting) -> Counts:
        config = ppo_config(setting)
        return Counts(
            env_steps=config.steps_per_iteration,
            gradient_steps=config.n_epochs * config.n_minibatches,
            samples_per_gradient=config.steps_per_iteration // config.n_minibatches,
        )

    def prepare(self, setting: Setting, seed: int) -> Runner:
        env = limited_env(setting)
        config = TrainConfig(
            ppo=ppo_config(setting),
            eval=EvalConfig(enabled=False),
            seed=seed,
            checkpoint_every_steps=setting.epoch_iterations * setting.counts.env_steps,
            console=False,
        )

        def train(pause: Callable[[], None]) -> None:
            network = make_network(setting, sizes_of(env), seed)
            train_ppo(env, network, config, checkpoint_fn=lambda state, steps: pause())

        return GatedRunner(train, setting.epoch_iterations)

    def learn(
        self, setting: Setting, seed: int, total_steps: int, evaluation: Evaluation
    ) -> list[Point]:
        env = limited_env(setting)
        network = make_network(setting, sizes_of(env), seed)
        config = TrainConfig(
            ppo=ppo_config(setting, total_steps),
            eval=EvalConfig(
                every_steps=evaluation.every_steps,
                n_envs=evaluation.n_envs,
                max_episode_length=setting.episode_length,
            ),
            seed=seed,
            console=False,
        )
        points, start = [], time.perf_counter()

        def log(metrics, steps):
            if "eval/episode_reward/mean" in metrics:
                now = time.perf_counter() - start
                points.append(Point(steps, now, metrics["eval/episode_reward/mean"]))

        train_ppo(env, network, config, log_fn=log)
        return points
