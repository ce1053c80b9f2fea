"""Networks that the ancestor can build too, each with one unbatched input."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eqx_ppo import networks as nets


def vector(size):
    return jax.ShapeDtypeStruct((size,), jnp.float32)


class Case(NamedTuple):
    """`only_ours` are metrics that the ancestor does not have."""

    build: Callable
    sample: object
    only_ours: tuple[str, ...] = ()


def policy(in_features, actions, key):
    sampler = nets.NormalTanhSampler(entropy_weight=0.3, min_std=0.2, std_scale=0.7)
    return nets.Sequential([nets.Dense(in_features, 2 * actions, key=key), sampler])


def bottleneck(in_features, latents, key, **options):
    dense = nets.Dense(in_features, 2 * latents, key=key)
    return nets.Sequential([dense, nets.VariationalBottleneck(latents, kl_weight=0.7, **options)])


def nested(key):
    """Every container, around children with state, statistics, noise and penalties."""
    keys = iter(jax.random.split(key, 10))
    sensors = {"eye": vector(3), "body": {"joints": vector(2), "speed": vector(1)}}
    encoder = nets.Concat(
        touch=nets.Sequential([nets.Normalizer(2), nets.Dense(2, 3, key=next(keys))]),
        eye=bottleneck(3, 2, next(keys)),
    )
    return nets.Sequential(
        [
            nets.Delay(sensors, 2, initial_value=0.5),
            nets.Normalizer({"eye": 3, "body": {"joints": 2, "speed": 1}}),
            nets.Filter({"eye": "eye", "touch": ("body", "joints")}),
            encoder,
            nets.Scale(0.5),
            nets.Parallel(
                fast=nets.LSTM(5, 3, trainable_initial_state=True, key=next(keys)),
                slow=nets.Sequential(
                    [
                        nets.Dense(5, 4, key=next(keys)),
                        nets.AR1VariationalBottleneck(2, kl_weight=0.2, ar1_weight=3.0),
                    ]
                ),
            ),
            nets.Flattener(),
            nets.Merge(
                a=nets.Splitter(left=2, right=3),
                b=nets.Sequential([nets.Dense(5, 2, key=next(keys)), nets.Splitter(up=1, down=1)]),
            ),
            nets.Map(left=nets.Normalizer(2), up=nets.Dense(1, 2, key=next(keys))),
        ]
    )


def feedforward_graph(key):
    """A diamond: the order of evaluation matters."""
    builder = nets.GraphBuilder()
    builder.add_output("motor", 2, output_to="action", activation=jnp.tanh)
    builder.add_population("hidden", 3, activation=jax.nn.swish)
    builder.add_input("sensors", 4, input_from="eye")
    builder.connect("hidden", "motor")
    builder.connect("sensors", "motor")
    builder.connect("sensors", "hidden")
    return builder.build(key=key)


def recurrent_graph(key):
    """Delays of 1 to 3 out of one population, recurrence, a reciprocal pair, two outputs."""
    builder = nets.GraphBuilder()
    builder.add_input("sensors", 4, input_from="eye", activation=jnp.tanh)
    builder.add_population("hidden", 3, activation=jnp.tanh)
    builder.add_output("memory", 3, activation=jnp.tanh)
    builder.add_output("motor", 2, output_to="action")
    builder.connect("sensors", "hidden")
    builder.connect("sensors", "memory", delay=3)
    builder.connect("sensors", "motor", delay=2)
    builder.connect("hidden", "hidden", delay=1)
    builder.connect("hidden", "memory", delay=1, reciprocal=True)
    builder.connect("hidden", "motor")
    builder.connect("memory", "motor")
    return builder.build(key=key)


def graph_with_transforms(key):
    """Connections with state, statistics, noise and penalties."""
    keys = jax.random.split(key, 5)
    populations = [
        nets.Population("sensors", 4, input_from="eye"),
        nets.Population("body", 2, input_from="body"),
        nets.Population("hidden", 3, jnp.tanh),
        nets.Population("motor", 2, output_to="action"),
    ]
    late = nets.Sequential([nets.Dense(4, 3, key=keys[0]), nets.Delay(vector(3), 2)])
    steady = nets.Sequential([nets.Dense(3, 4, key=keys[3]), nets.AR1VariationalBottleneck(2)])
    connections = [
        nets.Connection("sensors", "hidden", late),
        nets.Connection("sensors", "hidden", bottleneck(4, 3, keys[1])),
        nets.Connection("body", "hidden", nets.LSTM(2, 3, key=keys[2]), delay=1),
        nets.Connection("hidden", "hidden", delay=2),
        nets.Connection("hidden", "motor", steady),
        nets.Connection("body", "motor", nets.Normalizer(2)),
    ]
    return nets.PopulationGraph(populations, connections, key=keys[4])


def parts(key):
    """One sampler and one value for each part of the body, of which one is Map's."""
    keys = jax.random.split(key, 4)
    actors = {"leg": policy(3, 1, keys[0]), "arm": policy(3, 2, keys[1])}
    critics = {"leg": nets.Dense(3, 1, key=keys[2]), "arm": nets.Dense(3, 1, key=keys[3])}
    return nets.PPOAdapter(action=nets.Map(actors), value=nets.Map(critics))


