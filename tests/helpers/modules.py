"""Every module that must keep the contract, by name, with one unbatched input.

`MODULE_CASES` is what the conformance suite runs over; a new module joins it. The classes are
modules as a user would write them.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from eqx_ppo import networks as nets
from eqx_ppo.networks import StatefulModuleOutput
from eqx_ppo.ops import Moments, new_counter

# --- Modules of a user --------------------------------------------------------------------


class Residual(nets.Container):
    """Adds its input to the output of its child."""

    def __init__(self, inner):
        super().__init__({"inner": inner})

    def wire(self, call, x):
        return call.local(jnp.add, x, call("inner", x))


class Unused(nets.Container):
    """Calls `used` and never calls `spare`."""

    def __init__(self, used, spare):
        super().__init__({"spare": spare, "used": used})

    def wire(self, call, x):
        return call("used", x)


class CountUp(nets.StatefulModule):
    """Outputs how many steps the episode has had, and passes its input through."""

    def __call__(self, state: Int32[Array, " B"], x, rollout_extras=None):
        return StatefulModuleOutput({"count": state, "input": x}, state + jnp.int32(1))

    def initialize_state(self, batch_size, *, key):
        return jnp.zeros(batch_size, jnp.int32)

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)


class PreviousInput(NamedTuple):
    value: Array
    exists: Array


class Smoothness(nets.StatefulModule):
    """Passes its input through a gain and penalizes how much it moves within an episode."""

    gain: Float[Array, " features"]

    def __init__(self, features):
        self.gain = jnp.linspace(0.5, 1.5, features, dtype=jnp.float32)

    def __call__(self, state, x: Float[Array, "B features"], rollout_extras=None):
        y = x * self.gain[None]
        change = jnp.where(state.exists[:, None], y - state.value, 0.0)
        penalty = jnp.mean(jnp.square(change), axis=-1)
        next_state = PreviousInput(y, jnp.ones_like(state.exists))
        return StatefulModuleOutput(y, next_state, None, penalty, {"change": change})

    def initialize_state(self, batch_size, *, key):
        value = jnp.zeros((batch_size, self.gain.shape[0]), jnp.float32)
        return PreviousInput(value, jnp.zeros(batch_size, jnp.bool_))

    def reset_state(self, prev_state):
        return jax.tree.map(jnp.zeros_like, prev_state)


class Noise(nets.RandomModule):
    """Adds scaled noise that is regenerated in the replay: a reparameterized sample."""

    scale: Float[Array, " features"]

    def __init__(self, features):
        self.scale = jnp.linspace(0.5, 1.5, features, dtype=jnp.float32)

    def __call__(self, state, x: Float[Array, "B features"], rollout_extras=None):
        draw = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], jnp.float32))
        noise = draw(nets.draw_keys(state)) * self.scale[None]
        return StatefulModuleOutput(x + noise, nets.advance(state))


class Masked(nets.StatelessModule):
    """Multiplies by a fixed mask and a trained gain; the mask is a constant table."""

    mask: nets.Constant
    gain: Float[Array, " features"]

    def __init__(self, mask):
        self.mask = nets.Constant(mask)
        self.gain = jnp.ones_like(mask)

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x * (self.mask.value * self.gain)[None], state)


class Observation(NamedTuple):
    """A structured observation of a user."""

    proprio: Array
    goal: Array


# --- The registry -------------------------------------------------------------------------


class ModuleCase(NamedTuple):
    """A way to build a module, and one input of it without batch axes."""

    name: str
    build: Callable[[Array], nets.StatefulModule]
    sample: object


FLAT = jnp.zeros(3, jnp.float32)
MIXED = {
    "image": jnp.zeros((2, 2), jnp.uint8),
    "contact": jnp.zeros((), jnp.bool_),
    "speed": jnp.zeros(3, jnp.float32),
}
STRUCTURED = Observation(jnp.zeros(3, jnp.float32), jnp.zeros(2, jnp.float32))


def random_inputs(sample, lead, seed):
    """Random leaves `[*lead, *feat]` of the shapes and dtypes of an unbatched sample."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        shape = (*lead, *leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(shape), leaf.dtype)
        high = 2 if leaf.dtype == jnp.bool_ else 200
        return jnp.asarray(rng.integers(0, high, shape), leaf.dtype)

    return jax.tree.map(draw, sample)


