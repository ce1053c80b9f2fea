"""The contract: what a module takes, what it returns, and the two bases to build on.

A network is run twice, in the rollout and in the loss replay. `StatefulModule` is a layer
that carries state from step to step; `StatelessModule` is one that does not, so that its
replay is one batch instead of a scan; `RandomModule` draws per-environment noise.
"""

import abc
from typing import NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from eqx_ppo._checks import check_methods
from eqx_ppo._keys import as_key
from eqx_ppo._tree import merge_time, split_time, tree_where
from eqx_ppo._typing import Extras, KeyLike, Metrics, State, TimeBatchTree, Tree
from eqx_ppo.networks._frozen import holds_statistics

_BATCHABLE = "threefry2x32"  # the generator whose `vmap` equals a loop


class StatefulModuleOutput(NamedTuple):
    """What a module returns for one step (`[B, ...]`) or a sequence (`[T, B, ...]`).

    - `output`: leaves `[B, *feat]`.
    - `next_state`: structure, shapes and dtypes of the incoming state.
    - `rollout_extras`: what the replay needs from the rollout; parallel to the state,
        `None` where nothing is emitted.
    - `regularization_loss`: one value per environment to be added to the loss, or `None`.
    - `metrics`: names to `[B, ...]` leaves, or `None`.

    For a sequence every field leads with `[T, B]`, save `next_state`, which is the carry
    after the last step and its reset.
    """

    output: Tree
    next_state: State
    rollout_extras: Extras = None
    regularization_loss: Float[Array, " B"] | Float[Array, "T B"] | None = None
    metrics: Metrics | None = None


class StatefulModule(eqx.Module):
    """A layer over a batch `[B, *feat]` with explicit per-environment carry state.

    Subclass it and implement `__call__`; override `initialize_state` and `reset_state` if
    there is carry state, `update_statistics` if there are statistics, and `unroll` where a
    whole sequence can be computed faster than step by step. Annotated methods of subclasses
    are checked by jaxtyping and beartype while JAX traces.

    `__call__` must be pure and treat each of the `B` samples independently: it never
    changes what a later call returns, and permuting the batch permutes every result.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(cls)

    @abc.abstractmethod
    def __call__(
        self, state: State, x: Tree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Runs one step.

        **Arguments:**

        - `state`: the carry, leaves `[B, ...]`; `()` for a module without.
        - `x`: the input, leaves `[B, *feat]`.
        - `rollout_extras`: `None` in rollout and inference; in the loss replay what this
            module emitted for the same step of the rollout. Test `is None` and nothing else.
        """

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> State:
        """The carry at the start of the first episodes, leaves `[batch_size, ...]`.

        `reset_state` of it must give it again.
        """
        del batch_size, key
        return ()

    def reset_state(self, prev_state: State) -> State:
        """The carry at the start of an episode, in the shapes of `prev_state`."""
        return prev_state

    def update_statistics(self, rollout_extras: Extras) -> Self:
        """A new module whose statistics have taken in a rollout.

        Called once per iteration, after the last gradient step.

        **Arguments:**

        - `rollout_extras`: everything that this module emitted, leaves `[T, B, *feat]`.

        **Raises:** `NotImplementedError`, by default, if the module holds `Statistics`: they
        would silently never be learned.
        """
        del rollout_extras
        if holds_statistics(self):
            raise NotImplementedError(
                f"`{type(self).__name__}` holds `Statistics` but does not override "
                "`update_statistics`, so they would never be updated. Override it to return a "
                "new module, or subclass `Container`, which routes the extras to each child."
            )
        return self

    def unroll(
        self,
        state: State,
        xs: TimeBatchTree,
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence: a scan of `__call__`, with `reset_state` after each `done` step.

        **Arguments:**

        - `state`: the carry before the first step, leaves `[B, ...]`.
        - `xs`: the inputs, leaves `[T, B, *feat]`.
        - `done`: after which steps the carry of an environment is reset.
        - `rollout_extras`: as for `__call__`, with leaves `[T, B, *feat]`, or `None`.
        """

        def step(carry, inputs):
            x, done_now, extras = inputs
            out = self(carry, x, extras)
            carry = tree_where(done_now, self.reset_state(out.next_state), out.next_state)
            return carry, out._replace(next_state=())

        last, stacked = jax.lax.scan(step, state, (xs, done, rollout_extras))
        return stacked._replace(next_state=last)


class StatelessModule(StatefulModule):
    """A layer without carry state: a sequence is run as one batch of `T*B` samples."""

    def unroll(
        self,
        state: State,
        xs: TimeBatchTree,
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence by one call on `[T*B, *feat]`; see `StatefulModule.unroll`."""
        out = self(state, merge_time(xs), merge_time(rollout_extras))
        return split_time(out._replace(next_state=()), done.shape[0])._replace(next_state=state)


class RandomState(NamedTuple):
    """The carry of a `RandomModule`: one key per environment and how often it was used."""

    keys: Array
    draws: UInt32[Array, " B"]


class RandomModule(StatefulModule):
    """A layer whose only carry is per-environment randomness.

    Draw `n` uses `fold_in(key, n)`; only the count moves, by one per call, in rollout and
    replay alike. So environments are independent, resets do not disturb the stream, and a
    whole sequence is regenerated by one call on `[T*B, *feat]`. Use `draw_keys(state)` for
    the keys of this step and return `advance(state)` as the next state.
    """

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> RandomState:
        """One key per environment, no draws yet."""
        return initial_random_state(batch_size, key)

    def unroll(
        self,
        state: RandomState,
        xs: TimeBatchTree,
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence by one call on `[T*B, *feat]`; see `StatefulModule.unroll`."""
        out = self(spread(state, done.shape[0]), merge_time(xs), merge_time(rollout_extras))
        last = advance(state, done.shape[0])
        return split_time(out._replace(next_state=()), done.shape[0])._replace(next_state=last)


def initial_random_state(batch_size: int, key: KeyLike) -> RandomState:
    """One key per environment, no draws yet.

    The keys are `threefry2x32` whatever kind `key` is: of JAX's generators only that one
    gives an environment the same numbers alone, in a batch and in a sequence.
    """
    key = as_key(key)
    if jax.random.key_impl(key) != _BATCHABLE:
        words = jax.random.bits(key, (2,), jnp.uint32)
        key = jax.random.wrap_key_data(words, impl=_BATCHABLE)
    keys = jax.random.split(key, batch_size)
    return RandomState(keys, jnp.zeros(batch_size, jnp.uint32))


def draw_keys(state: RandomState) -> Array:
    """One fresh key per environment, `[B]`."""
    return jax.vmap(jax.random.fold_in)(state.keys, state.draws)


def advance(state: RandomState, draws: int = 1) -> RandomState:
    """The state after one draw, or after `draws` of them."""
    return RandomState(state.keys, state.draws + jnp.uint32(draws))


def spread(state: RandomState, length: int) -> RandomState:
    """The states of the next `length` draws as one batch, `[T*B]`."""
    times = jnp.arange(length, dtype=jnp.uint32)[:, None]
    keys = jnp.broadcast_to(state.keys, (length, *state.keys.shape))
    return merge_time(RandomState(keys, state.draws[None] + times))
