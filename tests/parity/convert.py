"""From a network of this library to the same network of its mutable ancestor, `nnx-ppo`.

`to_ancestor` builds the ancestor's module from ours with the same arrays in it, traced ones
included, so that both can be differentiated by the same weights. `state_to_ancestor` and
`extras_to_ancestor` translate what goes in and out.

Two things differ on purpose and are put in the ancestor's place here, by subclasses: how a
bottleneck moves from one key to the next (the noise of a given key is the ancestor's own),
and the formula of the sampler's entropy bonus.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("nnx_ppo")

from flax import nnx
from nnx_ppo.networks import (
    adapter,
    containers,
    delay,
    feedforward,
    graph,
    normalizer,
    recurrent,
    sampling_layers,
    utils,
    variational,
)
from nnx_ppo.networks.types import StatefulModule, StatefulModuleOutput

from eqx_ppo import networks as nets
from eqx_ppo.ops import Moments, count_as_float, tanh_normal_entropy

_ZEROS = nnx.initializers.zeros_init()  # overwritten


# --- The ancestor's modules, save for the differences that are on purpose -------------------


class Bottleneck(variational.VariationalBottleneck):
    """Its state is our `RandomState`; each call draws by the key that ours draws by."""

    def __call__(self, key, x, rollout_extras=None):
        out = super().__call__(nets.draw_keys(key), x, rollout_extras)
        return out.replace(next_state=nets.advance(key))


class AR1Bottleneck(variational.AR1VariationalBottleneck):
    """The same for the entry `"keys"` of the state."""

    def __call__(self, state, x, rollout_extras=None):
        random = state["keys"]
        out = super().__call__({**state, "keys": nets.draw_keys(random)}, x, rollout_extras)
        return out.replace(next_state={**out.next_state, "keys": nets.advance(random)})


class Sampler(sampling_layers.NormalTanhSampler):
    """The entropy is our formula instead of minus the log-density of one more sample."""

    def _entropy(self, mean, std):
        return tanh_normal_entropy(mean, std).sum(axis=-1)


class FlaxGRU(StatefulModule):
    """The ancestor has no GRU; this is Flax's cell, as its LSTM would hold it.

    Flax's cell has no bias on the product of state and candidate weights; ours, like
    Equinox's, has.
    """

    def __init__(self, in_features, hidden_features):
        rngs = nnx.Rngs(0)
        self.cell = nnx.GRUCell(
            in_features,
            hidden_features,
            kernel_init=_ZEROS,
            recurrent_kernel_init=_ZEROS,
            rngs=rngs,
        )
        self.cell.dense_h = nnx.Linear(
            hidden_features, 3 * hidden_features, kernel_init=_ZEROS, rngs=rngs
        )
        self.initial = nnx.Param(jnp.zeros(hidden_features))

    def __call__(self, state, x, rollout_extras=None):
        state, y = self.cell(state, x)
        return StatefulModuleOutput(state, y, jnp.zeros(x.shape[0]), {}, None)

    def reset_state(self, prev_state):
        return jnp.broadcast_to(self.initial[...], prev_state.shape)


# --- Modules ------------------------------------------------------------------------------


@functools.singledispatch
def to_ancestor(module):
    """The ancestor's module with the weights and statistics of ours."""
    raise TypeError(f"the ancestor has no `{type(module).__name__}`")


def _children(module):
    return {name: to_ancestor(module[name]) for name in module.names}


@to_ancestor.register
def _(module: nets.Dense):
    dense = feedforward.Dense(
        module.in_features,
        module.out_features,
        nnx.Rngs(0),
        activation=module.activation,
        use_bias=module.bias is not None,
        kernel_init=_ZEROS,
    )
    dense.linear.kernel.set_value(module.kernel)
    if module.bias is not None:
        dense.linear.bias.set_value(module.bias)
    return dense


@to_ancestor.register
def _(module: nets.LSTM):
    trained = module.initial_state is not None
    lstm = recurrent.LSTM(
        module.in_features,
        module.hidden_features,
        nnx.Rngs(0),
        kernel_init=_ZEROS,
        recurrent_kernel_init=_ZEROS,
        trainable_initial_state=trained,
    )
    lstm.cell.dense_i.kernel.set_value(module.cell.weight_ih.T)
    lstm.cell.dense_h.kernel.set_value(module.cell.weight_hh.T)
    lstm.cell.dense_h.bias.set_value(module.cell.bias)
    if trained:
        # Flax's carry is (cell, hidden); the ancestor gives it (`initial_h`, `initial_c`).
        lstm.initial_h.set_value(module.initial_state.cell)
        lstm.initial_c.set_value(module.initial_state.hidden)
    return lstm