def with_statistics(module, seed=0):
    """`module` with arbitrary statistics in all its normalizers, those of 40 samples."""
    rng = np.random.default_rng(seed)

    def is_moments(node):
        return isinstance(node, Moments)

    def fill(node):
        if not is_moments(node):
            return node
        mean = jnp.asarray(rng.normal(0.5, 1.0, node.mean.shape), jnp.float32)
        variance = jnp.asarray(rng.uniform(0.2, 4.0, node.mean.shape), jnp.float32)
        return Moments(mean, variance, new_counter(40))

    return jax.tree.map(fill, module, is_leaf=is_moments)


def with_initial_state(module, seed=0):
    """A recurrent layer whose trained initial state has moved away from zero."""
    rng = np.random.default_rng(seed)
    moved = jax.tree.map(
        lambda leaf: jnp.asarray(rng.uniform(-0.9, 0.9, leaf.shape), leaf.dtype),
        module.initial_state,
    )
    return eqx.tree_at(lambda module: module.initial_state, module, moved)


def _concatenate(tree):
    return jnp.concatenate(jax.tree.leaves(tree), axis=-1)


def _trained_start(layer):
    def build(key):
        return with_initial_state(layer(3, 4, trainable_initial_state=True, key=key))

    return build


def _delay_normalizer(key):
    return with_statistics(nets.Sequential([nets.Delay(FLAT, 2), nets.Normalizer(3)]))


def _encoder_normalizer(key):
    keys = jax.random.split(key)
    layers = [nets.Dense(3, 4, key=keys[0]), nets.Normalizer(4), nets.Dense(4, 2, key=keys[1])]
    return with_statistics(nets.Sequential(layers))


def _sampler(key):
    return nets.NormalTanhSampler(entropy_weight=1e-2, min_std=0.2, std_scale=0.7)


def _beta(key):
    return nets.BetaSampler(entropy_weight=1e-2, max_concentration=50.0)


def _categorical(key):
    return nets.CategoricalSampler(3, entropy_weight=1e-2)


def _multi_categorical(key):
    return nets.MultiCategoricalSampler((2, 1, 3), entropy_weight=1e-2)


def _masked(n):
    return nets.MaskedLogits(jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.bool_))


def _affine(key):
    return nets.AffineSampler(_beta(key), low=(-0.4, 1.0), high=(0.4, 3.0))


def _policy_of_all_kinds(key):
    """One sampler of every kind, by key, on parameters from one layer."""
    samplers = {
        "choice": _categorical(key),
        "choices": _multi_categorical(key),
        "push": nets.NormalSampler(2, entropy_weight=1e-2),
        "steer": nets.AffineSampler(_sampler(key), -0.4, 0.4),
        "turn": _beta(key),
    }
    sizes = {"choice": 3, "choices": 6, "push": 2, "steer": 2, "turn": 4}
    keys = jax.random.split(key)
    heads = [nets.Dense(3, 17, key=keys[0]), nets.Splitter(**sizes), nets.Map(samplers)]
    return nets.PPOAdapter(action=nets.Sequential(heads), value=nets.Dense(3, 1, key=keys[1]))


def _parallel(key):
    keys = jax.random.split(key)
    return nets.Parallel(policy=nets.Dense(3, 4, key=keys[0]), memory=nets.LSTM(3, 4, key=keys[1]))


def _nested(key):
    """Structured observations, normalizers at two depths, memory and delay side by side."""
    keys = jax.random.split(key, 3)
    inner = nets.Parallel(
        memory=nets.Sequential([nets.GRU(5, 4, key=keys[0]), nets.Normalizer(4)]),
        reflex=nets.Sequential([nets.Dense(5, 2, key=keys[1]), nets.Delay(jnp.zeros(2), 3)]),
        smooth=Smoothness(5),
    )
    head = Residual(nets.Dense(11, 11, activation=jnp.tanh, key=keys[2]))
    layers = [
        nets.Normalizer(Observation(3, 2)),
        nets.Lift(_concatenate),
        inner,
        nets.Lift(_concatenate),
        head,
    ]
    return with_statistics(nets.Sequential(layers))


