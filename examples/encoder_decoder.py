"""Trains an actor that acts through a noisy bottleneck, beside a critic on the same trunk.

    python examples/encoder_decoder.py [--seed 0] [--total-steps 2500000]

The task is MuJoCo Playground's ReacherEasy: a two-link arm that has to touch a target, whose
reward is 1 per step while it does. The trunk sees everything. An encoder turns its features
into an intention, four numbers with noise and a price in nats. The decoder, which moves the
arm, sees that intention and its own body, but no target. The critic reads the features.

Expect a return above 950 (of 1000; below 100 before training) in a few minutes, of which
compiling the physics takes the first, and an intention of 5 to 8 nats.
"""

import argparse
import operator

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import eqx_ppo as ep
from eqx_ppo.networks import (
    Concat,
    Dense,
    Filter,
    Flattener,
    Lift,
    Normalizer,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    Sequential,
    StatefulModule,
    VariationalBottleneck,
    make_mlp,
)

LATENT_SIZE = 4
SENSES = {"joints": 4, "target": 2, "velocity": 2}


def joints(obs: Float[Array, "B 6"]) -> Float[Array, "B 4"]:
    """Angles as cosines and sines: the shoulder turns without end."""
    return jnp.concatenate([jnp.cos(obs[:, :2]), jnp.sin(obs[:, :2])], axis=1)


def build_network(key: Array) -> StatefulModule:
    """Senses, then a fork into features and body, then actor and critic."""
    trunk_key, encoder_key, decoder_key, critic_key = jax.random.split(key, 4)
    senses = Filter(
        {"joints": joints, "target": lambda obs: obs[:, 2:4], "velocity": lambda obs: obs[:, 4:]}
    )
    trunk = Sequential([Flattener(), make_mlp([8, 64, 64], key=trunk_key)])
    body = Filter({"joints": "joints", "velocity": "velocity"})
    encoder = Sequential(
        [
            Dense(64, 2 * LATENT_SIZE, key=encoder_key),
            VariationalBottleneck(LATENT_SIZE, kl_weight=1e-3),
        ]
    )
    decoder = make_mlp([LATENT_SIZE + 6, 64, 64, 4], activation_last_layer=False, key=decoder_key)
    actor = [
        Concat(features=encoder, body=Flattener()),  # intention and body side by side
        decoder,
        NormalTanhSampler(entropy_weight=1e-3),
    ]
    critic = [
        Lift(operator.itemgetter("features")),
        make_mlp([64, 64, 1], activation_last_layer=False, key=critic_key),
    ]
    return Sequential(
        [
            senses,
            Normalizer(SENSES),
            Parallel(features=trunk, body=body),
            PPOAdapter(action=Sequential(actor), value=Sequential(critic)),
        ]
    )


def main() -> None:
    """Trains, then says how much the intention carries."""
    parser = argparse.ArgumentParser(description="Train an encoder-decoder on ReacherEasy.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=2_500_000)
    arguments = parser.parse_args()

    task = ep.load_playground("ReacherEasy")
    env = ep.EpisodeWrapper(task, 200)  # shorter than in the evaluation: more starts are seen
    n_updates = arguments.total_steps // (256 * 20) * 4 * 4  # iterations, epochs, minibatches
    config = ep.TrainConfig(
        seed=arguments.seed,
        ppo=ep.PPOConfig(
            n_envs=256,
            rollout_length=20,
            total_steps=arguments.total_steps,
            learning_rate=optax.linear_schedule(1e-3, 1e-4, n_updates),
            gradient_clipping=1.0,
        ),
        eval=ep.EvalConfig(every_steps=500_000, logging_level=ep.LoggingLevel.NETWORK_METRICS),
    )
    network = build_network(jax.random.key(arguments.seed))
    print("Compiling, then training on ReacherEasy ...", flush=True)
    result = ep.train_ppo(env, network, config, eval_env=ep.EpisodeWrapper(task, 1000))

    metrics = result.final_metrics
    divergence = metrics["eval/net/3/action/0/features/1/kl_divergence/mean"]
    print(f"Largest |ratio - 1| of the last rollout's replay: {metrics['losses/ratio_error']:.1e}")
    print(f"Divergence of the intention: {divergence:.1f} nats per step")
    print(f"Final return: {metrics['eval/episode_reward/mean']:.0f} of 1000")


if __name__ == "__main__":
    main()
