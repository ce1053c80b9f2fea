"""A fixed delay of a signal."""

from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from eqx_ppo._tree import can_hold, expand_to
from eqx_ppo._typing import BatchTree, Extras, KeyLike, TimeBatchTree, Tree, TreeDef
from eqx_ppo.networks._errors import check_features, check_keys
from eqx_ppo.networks._module import StatefulModule, StatefulModuleOutput


class DelayState(NamedTuple):
    """The last `k` inputs of each environment, and where the next one is written."""

    buffer: Tree  # leaves [B, k, *feat]
    position: Int32[Array, " B"]


@final
class Delay(StatefulModule):
    """Outputs the input of `k_steps` steps ago.

    Before the buffer has filled, at the start and after a reset, the output is
    `initial_value`. Any pytree of arrays may pass, each leaf keeping its dtype.

    ```python
    Sequential([Delay(sample_obs, k_steps=5), Normalizer(5), actor_critic])
    ```
    """

    treedef: TreeDef = eqx.field(static=True)
    leaves: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)
    k_steps: int = eqx.field(static=True)
    initial_value: float

    def __init__(self, sample_input: Tree, k_steps: int, initial_value: float = 0.0):
        """**Arguments:**

        - `sample_input`: one unbatched input, arrays or `jax.ShapeDtypeStruct`s.
        - `k_steps`: the delay in steps, at least 1.
        - `initial_value`: the output before the buffer has filled.

        **Raises:** `ValueError` for a delay below 1, or an initial value that a leaf's dtype
        cannot hold.
        """
        if isinstance(k_steps, bool) or k_steps < 1:
            raise ValueError(
                f"`Delay` needs `k_steps` to be an int of at least 1, got {k_steps!r}."
            )
        leaves, self.treedef = jax.tree.flatten(jax.eval_shape(lambda: sample_input))
        self.leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        for leaf in self.leaves:
            if not can_hold(leaf.dtype, initial_value):
                raise ValueError(
                    f"`Delay` cannot hold the initial value {initial_value} in a leaf of dtype "
                    f"{leaf.dtype}. Give a whole number in its range."
                )
        self.k_steps = k_steps
        self.initial_value = initial_value

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> DelayState:
        """A buffer full of `initial_value`."""
        del key
        buffers = [
            jnp.full((batch_size, self.k_steps, *leaf.shape), self.initial_value, leaf.dtype)
            for leaf in self.leaves
        ]
        return DelayState(
            jax.tree.unflatten(self.treedef, buffers), jnp.zeros(batch_size, jnp.int32)
        )

    def reset_state(self, prev_state: DelayState) -> DelayState:
        """The buffer as at the start."""
        return DelayState(
            jax.tree.map(self._filled_like, prev_state.buffer),
            jnp.zeros_like(prev_state.position),
        )

    def __call__(
        self, state: DelayState, x: BatchTree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Returns the oldest input of the buffer and puts `x` in its place."""
        self._check_input(x, batch_axes=1)
        env = jnp.arange(state.position.shape[0])
        output = jax.tree.map(lambda buffer: buffer[env, state.position], state.buffer)
        buffer = jax.tree.map(
            lambda buffer, leaf: buffer.at[env, state.position].set(leaf), state.buffer, x
        )
        position = (state.position + 1) % self.k_steps
        return StatefulModuleOutput(output, DelayState(buffer, position))

    def unroll(
        self,
        state: DelayState,
        xs: TimeBatchTree,
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence without a scan.

        With the buffer put before the inputs, the output is the sequence itself, shifted by
        `k_steps`, save where a reset came in between.
        """
        self._check_input(xs, batch_axes=2)
        length = done.shape[0]
        last_done = _last_done(done)  # [T + 1, B]
        times = jnp.arange(length + self.k_steps, dtype=jnp.int32)[:, None] - self.k_steps
        read_at = jnp.minimum(jnp.arange(length + self.k_steps), length)
        # The input of `times[i]` is wiped for whoever reads it after the reset at `last_done`.
        wiped = (last_done[read_at] >= times) & (last_done[read_at] >= 0)  # [T + k, B]

        ages = jnp.arange(self.k_steps, dtype=jnp.int32)[None]

        def delayed(buffer, leaf):
            order = (state.position[:, None] + ages) % self.k_steps
            earlier = jnp.moveaxis(_take_rows(buffer, order), 1, 0)
            signal = jnp.concatenate([earlier, leaf])  # [k + T, B, *feat]
            return jnp.where(expand_to(wiped, signal), self._filled_like(signal), signal)

        signals = jax.tree.map(delayed, state.buffer, xs)
        written = jnp.where(last_done[-1] >= 0, length - 1 - last_done[-1], state.position + length)
        position = written % self.k_steps
        slots = (ages - position[:, None]) % self.k_steps
        buffer = jax.tree.map(
            lambda signal: _take_rows(jnp.moveaxis(signal[length:], 0, 1), slots), signals
        )
        output = jax.tree.map(lambda signal: signal[:length], signals)
        return StatefulModuleOutput(output, DelayState(buffer, position))

    def _filled_like(self, leaf: Array) -> Array:
        return jnp.full_like(leaf, jnp.asarray(self.initial_value, leaf.dtype))

    def _check_input(self, x: Tree, batch_axes: int) -> None:
        check_keys(self, x, jax.tree.unflatten(self.treedef, self.leaves))
        for leaf, expected in zip(jax.tree.leaves(x), self.leaves, strict=True):
            check_features(self, leaf[0] if batch_axes > 1 else leaf, expected.shape)
            if leaf.dtype != expected.dtype:
                raise ValueError(
                    f"`Delay` was built for a leaf of dtype {expected.dtype}, but got "
                    f"{leaf.dtype}. Build it from a sample of what it will see."
                )


def _last_done(done: Bool[Array, "T B"]) -> Int32[Array, "T+1 B"]:
    """For each time from 0 to T, the last earlier step with a reset, or -1."""
    times = jnp.where(done, jnp.arange(done.shape[0], dtype=jnp.int32)[:, None], jnp.int32(-1))
    none_yet = jnp.full((1, done.shape[1]), -1, jnp.int32)
    return jax.lax.cummax(jnp.concatenate([none_yet, times]), axis=0)


def _take_rows(leaf: Array, index: Array) -> Array:
    """`leaf[b, index[b, j]]` for `[B, k, *feat]` leaves."""
    return leaf[jnp.arange(leaf.shape[0])[:, None], index]