def _adapter(key):
    """Two samplers on one input, a value per reward, `[B, 1]` and `[B]`."""
    keys = jax.random.split(key, 4)

    def limb(size, limb_key):
        sampler = nets.NormalTanhSampler(entropy_weight=1e-2)
        return nets.Sequential([nets.Dense(3, 2 * size, key=limb_key), sampler])

    squeezed = nets.Sequential([nets.Dense(3, 1, key=keys[3]), nets.Lift(lambda value: value[0])])
    return nets.PPOAdapter(
        action=nets.Parallel(arm=limb(2, keys[0]), leg=limb(1, keys[1])),
        value=nets.Parallel(arm=nets.Dense(3, 1, key=keys[2]), leg=squeezed),
    )


def _mlp_actor_critic(key):
    return with_statistics(nets.make_mlp_actor_critic(3, 2, (4, 4), (4,), key=key))


def _recurrent_actor_critic(cell):
    def build(key):
        module = nets.make_recurrent_actor_critic(
            3,
            2,
            4,
            cell=cell,
            actor_hidden_sizes=(4,),
            trainable_initial_state=True,
            key=key,
        )
        return with_statistics(module)

    return build


def _residual(key):
    keys = jax.random.split(key)
    return Residual(nets.Sequential([nets.GRU(3, 4, key=keys[0]), nets.Dense(4, 3, key=keys[1])]))


def _unused(key):
    keys = jax.random.split(key)
    spare = nets.Sequential([nets.Normalizer(3), CountUp(), nets.LSTM(3, 4, key=keys[0])])
    return Unused(used=nets.Dense(3, 4, key=keys[1]), spare=spare)


def _bottleneck(kind):
    def build(key):
        keys = jax.random.split(key)
        encoder, decoder = nets.Dense(3, 4, key=keys[0]), nets.Dense(2, 3, key=keys[1])
        return nets.Sequential([encoder, kind(2, kl_weight=0.5), decoder])

    return build


def _by_key(key):
    keys = jax.random.split(key, 3)
    joined = nets.Concat(
        speed=nets.Sequential([nets.Normalizer(3), nets.GRU(3, 4, key=keys[0])]),
        image=nets.Sequential([nets.Scale(0.01), nets.Flattener(), nets.Dense(4, 2, key=keys[1])]),
    )
    heads = nets.Merge(
        first=nets.Splitter(a=2, b=4),
        second=nets.Sequential([nets.Lift(lambda x: {"c": x}), nets.Map(c=nets.Scale(2.0))]),
    )
    picked = nets.Filter({"b": "b", "tail": lambda x: x["c"][:, 1:], "a": ("a",)})
    return with_statistics(
        nets.Sequential([joined, heads, picked, nets.Flattener(), nets.Dense(11, 2, key=keys[2])])
    )


def graph_with(transform):
    """A graph with recurrence, two delays and a given transform from 3 to 4 units."""

    def build(key):
        builder = nets.GraphBuilder()
        builder.add_input("sensors", 3, input_from="obs")
        builder.add_population("hidden", 4, activation=jnp.tanh)
        builder.add_output("motor", 2, output_to="action")
        builder.connect("sensors", "hidden", transform(key))
        builder.connect("hidden", "hidden", delay=1)
        builder.connect("hidden", "motor", delay=2)
        builder.connect("sensors", "motor", delay=3)
        builder.connect("hidden", "motor")
        return builder.build(key=key)

    return build


def _graph_without_delay(key):
    populations = [
        nets.Population("motor", 2, output_to="action"),
        nets.Population("hidden", 4, jnp.tanh),
        nets.Population("sensors", 3, input_from="obs"),
    ]
    memory = nets.Sequential([nets.Normalizer(3), nets.LSTM(3, 4, key=key)])
    connections = [
        nets.Connection("hidden", "motor"),
        nets.Connection("sensors", "hidden", memory),
    ]
    return with_statistics(nets.PopulationGraph(populations, connections, key=key))


def _graph(key):
    def transform(key):
        return nets.Sequential(
            [nets.Normalizer(3), nets.Dense(3, 8, key=key), nets.AR1VariationalBottleneck(4)]
        )

    return with_statistics(graph_with(transform)(key))


