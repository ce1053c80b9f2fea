"""Trains a graph of neural populations that senses a pendulum two steps late.

    python examples/neural_graph.py [--seed 0] [--total-steps 1000000]

What the graph senses is 0.1 s old. It makes up for that by memory: recurrence, and a copy of
its own motor command. The critic is a multilayer perceptron that sees the pendulum as it is.

Expect a return between -190 and -150 (about -1450 before training) in a minute or two.
"""

import argparse
import operator

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

import eqx_ppo as ep
from eqx_ppo.algorithms import replay_error, unroll_env
from eqx_ppo.envs import Pendulum, RewardScalingWrapper
from eqx_ppo.networks import (
    Filter,
    GraphBuilder,
    Lift,
    Normalizer,
    NormalTanhSampler,
    PopulationGraph,
    PPOAdapter,
    Sequential,
    StatefulModule,
    make_mlp,
)


def build_graph(key: Array) -> PopulationGraph:
    """Senses, two modules of interneurons, and a motor population."""
    builder = GraphBuilder()
    builder.add_input("sensory", 3, input_from="senses")
    builder.add_population("state", 32, activation=jnp.tanh)
    builder.add_population("control", 32, activation=jnp.tanh)
    builder.add_output("motor", 2, output_to="motor")

    builder.connect("sensory", "state", delay=2)
    builder.connect("sensory", "control", delay=2)
    builder.connect("state", "state", delay=1)  # recurrence
    builder.connect("state", "control", delay=1, reciprocal=True)
    builder.connect("control", "motor")
    builder.connect("motor", "state", delay=1)  # a copy of the command
    return builder.build(key=key)


def build_network(key: Array) -> StatefulModule:
    """The graph as the actor, beside a critic without memory."""
    graph_key, critic_key = jax.random.split(key)
    actor = Sequential(
        [
            Filter({"senses": lambda obs: obs}),
            build_graph(graph_key),
            Lift(operator.itemgetter("motor")),
            NormalTanhSampler(entropy_weight=1e-3),
        ]
    )
    critic = make_mlp([3, 64, 64, 1], activation_last_layer=False, key=critic_key)
    return Sequential([Normalizer(3), PPOAdapter(action=actor, value=critic)])


def main() -> None:
    """Checks that the replay reproduces the rollout, then trains."""
    parser = argparse.ArgumentParser(description="Train a graph of populations with delays.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    arguments = parser.parse_args()

    task = ep.EpisodeWrapper(Pendulum(), 100)  # shorter than in the evaluation: more starts
    key, reset_key, state_key, rollout_key = jax.random.split(jax.random.key(arguments.seed), 4)
    network = build_network(key)
    print(build_graph(key))

    env_state = jax.vmap(task.reset)(jax.random.split(reset_key, 8))
    state = network.initialize_state(8, key=state_key)
    _, _, transitions = unroll_env(task, env_state, network, state, 20, rollout_key)
    error = float(replay_error(network, state, transitions))
    print(f"Largest |ratio - 1| between rollout and replay: {error:.1e}", flush=True)

    n_updates = arguments.total_steps // (128 * 25) * 8 * 4  # iterations, epochs, minibatches
    config = ep.TrainConfig(
        seed=arguments.seed,
        ppo=ep.PPOConfig(
            n_envs=128,
            rollout_length=25,
            total_steps=arguments.total_steps,
            learning_rate=optax.linear_schedule(1e-3, 1e-4, n_updates),
            discounting_factor=0.97,
            n_epochs=8,
            gradient_clipping=1.0,
        ),
        eval=ep.EvalConfig(every_steps=100_000, n_envs=256, max_episode_length=200),
    )
    eval_task = ep.EpisodeWrapper(Pendulum(), 200)
    result = ep.train_ppo(RewardScalingWrapper(task, 0.1), network, config, eval_env=eval_task)
    print(f"Final return: {result.final_metrics['eval/episode_reward/mean']:.0f} (best: 0)")


if __name__ == "__main__":
    main()
