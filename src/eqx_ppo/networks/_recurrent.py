"""Recurrent layers: Equinox's cells over a batch, with the input product hoisted.

In a sequence the input projections of all steps are one matrix product on `[T*B]`, and only
the recurrent part is scanned.
"""

import abc
from typing import NamedTuple, TypeVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from eqx_ppo._keys import as_key
from eqx_ppo._tree import merge_time, split_time, tree_where
from eqx_ppo._typing import Extras, KeyLike, State
from eqx_ppo.networks._errors import check_features
from eqx_ppo.networks._module import StatefulModule, StatefulModuleOutput
from eqx_ppo.ops import add_bias, gru_sequence, gru_step, linear, lstm_sequence, lstm_step


class LSTMState(NamedTuple):
    """Hidden and cell state of an `LSTM`."""

    hidden: Float[Array, "B hidden"]
    cell: Float[Array, "B hidden"]


class RecurrentLayer(StatefulModule):
    """What `LSTM` and `GRU` share: initial states, and the split of a step into two parts.

    A subclass gives `project` (the part that sees only the input, for any number of samples
    at once) and `recur` (the part that sees the state). It may give `recur_in_turn` too, where
    many steps in a row can be had for less.
    """

    in_features: eqx.AbstractVar[int]
    hidden_features: eqx.AbstractVar[int]
    initial_state: eqx.AbstractVar[State | None]

    @abc.abstractmethod
    def zero_state(self) -> State:
        """A state of zeros for one environment."""

    @abc.abstractmethod
    def project(self, x: Float[Array, "N in_features"]) -> Float[Array, "N gates"]:
        """The input's share of the gates."""

    @abc.abstractmethod
    def recur(
        self, state: State, projection: Float[Array, "B gates"]
    ) -> tuple[State, Float[Array, "B hidden"]]:
        """The next state and the output, from the state and the projected input."""

    def recur_in_turn(
        self, state: State, projections: Float[Array, "T B gates"], done: Bool[Array, "T B"]
    ) -> tuple[State, Float[Array, "T B hidden"]]:
        """`recur` for every step of a sequence; the state is reset after one that is `done`."""
        reset = self.reset_state(state)

        def step(carry, inputs):
            projection, done_now = inputs
            next_state, output = self.recur(carry, projection)
            return tree_where(done_now, reset, next_state), output

        return jax.lax.scan(step, state, (projections, done))

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> State:
        """The initial state of each environment: zeros, or the trained one."""
        del key
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (batch_size, *leaf.shape)), self._initial()
        )

    def reset_state(self, prev_state: State) -> State:
        """The initial state again."""
        return jax.tree.map(
            lambda leaf, like: jnp.broadcast_to(leaf, like.shape), self._initial(), prev_state
        )

    def __call__(
        self, state: State, x: Shaped[Array, "B ..."], rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Maps `[B, in_features]` to the new hidden state `[B, hidden_features]`."""
        check_features(self, x, (self.in_features,))
        self._check_state(state, x.shape[0])
        next_state, output = self.recur(state, self.project(x))
        return StatefulModuleOutput(output, next_state)

    def unroll(
        self,
        state: State,
        xs: Shaped[Array, "T B ..."],
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence; see `StatefulModule.unroll`."""
        check_features(self, xs[0], (self.in_features,))
        self._check_state(state, done.shape[1])
        projections = split_time(self.project(merge_time(xs)), done.shape[0])
        last, outputs = self.recur_in_turn(state, projections, done)
        return StatefulModuleOutput(outputs, last)

    def _check_state(self, state: State, batch_size: int) -> None:
        expected = (batch_size, self.hidden_features)
        for leaf in jax.tree.leaves(state):
            if jnp.shape(leaf) != expected:
                raise ValueError(
                    f"`{type(self).__name__}` expected its state to have shape {list(expected)} "
                    f"[B, hidden_features], but got {list(jnp.shape(leaf))}. Make the state with "
                    "`initialize_state` of this module, for the batch size of its input."
                )

    def _initial(self) -> State:
        return self.zero_state() if self.initial_state is None else self.initial_state


@final
class LSTM(RecurrentLayer):
    """A long short-term memory layer around `eqx.nn.LSTMCell`.

    Input `[B, in_features]`, output the hidden state `[B, hidden_features]`, carry
    `LSTMState(hidden, cell)`. Input weights start LeCun uniform, recurrent ones orthogonal per
    gate, biases zero.

    **Source:** Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997).
    """

    cell: eqx.nn.LSTMCell
    initial_state: LSTMState | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        trainable_initial_state: bool = False,
        key: KeyLike,
    ):
        """**Arguments:**

        - `in_features`, `hidden_features`: sizes of the input and of the hidden state.
        - `trainable_initial_state`: whether the state at the start of an episode is trained
            (from zeros); otherwise it stays zero.
        - `key`: a PRNG key for the weights.
        """
        _check_sizes("LSTM", in_features, hidden_features)
        key = as_key(key)
        cell = eqx.nn.LSTMCell(in_features, hidden_features, dtype=jnp.float32, key=key)
        self.cell = _initialize(cell, jax.random.clone(key), n_gates=4)
        self.initial_state = self.zero_state() if trainable_initial_state else None

    @property
    def in_features(self) -> int:
        """The size of the input."""
        return self.cell.input_size

    @property
    def hidden_features(self) -> int:
        """The size of the hidden state and of the output."""
        return self.cell.hidden_size

    def zero_state(self) -> LSTMState:
        """A state of zeros for one environment."""
        shape = (self.cell.hidden_size,)
        return LSTMState(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def project(self, x: Float[Array, "N in_features"]) -> Float[Array, "N gates"]:
        """The input's share of the four gates, and the bias."""
        return add_bias(_product(x, self.cell.weight_ih), _bias(self.cell.bias))

    def recur(
        self, state: LSTMState, projection: Float[Array, "B gates"]
    ) -> tuple[LSTMState, Float[Array, "B hidden"]]:
        """The gates act on the cell; the output is the hidden state."""
        next_state = LSTMState(*lstm_step(self.cell.weight_hh.T, state, projection))
        return next_state, next_state.hidden

    def recur_in_turn(
        self, state: LSTMState, projections: Float[Array, "T B gates"], done: Bool[Array, "T B"]
    ) -> tuple[LSTMState, Float[Array, "T B hidden"]]:
        """As `RecurrentLayer.recur_in_turn`, with a gradient that takes less time."""
        reset = self.reset_state(state)
        last, outputs = lstm_sequence(self.cell.weight_hh.T, state, reset, projections, done)
        return LSTMState(*last), outputs


@final
class GRU(RecurrentLayer):
    """A gated recurrent unit around `eqx.nn.GRUCell`.

    Input `[B, in_features]`; carry and output are the hidden state `[B, hidden_features]`.
    Input weights start LeCun uniform, recurrent ones orthogonal per gate, biases zero.

    **Source:** Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for
    Statistical Machine Translation" (2014), with the reset gate after the product.
    """

    cell: eqx.nn.GRUCell
    initial_state: Float[Array, " hidden"] | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        trainable_initial_state: bool = False,
        key: KeyLike,
    ):
        """**Arguments:** as for `LSTM`."""
        _check_sizes("GRU", in_features, hidden_features)
        key = as_key(key)
        cell = eqx.nn.GRUCell(in_features, hidden_features, dtype=jnp.float32, key=key)
        self.cell = _initialize(cell, jax.random.clone(key), n_gates=3)
        self.initial_state = self.zero_state() if trainable_initial_state else None

    @property
    def in_features(self) -> int:
        """The size of the input."""
        return self.cell.input_size

    @property
    def hidden_features(self) -> int:
        """The size of the hidden state and of the output."""
        return self.cell.hidden_size

    def zero_state(self) -> Float[Array, " hidden"]:
        """A state of zeros for one environment."""
        return jnp.zeros(self.cell.hidden_size, jnp.float32)

    def project(self, x: Float[Array, "N in_features"]) -> Float[Array, "N gates"]:
        """The input's share of the three gates, and the bias."""
        return add_bias(_product(x, self.cell.weight_ih), _bias(self.cell.bias))

    def recur(
        self, state: Float[Array, "B hidden"], projection: Float[Array, "B gates"]
    ) -> tuple[Float[Array, "B hidden"], Float[Array, "B hidden"]]:
        """The state moves toward the candidate as far as the update gate lets it."""
        bias = _bias(self.cell.bias_n)
        hidden = gru_step(self.cell.weight_hh.T, bias, state, projection)
        return hidden, hidden

    def recur_in_turn(
        self,
        state: Float[Array, "B hidden"],
        projections: Float[Array, "T B gates"],
        done: Bool[Array, "T B"],
    ) -> tuple[Float[Array, "B hidden"], Float[Array, "T B hidden"]]:
        """As `RecurrentLayer.recur_in_turn`, with a gradient that takes less time."""
        reset, bias = self.reset_state(state), _bias(self.cell.bias_n)
        return gru_sequence(self.cell.weight_hh.T, bias, state, reset, projections, done)