@to_ancestor.register
def _(module: nets.GRU):
    gru = FlaxGRU(module.in_features, module.hidden_features)
    gru.cell.dense_i.kernel.set_value(module.cell.weight_ih.T)
    gru.cell.dense_i.bias.set_value(module.cell.bias)
    gru.cell.dense_h.kernel.set_value(module.cell.weight_hh.T)
    on_gates = jnp.zeros(2 * module.hidden_features, jnp.float32)
    gru.cell.dense_h.bias.set_value(jnp.concatenate([on_gates, module.cell.bias_n]))
    if module.initial_state is not None:
        gru.initial.set_value(module.initial_state)
    return gru


@to_ancestor.register
def _(module: nets.Delay):
    sample = jax.tree.unflatten(module.treedef, module.leaves)
    return delay.Delay(sample, module.k_steps, module.initial_value)


@to_ancestor.register
def _(module: nets.Normalizer):
    moments = module.statistics.moments

    def per_leaf(read):
        return jax.tree.map(read, moments, is_leaf=lambda node: isinstance(node, Moments))

    counts = per_leaf(lambda leaf: count_as_float(leaf.count))
    norm = normalizer.Normalizer(1)
    norm.mean.set_value(per_leaf(lambda leaf: leaf.mean))
    norm.M2.set_value(per_leaf(lambda leaf: leaf.variance * count_as_float(leaf.count)))
    norm.counter.set_value(jax.tree.leaves(counts)[0])
    return norm


@to_ancestor.register
def _(module: nets.VariationalBottleneck):
    return Bottleneck(module.latent_size, None, module.kl_weight, module.min_std)


@to_ancestor.register
def _(module: nets.AR1VariationalBottleneck):
    return AR1Bottleneck(
        module.latent_size,
        None,
        module.kl_weight,
        module.min_std,
        module.ar1_weight,
        module.backprop_through_time,
    )


@to_ancestor.register
def _(module: nets.NormalTanhSampler):
    sampler = Sampler(nnx.Rngs(0), module.entropy_weight, module.min_std, module.std_scale)
    sampler.deterministic = module.inference
    return sampler


@to_ancestor.register
def _(module: nets.Sequential):
    return containers.Sequential(list(_children(module).values()))


@to_ancestor.register
def _(module: nets.Parallel):
    return containers.Parallel(_children(module))


@to_ancestor.register
def _(module: nets.Concat):
    return containers.Concat(_children(module))


@to_ancestor.register
def _(module: nets.Map):
    return utils.Map(_children(module))


@to_ancestor.register
def _(module: nets.Merge):
    return utils.Merge(_children(module))


@to_ancestor.register
def _(module: nets.PPOAdapter):
    return adapter.PPOAdapter(**_children(module))


@to_ancestor.register
def _(module: nets.Splitter):
    return containers.Splitter(**dict(zip(module.names, module.sizes, strict=True)))


@to_ancestor.register
def _(module: nets.Flattener):
    return utils.Flattener(module.preserve_levels)


@to_ancestor.register
def _(module: nets.Filter):
    return utils.Filter(dict(zip(module.names, module.selectors, strict=True)))


@to_ancestor.register
def _(module: nets.Scale):
    return utils.Scale(module.factor)


@to_ancestor.register
def _(module: nets.PopulationGraph):
    populations = graph.PopulationGraph(nnx.Rngs(0))
    for node in module.populations:
        if node.input_from is not None:
            populations.add_input(
                node.name, node.size, input_from=node.input_from, activation=node.activation
            )
        elif node.output_to is not None:
            populations.add_output(
                node.name, node.size, output_to=node.output_to, activation=node.activation
            )
        else:
            populations.add_population(node.name, node.size, activation=node.activation)
    for name, edge in module.connections.edges:
        populations.connect(
            edge.source,
            edge.target,
            transform=to_ancestor(module.connections[name]),
            delay=edge.delay,
        )
    populations.finalize()
    return populations
