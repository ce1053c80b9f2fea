"""brax, by its `train`.

Its training step is a function inside `train` and cannot be called from outside. So `train`
itself runs, with evaluations switched off; between two of its progress callbacks it runs one
compiled epoch of `epoch_iterations` iterations and waits for it.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import NamedTuple, final

import jax
import jax.numpy as jnp

from benchmarks._environments import bare_env, is_playground
from benchmarks._gate import GatedRunner
from benchmarks._settings import Counts, Setting
from benchmarks.peers import Evaluation, Point, Runner
from eqx_ppo._typing import Tree

_FOR_EVER = 100_000  # epochs


def train_arguments(setting: Setting) -> dict[str, Tree]:
    """Arguments of brax's `train` that fix the work of an iteration and the loss."""
    return {
        "num_envs": setting.n_envs,
        "unroll_length": setting.rollout_length,
        "batch_size": setting.n_envs // setting.n_minibatches,
        "num_minibatches": setting.n_minibatches,
        "num_updates_per_batch": setting.n_epochs,
        "episode_length": setting.episode_length,
        "learning_rate": setting.learning_rate,
        "discounting": setting.discounting,
        "gae_lambda": setting.gae_lambda,
        "clipping_epsilon": setting.clip_range,
        "entropy_cost": setting.entropy_weight,
    }


@final
class Brax:
    """Its trainer knows stateless networks only."""

    name = "brax"

    def refusal(self, setting: Setting) -> str | None:
        if importlib.util.find_spec("brax") is None:
            return 'brax is not installed; `pip install "eqx-ppo[benchmarks]"` brings it'
        if not is_playground(setting):
            return "it is measured in environments of MuJoCo Playground only"
        if setting.network != "mlp":
            return "its PPO has no recurrent networks"
        return None

    def counts(self, setting: Setting) -> Counts:
        arguments = train_arguments(setting)
        samples = arguments["batch_size"] * arguments["unroll_length"]
        return Counts(
            env_steps=samples * arguments["num_minibatches"],
            gradient_steps=arguments["num_updates_per_batch"] * arguments["num_minibatches"],
            samples_per_gradient=samples,
        )

    def prepare(self, setting: Setting, seed: int) -> Runner:
        env: Tree = bare_env(setting)
        epoch = setting.epoch_iterations * setting.counts.env_steps

        def train(pause: Callable[[], None]) -> None:
            _train(
                env,
                setting,
                seed,
                num_timesteps=_FOR_EVER * epoch,
                num_evals=_FOR_EVER + 1,
                run_evals=False,
                eval_env=_NoEnv(int(env.action_size)),
                num_eval_envs=1,
                progress_fn=lambda steps, metrics: pause(),
            )

        return GatedRunner(train, setting.epoch_iterations)

    def learn(
        self, setting: Setting, seed: int, total_steps: int, evaluation: Evaluation
    ) -> list[Point]:
        points, start = [], time.perf_counter()

        def progress(steps, metrics):
            value = float(metrics["eval/episode_reward"])
            points.append(Point(int(steps), time.perf_counter() - start, value))

        _train(
            bare_env(setting),
            setting,
            seed,
            num_timesteps=total_steps,
            num_evals=total_steps // evaluation.every_steps + 1,
            num_eval_envs=evaluation.n_envs,
            deterministic_eval=True,
            progress_fn=progress,
        )
        return points


def _train(env: Tree, setting: Setting, seed: int, **how) -> None:
    import functools

    from brax.training.agents.ppo import networks, train as ppo
    from mujoco_playground import wrapper

    _restore_device_put_replicated()
    ppo.train(
        environment=env,
        seed=seed,
        normalize_observations=True,
        network_factory=functools.partial(
            networks.make_ppo_networks,
            policy_hidden_layer_sizes=setting.actor_sizes,
            value_hidden_layer_sizes=setting.critic_sizes,
        ),
        wrap_env_fn=wrapper.wrap_for_brax_training,
        **train_arguments(setting),
        **how,
    )


class _NoEnv(NamedTuple):
    """An environment for evaluations that never take place.

    `train` compiles the reset of its evaluation environment even without evaluations, and
    that is not part of what is measured.
    """

    action_size: int

    def reset(self, rng):
        from mujoco_playground import State

        del rng
        zero = jnp.zeros((), jnp.float32)
        data: Tree = ()
        return State(data=data, obs=jnp.zeros(1), reward=zero, done=zero, metrics={}, info={})

    def step(self, state, action):
        del action
        return state


def _restore_device_put_replicated() -> None:
    """brax 0.14.2 calls this function, which JAX has dropped since."""
    try:
        _ = jax.device_put_replicated
    except AttributeError:
        jax.device_put_replicated = _device_put_replicated


def _device_put_replicated(tree, devices):
    """One copy per device, stacked along a new leading axis."""
    if len(devices) != 1:
        raise ValueError(f"The benchmarks run on one device, but got {len(devices)}.")
    return jax.device_put(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree), devices[0])
