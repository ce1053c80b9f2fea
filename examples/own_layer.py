"""Writes a layer and a container against the contract, and trains them.

    python examples/own_layer.py [--total-steps 400000]

`Leaky` is a leaky integrator: a layer with carry state and one time constant per unit.
`Residual` is a container that adds its child's output to its input.
"""

import argparse
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import eqx_ppo as ep
from eqx_ppo.algorithms import replay_error, unroll_env
from eqx_ppo.envs import Pendulum, RewardScalingWrapper
from eqx_ppo.networks import (
    Call,
    Container,
    Dense,
    Normalizer,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
    make_mlp,
)


@final
class Leaky(StatefulModule):
    """`h' = a * h + (1 - a) * x` per unit, with a trained `a` between 0 and 1."""

    pre_decay: Float[Array, " units"]

    def __init__(self, units: int):
        """Starts with `a = 0.5`."""
        self.pre_decay = jnp.zeros(units, jnp.float32)

    def initialize_state(self, batch_size: int, *, key: Array) -> Float[Array, "B units"]:
        """Zeros."""
        return jnp.zeros((batch_size, *self.pre_decay.shape), jnp.float32)

    def reset_state(self, prev_state: Float[Array, "B units"]) -> Float[Array, "B units"]:
        """Zeros again, at the start of every episode."""
        return jnp.zeros_like(prev_state)

    def __call__(
        self,
        state: Float[Array, "B units"],
        x: Float[Array, "B units"],
        rollout_extras: None = None,
    ) -> StatefulModuleOutput:
        """One step."""
        decay = jax.nn.sigmoid(self.pre_decay)[None]
        hidden = decay * state + (1.0 - decay) * x
        return StatefulModuleOutput(output=hidden, next_state=hidden)


@final
class Residual(Container):
    """`x + inner(x)`. State, extras and statistics of `inner` are routed by the base."""

    def __init__(self, inner: StatefulModule):
        """Takes one child."""
        super().__init__({"inner": inner})

    def wire(self, call: Call, x: Array) -> Array:
        """The same wiring serves one step and a whole sequence."""
        return call.local(jnp.add, x, call("inner", x))


def build_network(key: Array) -> StatefulModule:
    """An actor-critic on a trunk of our own layers."""
    encoder_key, inner_key, actor_key, critic_key = jax.random.split(key, 4)
    actor = Sequential([Dense(32, 2, key=actor_key), NormalTanhSampler(entropy_weight=1e-3)])
    critic = make_mlp([32, 64, 1], activation_last_layer=False, key=critic_key)
    return Sequential(
        [
            Normalizer(3),
            Dense(3, 32, activation=jax.nn.swish, key=encoder_key),
            Residual(Sequential([Leaky(32), Dense(32, 32, key=inner_key)])),
            PPOAdapter(action=actor, value=critic),
        ]
    )


def main() -> None:
    """Checks that the replay reproduces the rollout, then trains."""
    parser = argparse.ArgumentParser(description="Train a network of own layers.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=400_000)
    arguments = parser.parse_args()

    task = ep.EpisodeWrapper(Pendulum(), 200)
    key, reset_key, state_key, rollout_key = jax.random.split(jax.random.key(arguments.seed), 4)
    network = build_network(key)

    env_state = jax.vmap(task.reset)(jax.random.split(reset_key, 8))
    state = network.initialize_state(8, key=state_key)
    _, _, transitions = unroll_env(task, env_state, network, state, 20, rollout_key)
    error = float(replay_error(network, state, transitions))
    print(f"Largest |ratio - 1| between rollout and replay: {error:.1e}", flush=True)

    config = ep.TrainConfig(
        seed=arguments.seed,
        ppo=ep.PPOConfig(
            n_envs=128,
            rollout_length=25,
            total_steps=arguments.total_steps,
            learning_rate=1e-3,
            n_epochs=8,
            gradient_clipping=1.0,
        ),
        eval=ep.EvalConfig(every_steps=50_000, max_episode_length=200),
    )
    result = ep.train_ppo(RewardScalingWrapper(task, 0.1), network, config, eval_env=task)
    print(f"Final return: {result.final_metrics['eval/episode_reward/mean']:.0f} (best: 0)")


if __name__ == "__main__":
    main()