def _product(x: Array, weight: Array) -> Array:
    """`x [N, in] @ weight [out, in].T`."""
    return linear(x.astype(weight.dtype), weight.T)


def _bias(bias: Array | None) -> Array:
    assert bias is not None  # both layers are built with biases
    return bias


_Cell = TypeVar("_Cell", eqx.nn.LSTMCell, eqx.nn.GRUCell)


def _initialize(cell: _Cell, key: Array, n_gates: int) -> _Cell:
    """Replaces all of Equinox's initial weights; see the class docstrings.

    So `key` may be a clone of the one that Equinox drew those from.
    """
    input_key, *gate_keys = jax.random.split(key, 1 + n_gates)
    hidden = cell.hidden_size
    lecun = jax.nn.initializers.lecun_uniform(in_axis=-1, out_axis=-2)
    orthogonal = jax.nn.initializers.orthogonal()
    recurrent = [orthogonal(gate_key, (hidden, hidden), jnp.float32) for gate_key in gate_keys]
    cell = eqx.tree_at(
        lambda cell: (cell.weight_ih, cell.weight_hh, cell.bias),
        cell,
        (
            lecun(input_key, cell.weight_ih.shape, jnp.float32),
            jnp.concatenate(recurrent),
            jnp.zeros(n_gates * hidden, jnp.float32),
        ),
    )
    if isinstance(cell, eqx.nn.GRUCell):
        return eqx.tree_at(lambda cell: cell.bias_n, cell, jnp.zeros(hidden, jnp.float32))
    return cell


def _check_sizes(layer: str, in_features: int, hidden_features: int) -> None:
    if in_features < 1 or hidden_features < 1:
        raise ValueError(
            f"`{layer}` needs sizes of at least 1, but got in_features={in_features} and "
            f"hidden_features={hidden_features}."
        )