SENSORS = {"eye": vector(3), "body": {"joints": vector(2), "speed": vector(1)}}

CASES = {
    "dense": Case(lambda key: nets.Dense(4, 3, activation=jnp.tanh, key=key), vector(4)),
    "dense_without_bias": Case(lambda key: nets.Dense(4, 3, use_bias=False, key=key), vector(4)),
    "lstm": Case(lambda key: nets.LSTM(4, 3, key=key), vector(4)),
    "lstm_trained_start": Case(
        lambda key: nets.LSTM(4, 3, trainable_initial_state=True, key=key), vector(4)
    ),
    "gru_trained_start": Case(
        lambda key: nets.GRU(4, 3, trainable_initial_state=True, key=key), vector(4)
    ),
    "delay_1": Case(lambda key: nets.Delay(vector(2), 1), vector(2)),
    "delay_3_mixed": Case(
        lambda key: nets.Delay({"x": vector(2), "n": jax.ShapeDtypeStruct((), jnp.int32)}, 3, 7.0),
        {"x": vector(2), "n": jax.ShapeDtypeStruct((), jnp.int32)},
    ),
    "normalizer_before_data": Case(lambda key: nets.Normalizer(3), vector(3)),
    "normalizer": Case(lambda key: nets.Normalizer(3), vector(3)),
    "normalizer_of_images": Case(
        lambda key: nets.Normalizer((2, 3)), jax.ShapeDtypeStruct((2, 3), jnp.float32)
    ),
    "normalizer_of_dicts": Case(
        lambda key: nets.Normalizer({"eye": 3, "body": {"joints": 2, "speed": 1}}), SENSORS
    ),
    "bottleneck": Case(
        lambda key: nets.VariationalBottleneck(3, kl_weight=0.7, min_std=0.01), vector(6)
    ),
    "ar1_bottleneck": Case(
        lambda key: nets.AR1VariationalBottleneck(3, kl_weight=0.7, ar1_weight=2.0), vector(6)
    ),
    "ar1_bottleneck_without_the_past": Case(
        lambda key: nets.AR1VariationalBottleneck(3, backprop_through_time=False), vector(6)
    ),
    "sampler": Case(
        lambda key: nets.NormalTanhSampler(entropy_weight=0.3, min_std=0.2, std_scale=0.7),
        vector(4),
        ("entropy",),
    ),
    "sampler_inference": Case(
        lambda key: nets.NormalTanhSampler(entropy_weight=0.3, inference=True),
        vector(4),
        ("entropy",),
    ),
    "scale": Case(lambda key: nets.Scale(2.5), SENSORS),
    "splitter": Case(lambda key: nets.Splitter(b=3, a=1, c=2), vector(6)),
    "flattener": Case(lambda key: nets.Flattener(), SENSORS),
    "flattener_below": Case(lambda key: nets.Flattener(1), [SENSORS, SENSORS]),
    "filter": Case(
        lambda key: nets.Filter(
            {"b": "eye", "a": ("body", "joints"), "c": lambda x: x["eye"] * x["body"]["speed"]}
        ),
        SENSORS,
    ),
    "nested": Case(nested, SENSORS),
    "parts": Case(
        parts,
        {"arm": vector(3), "leg": vector(3)},
        ("action/arm/1/entropy", "action/leg/1/entropy"),
    ),
    "mlp_actor_critic": Case(
        lambda key: nets.make_mlp_actor_critic(4, 2, [5], [6, 3], key=key),
        vector(4),
        ("1/action/2/entropy",),
    ),
    "feedforward_graph": Case(feedforward_graph, {"eye": vector(4)}),
    "recurrent_graph": Case(recurrent_graph, {"eye": vector(4)}),
    "graph_with_transforms": Case(
        graph_with_transforms,
        {"eye": vector(4), "body": vector(2)},
        tuple(
            f"{edge}/1/{name}"
            for edge in ("hidden->motor", "sensors->hidden#2")
            for name in ("kl_divergence", "l2_diff", "mu", "sigma")
            if "motor" in edge or name != "l2_diff"
        ),
    ),
}
