"""A long short-term memory: one step, and a sequence of them with a fast gradient."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo.ops._recurrence import masks_like, product_tangent, state_product, states_before

LSTMCarry: TypeAlias = tuple[Float[Array, "B H"], Float[Array, "B H"]]
"""Hidden and cell state."""


class _Steps(NamedTuple):
    """What a sequence leaves for its derivative.

    - `hidden`, `cell`: after each step, before any reset, `[T, B, H]`.
    - `gates`: input, forget, candidate and output, activated, `[T, B, 4H]`.
    """

    hidden: Array
    cell: Array
    gates: Array


def lstm_step(
    kernel: Float[Array, "H 4*H"], state: LSTMCarry, projection: Float[Array, "B 4*H"]
) -> LSTMCarry:
    """The next state.

    **Arguments:**

    - `kernel`: what the hidden state is multiplied with.
    - `state`: hidden and cell state.
    - `projection`: what the input and the biases add to the gates: input, forget, candidate and
        output.

    **Source:** Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997).
    """
    return _step(kernel, state, projection)[0]


@jax.custom_jvp
def lstm_sequence(
    kernel: Float[Array, "H 4*H"],
    state: LSTMCarry,
    reset: LSTMCarry,
    projections: Float[Array, "T B 4*H"],
    done: Bool[Array, "T B"],
) -> tuple[LSTMCarry, Float[Array, "T B H"]]:
    """Steps in a row; after one that is `done` the state is `reset`.

    In reverse mode the gradient by the kernel is one product for the whole sequence, and
    everything that does not depend on the step before is computed for all steps at once.
    Differentiable in forward mode too, and to any order.

    **Arguments:** as for `lstm_step`, with `projections` and `done` for every step.

    **Returns:** the state after the last step, and the hidden state that each step gave.
    """
    last, steps = _run(kernel, state, reset, projections, done)
    return last, steps.hidden


def _lstm_sequence_jvp(primals, tangents):
    kernel, state, reset, projections, done = primals
    kernel_tangent, state_tangent, reset_tangent, projection_tangents, _ = tangents
    last, steps = _run(kernel, state, reset, projections, done)
    after = (steps.hidden, steps.cell)
    hidden_before, cell_before = states_before(tuple(state), after, tuple(reset), done)
    gate_tangents = projection_tangents + product_tangent(hidden_before, kernel, kernel_tangent)

    # How the gates move the cell, and how output gate and cell move the hidden state.
    write, keep, candidate, read = jnp.split(steps.gates, 4, axis=-1)
    squashed = jnp.tanh(steps.cell)
    by_write = candidate * write * (1 - write)
    by_keep = cell_before * keep * (1 - keep)
    by_candidate = write * (1 - candidate * candidate)
    by_read = squashed * read * (1 - read)
    by_cell = read * (1 - squashed * squashed)
    write_in, keep_in, candidate_in, read_in = jnp.split(gate_tangents, 4, axis=-1)
    to_cell = by_write * write_in + by_keep * keep_in + by_candidate * candidate_in
    to_hidden = by_read * read_in

    # Four products: one whose result is split would be put together again by padding.
    kernels = jnp.split(kernel, 4, axis=-1)

    def step(carry, inputs):
        hidden, cell = carry
        ended, keep, by_gates, by_cell, to_cell, to_hidden = inputs
        products = [
            by_gate * state_product(hidden, part)
            for by_gate, part in zip(by_gates, kernels, strict=True)
        ]
        cell = keep * cell + to_cell + products[0] + products[1] + products[2]
        hidden = by_cell * cell + to_hidden + products[3]
        return _select(ended, reset_tangent, (hidden, cell)), hidden

    by_gates = (by_write, by_keep, by_candidate, by_read)
    ended = masks_like(done, steps.hidden)
    inputs = (ended, keep, by_gates, by_cell, to_cell, to_hidden)
    last_tangent, hidden_tangents = jax.lax.scan(step, tuple(state_tangent), inputs)
    return (last, steps.hidden), (last_tangent, hidden_tangents)


lstm_sequence.defjvp(_lstm_sequence_jvp)


def _run(kernel, state, reset, projections, done) -> tuple[LSTMCarry, _Steps]:
    """The last state, and all steps; what of them nobody uses, XLA leaves out."""

    def step(state, inputs):
        projection, done_now = inputs
        (hidden, cell), gates = _step(kernel, state, projection)
        after = _select(done_now[:, None], reset, (hidden, cell))
        return after, _Steps(hidden, cell, gates)

    return jax.lax.scan(step, tuple(state), (projections, done))


def _step(kernel, state: LSTMCarry, projection: Array) -> tuple[LSTMCarry, Array]:
    """The next state, and the gates."""
    hidden, cell = state
    gates = jnp.split(projection + state_product(hidden, kernel), 4, axis=-1)
    write, keep, read = (jax.nn.sigmoid(gates[index]) for index in (0, 1, 3))
    candidate = jnp.tanh(gates[2])
    cell = keep * cell + write * candidate
    hidden = read * jnp.tanh(cell)
    return (hidden, cell), jnp.concatenate([write, keep, candidate, read], axis=-1)


def _select(mask: Array, on_true: LSTMCarry, on_false: LSTMCarry) -> LSTMCarry:
    hidden, cell = (jnp.where(mask, a, b) for a, b in zip(on_true, on_false, strict=True))
    return hidden, cell
