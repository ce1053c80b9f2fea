"""A gated recurrent unit: one step, and a sequence of them with a fast gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo.ops._linear import add_bias
from eqx_ppo.ops._recurrence import masks_like, product_tangent, state_product, states_before


class _Steps(NamedTuple):
    """What a sequence leaves for its derivative.

    - `hidden`: after each step, before any reset, `[T, B, H]`.
    - `gates`: reset, keep and candidate, activated, and what the state adds to the candidate
        before the reset gate acts on it, `[T, B, 4H]`.
    """

    hidden: Array
    gates: Array


def gru_step(
    kernel: Float[Array, "H 3*H"],
    bias: Float[Array, " H"],
    hidden: Float[Array, "B H"],
    projection: Float[Array, "B 3*H"],
) -> Float[Array, "B H"]:
    """The next state, which moves toward the candidate as far as the keep gate lets it.

    **Arguments:**

    - `kernel`: what the state is multiplied with.
    - `bias`: what is added to the state's share of the candidate.
    - `hidden`: the state.
    - `projection`: what the input and the other biases add to the gates: reset, keep and candidate.

    **Source:** Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for
    Statistical Machine Translation" (2014), with the reset gate after the product.
    """
    return _step(kernel, bias, hidden, projection)[0]


@jax.custom_jvp
def gru_sequence(
    kernel: Float[Array, "H 3*H"],
    bias: Float[Array, " H"],
    hidden: Float[Array, "B H"],
    reset: Float[Array, "B H"],
    projections: Float[Array, "T B 3*H"],
    done: Bool[Array, "T B"],
) -> tuple[Float[Array, "B H"], Float[Array, "T B H"]]:
    """Steps in a row; after one that is `done` the state is `reset`.

    In reverse mode the gradient by the kernel is one product for the whole sequence, and
    everything that does not depend on the step before is computed for all steps at once.
    Differentiable in forward mode too, and to any order.

    **Arguments:** as for `gru_step`, with `projections` and `done` for every step.

    **Returns:** the state after the last step, and the one that each step gave.
    """
    last, steps = _run(kernel, bias, hidden, reset, projections, done)
    return last, steps.hidden


def _gru_sequence_jvp(primals, tangents):
    kernel, bias, first, reset, projections, done = primals
    kernel_tangent, bias_tangent, first_tangent, reset_tangent, projection_tangents, _ = tangents
    last, steps = _run(kernel, bias, first, reset, projections, done)
    before = states_before(first, steps.hidden, reset, done)
    products = product_tangent(before, kernel, kernel_tangent)

    # How each gate moves the next state.
    reset_gate, keep, candidate, inner = jnp.split(steps.gates, 4, axis=-1)
    by_candidate = (1 - keep) * (1 - candidate * candidate)
    by_inner = by_candidate * reset_gate
    by_reset = by_candidate * inner * reset_gate * (1 - reset_gate)
    by_keep = (before - candidate) * keep * (1 - keep)
    reset_in, keep_in, candidate_in = jnp.split(projection_tangents, 3, axis=-1)
    reset_product, keep_product, inner_product = jnp.split(products, 3, axis=-1)
    inner_in = add_bias(inner_product.reshape(-1, bias.shape[0]), bias_tangent)
    to_hidden = (
        by_reset * (reset_in + reset_product)
        + by_keep * (keep_in + keep_product)
        + by_candidate * candidate_in
        + by_inner * inner_in.reshape(before.shape)
    )

    # Three products: one whose result is split would be put together again by padding.
    kernels = jnp.split(kernel, 3, axis=-1)

    def step(hidden, inputs):
        ended, keep, by_gates, to_hidden = inputs
        products = [
            by_gate * state_product(hidden, part)
            for by_gate, part in zip(by_gates, kernels, strict=True)
        ]
        hidden = keep * hidden + to_hidden + products[0] + products[1] + products[2]
        return jnp.where(ended, reset_tangent, hidden), hidden

    inputs = (masks_like(done, before), keep, (by_reset, by_keep, by_inner), to_hidden)
    last_tangent, hidden_tangents = jax.lax.scan(step, first_tangent, inputs)
    return (last, steps.hidden), (last_tangent, hidden_tangents)


gru_sequence.defjvp(_gru_sequence_jvp)


def _run(kernel, bias, hidden, reset, projections, done) -> tuple[Array, _Steps]:
    """The last state, and all steps; what of them nobody uses, XLA leaves out."""

    def step(hidden, inputs):
        projection, done_now = inputs
        hidden, gates = _step(kernel, bias, hidden, projection)
        return jnp.where(done_now[:, None], reset, hidden), _Steps(hidden, gates)

    return jax.lax.scan(step, hidden, (projections, done))


def _step(kernel, bias, hidden: Array, projection: Array) -> tuple[Array, Array]:
    """The next state, and the gates."""
    from_input = jnp.split(projection, 3, axis=-1)
    from_state = jnp.split(state_product(hidden, kernel), 3, axis=-1)
    reset_gate = jax.nn.sigmoid(from_input[0] + from_state[0])
    keep = jax.nn.sigmoid(from_input[1] + from_state[1])
    inner = from_state[2] + bias[None]
    candidate = jnp.tanh(from_input[2] + reset_gate * inner)
    gates = jnp.concatenate([reset_gate, keep, candidate, inner], axis=-1)
    return candidate + keep * (hidden - candidate), gates
