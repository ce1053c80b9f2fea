"""What an iteration cannot do without: its matrix products.

The floor of a network is the forward and backward products of an iteration, at the same
sizes, batch sizes and counts, as plain `@` with nothing between them: no biases, no
activations, no loss. An LSTM also keeps its gates, whose transcendental functions cost about
as much as the products on a CPU, and their derivatives. Its gradient by the recurrent matrix is
one product for all steps.

A second, higher floor has the activations of the hidden layers and their derivatives too, which
no network can leave out either. Another way to multiply, with a gradient of its own, may take
the place of `@`.
"""

import itertools
import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks._environments import Sizes
from benchmarks._settings import Setting

Part = Literal["rollout", "bootstrap", "update"]
PARTS: tuple[Part, ...] = ("rollout", "bootstrap", "update")
Activation = Callable[[Array], Array]
Multiply = Callable[[Array, Array], Array]
_TINY = 1e-30  # ties one product to the next without changing it


class Product(NamedTuple):
    """`times` products of a `[rows, inner]` with an `[inner, columns]` matrix."""

    part: Part
    rows: int
    inner: int
    columns: int
    times: int

    @property
    def multiply_adds(self) -> int:
        return self.rows * self.inner * self.columns * self.times


def layer_sizes(setting: Setting, sizes: Sizes) -> dict[str, list[int]]:
    """The widths of the dense layers of actor and critic, from first to last."""
    first = setting.lstm_features if setting.network == "lstm" else sizes.obs
    return {
        "actor": [first, *setting.actor_sizes, 2 * sizes.action],
        "critic": [first, *setting.critic_sizes, 1],
    }


def products(setting: Setting, sizes: Sizes) -> list[Product]:
    """Every product of an iteration.

    The rollout runs both networks on each step; the bootstrap runs the critic once on the last
    observations. An update runs both on its minibatch and goes back: for each layer one
    product for the gradient of the weights and, but for the first layer, one for that of the
    input.
    """
    found = []
    for network, widths in layer_sizes(setting, sizes).items():
        pairs = list(itertools.pairwise(widths))
        recurrent = setting.network == "lstm"
        for index, (inner, columns) in enumerate(pairs):
            back = recurrent or index > 0
            found += _dense_products(setting, network, inner, columns, back=back)
        if recurrent:
            found += _recurrent_products(setting, network, sizes.obs)
    return found


def _forward_products(setting: Setting, network: str, inner: int, columns: int) -> list[Product]:
    found = [Product("rollout", setting.n_envs, inner, columns, setting.rollout_length)]
    if network == "critic":
        found.append(Product("bootstrap", setting.n_envs, inner, columns, 1))
    return found


def _dense_products(
    setting: Setting, network: str, inner: int, columns: int, *, back: bool
) -> list[Product]:
    rows, count = setting.counts.samples_per_gradient, setting.counts.gradient_steps
    found = _forward_products(setting, network, inner, columns)
    found.append(Product("update", rows, inner, columns, count))
    found.append(Product("update", inner, rows, columns, count))
    if back:
        found.append(Product("update", rows, columns, inner, count))
    return found


def _recurrent_products(setting: Setting, network: str, obs_size: int) -> list[Product]:
    """The input's product once per sequence, and the state's two at every step.

    Its third one, for the gradient of the weights, once per sequence as well.
    """
    gates, hidden = 4 * setting.lstm_features, setting.lstm_features
    envs, updates = setting.n_envs // setting.n_minibatches, setting.counts.gradient_steps
    steps = updates * setting.rollout_length
    return [
        *_dense_products(setting, network, obs_size, gates, back=False),
        *_forward_products(setting, network, hidden, gates),
        Product("update", envs, hidden, gates, steps),
        Product("update", hidden, setting.counts.samples_per_gradient, gates, updates),
        Product("update", envs, gates, hidden, steps),
    ]


class Weights(NamedTuple):
    """Matrices of one network; `input` and `recurrent` only of an LSTM."""

    dense: list[Array]
    input: Array | None = None
    recurrent: Array | None = None