MODULE_CASES = (
    ModuleCase("dense", lambda key: nets.Dense(3, 4, activation=jnp.tanh, key=key), FLAT),
    ModuleCase("dense_without_bias", lambda key: nets.Dense(3, 4, use_bias=False, key=key), FLAT),
    ModuleCase("lstm", lambda key: nets.LSTM(3, 4, key=key), FLAT),
    ModuleCase("lstm_trained_start", _trained_start(nets.LSTM), FLAT),
    ModuleCase("gru", lambda key: nets.GRU(3, 4, key=key), FLAT),
    ModuleCase("gru_trained_start", _trained_start(nets.GRU), FLAT),
    ModuleCase("delay_1", lambda key: nets.Delay(FLAT, 1, initial_value=-0.5), FLAT),
    ModuleCase("delay_3_mixed", lambda key: nets.Delay(MIXED, 3, initial_value=1.0), MIXED),
    ModuleCase("normalizer", lambda key: with_statistics(nets.Normalizer(3)), FLAT),
    ModuleCase("normalizer_before_data", lambda key: nets.Normalizer(3), FLAT),
    ModuleCase(
        "normalizer_mixed",
        lambda key: with_statistics(nets.Normalizer({"image": (2, 2), "contact": (), "speed": 3})),
        MIXED,
    ),
    ModuleCase("normalizer_behind_delay", _delay_normalizer, FLAT),
    ModuleCase("normalizer_after_encoder", _encoder_normalizer, FLAT),
    ModuleCase("sampler", _sampler, jnp.zeros(4, jnp.float32)),
    ModuleCase("normal_sampler", lambda key: nets.NormalSampler(3, entropy_weight=1e-2), FLAT),
    ModuleCase("beta_sampler", _beta, jnp.zeros(4, jnp.float32)),
    ModuleCase("categorical_sampler", _categorical, FLAT),
    ModuleCase("masked_sampler", _categorical, _masked(3)),
    ModuleCase("multi_categorical_sampler", _multi_categorical, jnp.zeros(6, jnp.float32)),
    ModuleCase("masked_multi_sampler", _multi_categorical, _masked(6)),
    ModuleCase("affine_sampler", _affine, jnp.zeros(4, jnp.float32)),
    ModuleCase("policy_of_all_kinds", _policy_of_all_kinds, FLAT),
    ModuleCase("lift_layer_norm", lambda key: nets.Lift(eqx.nn.LayerNorm(3)), FLAT),
    ModuleCase("lift_mlp", lambda key: nets.Lift(eqx.nn.MLP(3, 4, 4, 1, key=key)), FLAT),
    ModuleCase("parallel", _parallel, FLAT),
    ModuleCase("nested", _nested, STRUCTURED),
    ModuleCase("adapter", _adapter, FLAT),
    ModuleCase("mlp", lambda key: nets.make_mlp((3, 4, 2), key=key), FLAT),
    ModuleCase("empty_sequential", lambda key: nets.Sequential([]), FLAT),
    ModuleCase("mlp_actor_critic", _mlp_actor_critic, FLAT),
    ModuleCase("lstm_actor_critic", _recurrent_actor_critic(nets.LSTM), FLAT),
    ModuleCase("gru_actor_critic", _recurrent_actor_critic(nets.GRU), FLAT),
    ModuleCase("residual", _residual, FLAT),
    ModuleCase("unused_child", _unused, FLAT),
    ModuleCase("count_up", lambda key: CountUp(), FLAT),
    ModuleCase("smoothness", lambda key: Smoothness(3), FLAT),
    ModuleCase("noise", lambda key: Noise(3), FLAT),
    ModuleCase("masked", lambda key: Masked(jnp.array([1.0, 0.0, 2.0], jnp.float32)), FLAT),
    ModuleCase("scale", lambda key: nets.Scale(0.5), MIXED),
    ModuleCase("splitter", lambda key: nets.Splitter(b=1, a=2), FLAT),
    ModuleCase("flattener", lambda key: nets.Flattener(), MIXED),
    ModuleCase(
        "flattener_below",
        lambda key: nets.Flattener(preserve_levels=1),
        {"b": MIXED, "a": [FLAT, FLAT]},
    ),
    ModuleCase(
        "filter",
        lambda key: nets.Filter({"z": ("a", 1), "y": "b", "x": lambda x: x["b"]["speed"] * 2.0}),
        {"b": MIXED, "a": [FLAT, FLAT]},
    ),
    ModuleCase("by_key", _by_key, MIXED),
    ModuleCase("bottleneck", _bottleneck(nets.VariationalBottleneck), FLAT),
    ModuleCase("ar1_bottleneck", _bottleneck(nets.AR1VariationalBottleneck), FLAT),
    ModuleCase("graph", _graph, {"obs": FLAT}),
    ModuleCase("graph_without_delay", _graph_without_delay, {"obs": FLAT}),
)