def make_weights(setting: Setting, sizes: Sizes) -> dict[str, Weights]:
    """Random matrices that keep the size of what they are applied to."""
    weights, key = {}, jax.random.key(0)
    for network, widths in layer_sizes(setting, sizes).items():
        shapes = list(itertools.pairwise(widths))
        gates = 4 * setting.lstm_features
        recurrent = setting.network == "lstm"
        all_shapes = [*shapes, *([(sizes.obs, gates), (gates // 4, gates)] if recurrent else [])]
        key, *keys = jax.random.split(key, 1 + len(all_shapes))
        matrices = [
            jax.random.normal(one, shape, jnp.float32) / shape[0] ** 0.5
            for one, shape in zip(keys, all_shapes, strict=True)
        ]
        dense = matrices[: len(shapes)]
        weights[network] = Weights(dense, *matrices[len(shapes) :])
    return weights


def _no_activation(x: Array) -> Array:
    return x


class LayerOps(NamedTuple):
    """What the layers of a floor are made of."""

    activation: Activation
    multiply: Multiply


def product_floor(
    setting: Setting,
    sizes: Sizes,
    part: Part,
    activation: Activation = _no_activation,
    multiply: Multiply = operator.matmul,
) -> tuple[Callable, tuple]:
    """A function that does the products of one part of an iteration, and its arguments.

    `activation` follows every dense layer but the last one of a network; `multiply` is used for
    all products but those of a recurrence.
    """
    ops = LayerOps(activation, multiply)
    weights = make_weights(setting, sizes)
    length, n_envs = setting.rollout_length, setting.n_envs
    key = jax.random.key(1)
    if part == "update":
        batch = (setting.n_minibatches, length, n_envs // setting.n_minibatches, sizes.obs)
        data = jax.random.normal(key, batch, jnp.float32)
        return _update_floor(setting, ops), (weights, data)
    obs = jax.random.normal(key, (n_envs, sizes.obs), jnp.float32)
    carry = {network: _zero_carry(setting, n_envs) for network in weights}
    if part == "bootstrap":
        return _bootstrap_floor(ops), (weights["critic"], carry["critic"], obs)
    return _rollout_floor(length, ops), (weights, carry, obs)


def _bootstrap_floor(ops: LayerOps) -> Callable:
    return lambda weights, carry, obs: _step(weights, carry, obs, ops)[1]


def _rollout_floor(length: int, ops: LayerOps) -> Callable:
    def run(weights, carry, obs):
        def step(state, _):
            carry, obs = state
            stepped = {name: _step(weights[name], carry[name], obs, ops) for name in weights}
            tie = sum(output[:, :1] for _, output in stepped.values())
            return ({name: after for name, (after, _) in stepped.items()}, obs + _TINY * tie), None

        return jax.lax.scan(step, (carry, obs), length=length)[0]

    return run


def _update_floor(setting: Setting, ops: LayerOps) -> Callable:
    def size(weights, xs):
        outputs = (_sequence(one, xs, ops) for one in weights.values())
        return sum(0.5 * jnp.sum(jnp.square(output)) for output in outputs)

    def update(weights, xs):
        grads = jax.grad(size)(weights, xs)
        return jax.tree.map(lambda w, g: w - _TINY * g, weights, grads), None

    def run(weights, data):
        def epoch(weights, _):
            return jax.lax.scan(update, weights, data)

        return jax.lax.scan(epoch, weights, length=setting.n_epochs)[0]

    return run


def _zero_carry(setting: Setting, n_envs: int) -> tuple:
    if setting.network == "mlp":
        return ()
    zeros = jnp.zeros((n_envs, setting.lstm_features), jnp.float32)
    return zeros, zeros


def _step(weights: Weights, carry: tuple, x: Array, ops: LayerOps) -> tuple[tuple, Array]:
    """One step of a batch `[B, features]`."""
    if weights.input is not None:
        carry, _ = _gates(carry, ops.multiply(x, weights.input), weights.recurrent)
        x = carry[0]
    return carry, _dense(weights, x, ops)


def _sequence(weights: Weights, xs: Array, ops: LayerOps) -> Array:
    """A whole sequence `[T, B, features]`: dense layers see all of it at once."""
    length, n_envs, features = xs.shape
    merged = xs.reshape(length * n_envs, features)
    if weights.input is not None:
        projected = ops.multiply(merged, weights.input).reshape(length, n_envs, -1)
        merged = _recurrence(projected, weights.recurrent).reshape(length * n_envs, -1)
    return _dense(weights, merged, ops)


@jax.custom_vjp
def _recurrence(projected: Array, recurrent: Array) -> Array:
    """The hidden states of a sequence. The gradient is put as in `eqx_ppo.ops.lstm_sequence`."""
    return _recurrence_forward(projected, recurrent)[0]


def _recurrence_forward(projected, recurrent):
    def step(carry, one):
        after, gates = _gates(carry, one, recurrent)
        return after, (*after, gates)

    zeros = jnp.zeros((projected.shape[1], recurrent.shape[0]), projected.dtype)
    _, (hidden, cell, gates) = jax.lax.scan(step, (zeros, zeros), projected)
    return hidden, (recurrent, hidden, cell, gates)


def _recurrence_backward(kept, given):
    recurrent, hidden, cell, gates = kept
    hidden_before, cell_before = (_from_zero(states) for states in (hidden, cell))
    keep, write, read, candidate = jnp.split(gates, 4, axis=-1)
    squashed = jnp.tanh(cell)
    by_gates = (
        cell_before * keep * (1 - keep),
        candidate * write * (1 - write),
        squashed * read * (1 - read),
        write * (1 - candidate * candidate),
    )
    by_cell = read * (1 - squashed * squashed)

    def step(carry, inputs):
        to_hidden, to_cell = carry
        given, keep, by_cell, by_gates = inputs
        to_hidden = to_hidden + given
        to_cell = to_cell + to_hidden * by_cell
        to = (to_cell, to_cell, to_hidden, to_cell)
        back = jnp.concatenate([a * b for a, b in zip(to, by_gates, strict=True)], axis=-1)
        return (back @ recurrent.T, to_cell * keep), back

    zeros = jnp.zeros_like(given[0])
    inputs = (given, keep, by_cell, by_gates)
    _, back = jax.lax.scan(step, (zeros, zeros), inputs, reverse=True)
    width = hidden.shape[-1]
    by_recurrent = hidden_before.reshape(-1, width).T @ back.reshape(-1, 4 * width)
    return back, by_recurrent


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


def _from_zero(states: Array) -> Array:
    """What each step began with."""
    return jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])


def _dense(weights: Weights, x: Array, ops: LayerOps) -> Array:
    *hidden, last = weights.dense
    for matrix in hidden:
        x = ops.activation(ops.multiply(x, matrix))
    return ops.multiply(x, last)


def _gates(carry: tuple, projected: Array, recurrent: Array | None) -> tuple[tuple, Array]:
    """The next hidden and cell state, and the gates."""
    hidden, cell = carry
    gates = jnp.split(projected + hidden @ recurrent, 4, axis=-1)
    keep, write, read = (jax.nn.sigmoid(gate) for gate in gates[:3])
    candidate = jnp.tanh(gates[3])
    cell = keep * cell + write * candidate
    return (read * jnp.tanh(cell), cell), jnp.concatenate([keep, write, read, candidate], axis=-1)
