"""Modules that break the contract, each in one way, and the rule that says so.

They are what a user may write by mistake. `BROKEN` maps a name to the module, one input
without batch axes, the rule that must be named, and a pattern for the rest of the report.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from eqx_ppo import networks as nets
from eqx_ppo.networks import StatefulModuleOutput

KEPT = []


class BrokenCase(NamedTuple):
    """What is wrong with a module, as the report must say it."""

    build: Callable[[], nets.StatefulModule]
    sample: object
    rule: str
    says: str


# --- Shapes and kinds ---------------------------------------------------------------------


class ReturnsTuple(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return x, state


class ScalarPenalty(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state, None, jnp.mean(jnp.square(x)))


class ColumnPenalty(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        penalty = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return StatefulModuleOutput(x, state, None, penalty)


class ScalarMetric(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state, None, None, {"size": jnp.mean(jnp.abs(x))})


class DroppedBatch(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x[0], state)


class Average(nets.StatefulModule):
    """A moving average with its start, its step and its reset given by functions."""

    start: Callable = eqx.field(static=True, default=lambda n: jnp.zeros((n, 3), jnp.float32))
    move: Callable = eqx.field(static=True, default=lambda state, x: 0.5 * state + 0.5 * x)
    reset: Callable = eqx.field(static=True, default=jnp.zeros_like)

    def __call__(self, state, x, rollout_extras=None):
        after = self.move(state, x)
        return StatefulModuleOutput(x + state, after)

    def initialize_state(self, batch_size, *, key):
        return self.start(batch_size)

    def reset_state(self, prev_state):
        return self.reset(prev_state)


class SharedState(nets.StatefulModule):
    """Keeps one level for all environments."""

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x + state[None], 0.5 * state)

    def initialize_state(self, batch_size, *, key):
        return jnp.zeros(3, jnp.float32)


class ColumnValue(nets.StatelessModule):
    """A whole network of one's own whose value estimate is `[B, 1]`."""

    def __call__(self, state, x, rollout_extras=None):
        output = nets.PPONetworkOutput(x[:, :1], x[:, 0], x[:, 1:2])
        return StatefulModuleOutput(output, state)


class LikelihoodPerAction(nets.StatelessModule):
    """Forgets to sum the log-likelihood over the action's features."""

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(nets.Sample(x, -jnp.square(x)), state)


class NamesItself(nets.StatelessModule):
    """Returns a name beside its arrays."""

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput({"x": x, "name": "hand"}, state)


class NumberAsPenalty(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state, None, 0.0)


# --- Fields -------------------------------------------------------------------------------


class ListInStaticField(nets.StatelessModule):
    gains: list = eqx.field(static=True)

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x * jnp.asarray(self.gains, jnp.float32)[None], state)


class StaticInference(nets.StatelessModule):
    inference: bool = eqx.field(static=True, default=False)

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x if self.inference else 2.0 * x, state)


class StoredKey(nets.StatelessModule):
    key: Array

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x + jax.random.normal(self.key, (1, 3), jnp.float32), state)


# --- Purity -------------------------------------------------------------------------------


class Remembers(nets.StatelessModule):
    """Counts its calls in a list that it was built with."""

    calls: list = eqx.field(default_factory=list)

    def __call__(self, state, x, rollout_extras=None):
        self.calls.append(1.0)
        return StatefulModuleOutput(x, state)


class CapturesInput(nets.StatelessModule):
    """Keeps what it saw in a list outside."""

    def __call__(self, state, x, rollout_extras=None):
        KEPT.append(x)
        return StatefulModuleOutput(x, state)


@functools.lru_cache
def positions(size):
    """An array that is made once, while the first caller is traced."""
    return jnp.arange(size, dtype=jnp.float32)


class CachesTable(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x + positions(x.shape[-1])[None], state)


HOST = np.random.default_rng(0)


class HostNoise(nets.StatelessModule):
    """Draws from a generator of the host."""

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x + jnp.float32(HOST.standard_normal()), state)


class LooksAtTracing(nets.StatelessModule):
    """Takes a short cut outside of `jit`."""

    def __call__(self, state, x, rollout_extras=None):
        eager = not isinstance(x, jax.core.Tracer)
        return StatefulModuleOutput(x if eager else 1.01 * x, state)


# --- Per sample ---------------------------------------------------------------------------


class BatchNorm(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x - jnp.mean(x, axis=0, keepdims=True), state)


class ByRow(nets.StatelessModule):
    """Treats a sample by its place in the batch."""

    def __call__(self, state, x, rollout_extras=None):
        place = jnp.arange(x.shape[0], dtype=jnp.float32)
        return StatefulModuleOutput(x + place[:, None], state)


class MixesInPenalty(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        penalty = jnp.sum(jnp.square(x - jnp.mean(x, axis=0, keepdims=True)), axis=-1)
        return StatefulModuleOutput(x, state, None, penalty)


class MixesInReset(Average):
    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state) + 0.0 * prev_state[:1] + jnp.cumsum(prev_state, axis=0)


class ResetsFirstOnly(Average):
    def reset_state(self, prev_state):
        return prev_state.at[0].set(0.0)


class ResetsByMean(Average):
    """Starts an episode from what the batch has in common."""

    def reset_state(self, prev_state):
        return prev_state - jnp.mean(prev_state, axis=0, keepdims=True)


# --- Replay and sequence ------------------------------------------------------------------


class AddsInRolloutOnly(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        y = x + 0.3 if rollout_extras is None else x
        return StatefulModuleOutput(y, state, rollout_extras=x)


class StateOfReplayDiffers(nets.StatefulModule):
    """Moves its count in the rollout only."""

    def __call__(self, state, x, rollout_extras=None):
        step = 1.0 if rollout_extras is None else 0.0
        return StatefulModuleOutput(x, state + jnp.float32(step), rollout_extras=x)

    def initialize_state(self, batch_size, *, key):
        return jnp.zeros(batch_size, jnp.float32)


class ClippedSampler(nets.RandomModule):
    """Stores the action after it has been clipped, beside the likelihood before."""

    def __call__(self, state, x, rollout_extras=None):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,), jnp.float32))
        if rollout_extras is None:
            raw = x + noise(nets.draw_keys(state))
            stored = jnp.clip(raw, -0.5, 0.5)
        else:
            raw = stored = rollout_extras
        log_likelihood = -0.5 * jnp.sum(jnp.square(raw - x), axis=-1)
        return StatefulModuleOutput(
            nets.Sample(jnp.clip(raw, -0.5, 0.5), log_likelihood), nets.advance(state), stored
        )


class ForgetsToEmit(nets.RandomModule):
    """Draws the action anew in the replay, from the same keys, but with the new noise."""

    def __call__(self, state, x, rollout_extras=None):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,), jnp.float32))
        action = x + noise(nets.draw_keys(state))
        nothing = jnp.zeros_like(x)
        extra = nothing if rollout_extras is None else 1.0 + nothing
        return StatefulModuleOutput(action + extra, nets.advance(state), nothing)


class UnrollsWithoutResets(Average):
    def unroll(self, state, xs, done, rollout_extras=None):
        return nets.StatefulModule.unroll(self, state, xs, jnp.zeros_like(done), rollout_extras)


class UnrollsFinalState(Average):
    """Returns the carry before the last step."""

    def unroll(self, state, xs, done, rollout_extras=None):
        out = nets.StatefulModule.unroll(self, state, xs, done, rollout_extras)
        short = nets.StatefulModule.unroll(self, state, xs[:-1], done[:-1], rollout_extras)
        return out._replace(next_state=short.next_state)


# --- Randomness ---------------------------------------------------------------------------


def _normals(keys):
    return jax.vmap(lambda key: jax.random.normal(key, (3,), jnp.float32))(keys)


class OneKeyForAll(nets.StatefulModule):
    def __call__(self, state, x, rollout_extras=None):
        keys = jax.vmap(jax.random.split)(state)
        return StatefulModuleOutput(x + _normals(keys[:, 0]), keys[:, 1])

    def initialize_state(self, batch_size, *, key):
        return jnp.broadcast_to(key, (batch_size,))


class KeyNeverMoves(nets.RandomModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x + _normals(nets.draw_keys(state)), state)

    def unroll(self, state, xs, done, rollout_extras=None):
        return nets.StatefulModule.unroll(self, state, xs, done, rollout_extras)


class ResetRewindsKey(nets.RandomModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x + _normals(nets.draw_keys(state)), nets.advance(state))

    def reset_state(self, prev_state):
        return prev_state._replace(draws=jnp.zeros_like(prev_state.draws))

    def unroll(self, state, xs, done, rollout_extras=None):
        return nets.StatefulModule.unroll(self, state, xs, done, rollout_extras)


class BareKeyNeverMoves(nets.StatefulModule):
    """Keeps the words of untyped keys."""

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x + _normals(state), state)

    def initialize_state(self, batch_size, *, key):
        return jax.random.key_data(jax.random.split(key, batch_size))


# --- Statistics ---------------------------------------------------------------------------


class Mean(nets.Statistics):
    value: Float[Array, " features"]


class Centered(nets.StatelessModule):
    """Subtracts a running mean; what `update_statistics` does is up to its subclasses."""

    mean: Mean
    gain: Float[Array, " features"]

    def __init__(self):
        self.mean = Mean(jnp.zeros(3, jnp.float32))
        self.gain = jnp.ones(3, jnp.float32)

    def __call__(self, state, x, rollout_extras=None):
        y = (x - self.mean.value[None]) * self.gain[None]
        return StatefulModuleOutput(y, state, rollout_extras=x)


class NeverLearns(Centered):
    def update_statistics(self, rollout_extras):
        return self


class Counted(nets.Statistics):
    mean: Float[Array, " features"]
    count: Int32[Array, ""]


class LearnsCountOnly(nets.StatelessModule):
    statistics: Counted

    def __init__(self):
        self.statistics = Counted(jnp.zeros(3, jnp.float32), jnp.zeros((), jnp.int32))

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x - self.statistics.mean[None], state, rollout_extras=x)

    def update_statistics(self, rollout_extras):
        count = self.statistics.count + jnp.int32(1)
        return eqx.tree_at(lambda module: module.statistics.count, self, count)


class NoUpdate(Centered):
    """Does not override `update_statistics`."""


class UpdatesInPlace(Centered):
    def update_statistics(self, rollout_extras):
        object.__setattr__(self.mean, "value", jnp.mean(rollout_extras, axis=(0, 1)))
        return self


class UpdateReturnsNothing(Centered):
    def update_statistics(self, rollout_extras):
        return None


class UpdateChangesKind(Centered):
    """Its statistics come back as one number."""

    def update_statistics(self, rollout_extras):
        return eqx.tree_at(lambda module: module.mean.value, self, jnp.mean(rollout_extras))


class UpdateMovesGain(Centered):
    def update_statistics(self, rollout_extras):
        mean = jnp.mean(rollout_extras, axis=(0, 1))
        where = lambda module: (module.mean.value, module.gain)  # noqa: E731
        return eqx.tree_at(where, self, (mean, 0.9 * self.gain))


class Host(nets.StatefulModule):
    """Holds a normalizer, runs it, and forgets it in `update_statistics`."""

    inner: nets.Normalizer

    def __call__(self, state, x, rollout_extras=None):
        out = self.inner((), x, rollout_extras)
        return StatefulModuleOutput(out.output, state, out.rollout_extras)

    def update_statistics(self, rollout_extras):
        return self


class CountsIterations(nets.StatelessModule):
    """Counts in a Python number, which is part of what is compiled."""

    iteration: int = 0

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state)

    def update_statistics(self, rollout_extras):
        return CountsIterations(self.iteration + 1)


class NewStructure(nets.StatelessModule):
    """Its static count is what `update_statistics` changes."""

    iteration: int = eqx.field(static=True, default=0)

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state)

    def update_statistics(self, rollout_extras):
        return NewStructure(self.iteration + 1)


# --- Gradients ----------------------------------------------------------------------------


class Gain(nets.StatelessModule):
    gain: Float[Array, " features"]

    def __init__(self):
        self.gain = jnp.linspace(0.5, 1.5, 3, dtype=jnp.float32)


class StopsGradient(Gain):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x * jax.lax.stop_gradient(self.gain)[None], state)


class RoundsGain(Gain):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x * jnp.round(10.0 * self.gain)[None], state)


class StoresLikelihood(Gain):
    """Gives back in the replay the log-likelihood of the rollout."""

    def __call__(self, state, x, rollout_extras=None):
        stored = rollout_extras
        if stored is None:
            stored = nets.Sample(x, -jnp.sum(jnp.square(x * self.gain[None]), axis=-1))
        return StatefulModuleOutput(stored, state, rollout_extras=stored)


class NaNGradient(Gain):
    """The square root on the side that is not taken has an infinite slope."""

    def __call__(self, state, x, rollout_extras=None):
        y = jnp.maximum(x * self.gain[None], 0.0)
        return StatefulModuleOutput(jnp.where(y > 0.0, jnp.sqrt(y), 0.0), state)


class GradientOfUnrollDiffers(Gain):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x * self.gain[None], state)

    def unroll(self, state, xs, done, rollout_extras=None):
        half = 0.5 * self.gain + jax.lax.stop_gradient(0.5 * self.gain)
        return StatefulModuleOutput(xs * half[None, None], state)


class Raises(nets.StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x @ jnp.ones((4, 2), jnp.float32), state)


FLAT = jnp.zeros(3, jnp.float32)


def average(**functions):
    return lambda: Average(**functions)


def within(module):
    """The module as one layer of a network."""

    def build():
        dense = nets.Dense(3, 3, key=jax.random.key(0))
        branches = nets.Parallel(left=dense, right=nets.Sequential([dense, module()]))
        return nets.Sequential([nets.Normalizer(3), branches])

    return build


BROKEN = {
    "returns_tuple": BrokenCase(ReturnsTuple, FLAT, "returns", "StatefulModuleOutput"),
    "raises": BrokenCase(Raises, FLAT, "returns", "TypeError"),
    "scalar_penalty": BrokenCase(
        ScalarPenalty, FLAT, "batch axis", r"regularization_loss: .* \[5\] here, but has shape \[\]"
    ),
    "number_as_penalty": BrokenCase(
        NumberAsPenalty, FLAT, "batch axis", r"regularization_loss: .*\[5\] here.*shape \[\]"
    ),
    "names_itself": BrokenCase(NamesItself, FLAT, "batch axis", r"output\['name'\]: .*a `str`"),
    "column_penalty": BrokenCase(
        ColumnPenalty, FLAT, "batch axis", r"regularization_loss.*\[5, 1\]"
    ),
    "scalar_metric": BrokenCase(ScalarMetric, FLAT, "batch axis", r"metrics\['size'\]"),
    "dropped_batch": BrokenCase(DroppedBatch, FLAT, "batch axis", r"output: .*\[3\]"),
    "shared_state": BrokenCase(SharedState, FLAT, "batch axis", r"state: .*\[3\]"),
    "column_value": BrokenCase(
        ColumnValue, FLAT, "one number per env", r"value_estimates: .*\[5\] here.*\[5, 1\]"
    ),
    "likelihood_per_action": BrokenCase(
        LikelihoodPerAction, FLAT, "one number per env", r"log_likelihood: .*\[5, 3\]"
    ),
    "state_dtype_drifts": BrokenCase(
        average(move=lambda state, x: (0.5 * state + x).astype(jnp.float16)),
        FLAT,
        "closed state",
        r"next_state: .*float16\[5, 3\] instead of float32\[5, 3\]",
    ),
    "state_grows": BrokenCase(
        average(move=lambda state, x: jnp.concatenate([state, x], axis=-1)),
        FLAT,
        "closed state",
        r"next_state: .*float32\[5, 6\] instead of float32\[5, 3\]",
    ),
    "state_changes_structure": BrokenCase(
        average(move=lambda state, x: {"level": state}), FLAT, "closed state", "structure"
    ),
    "weak_state": BrokenCase(
        average(start=lambda n: jnp.full((n, 3), 0.0)), FLAT, "closed state", "weakly typed"
    ),
    "reset_shape": BrokenCase(
        average(reset=lambda state: jnp.zeros(3, jnp.float32)),
        FLAT,
        "closed state",
        r"reset_state: .*float32\[3\] instead of float32\[5, 3\]",
    ),
    "reset_dtype": BrokenCase(
        average(reset=lambda state: jnp.zeros(state.shape, jnp.int32)),
        FLAT,
        "closed state",
        r"reset_state: .*int32",
    ),
    "list_in_static_field": BrokenCase(
        lambda: ListInStaticField([1.0, 2.0, 3.0]), FLAT, "static fields", "gains: .*hash"
    ),
    "static_inference": BrokenCase(StaticInference, FLAT, "static fields", "inference_mode"),
    "stored_key": BrokenCase(
        lambda: StoredKey(jax.random.key(0)), FLAT, "static fields", "key: is a PRNG key"
    ),
    "start_is_not_reset": BrokenCase(
        average(start=lambda n: jnp.ones((n, 3), jnp.float32)), FLAT, "initial state", "again"
    ),
    "remembers": BrokenCase(Remembers, FLAT, "purity", "changed the module"),
    "captures_input": BrokenCase(CapturesInput, FLAT, "purity", "leaked tracer"),
    "caches_table": BrokenCase(CachesTable, FLAT, "purity", "leaked tracer"),
    "host_noise": BrokenCase(HostNoise, FLAT, "purity", "two calls"),
    "looks_at_tracing": BrokenCase(LooksAtTracing, FLAT, "jit equals eager", "output"),
    "batch_norm": BrokenCase(BatchNorm, FLAT, "per sample", "output.*update_statistics"),
    "by_row": BrokenCase(ByRow, FLAT, "per sample", "permuting the batch"),
    "mixes_in_penalty": BrokenCase(MixesInPenalty, FLAT, "per sample", "regularization_loss"),
    "mixes_in_reset": BrokenCase(MixesInReset, FLAT, "per sample", "reset_state"),
    "resets_first_only": BrokenCase(ResetsFirstOnly, FLAT, "per sample", "reset_state.*permuting"),
    "resets_by_mean": BrokenCase(ResetsByMean, FLAT, "per sample", "reset_state.*slicing"),
    "adds_in_rollout_only": BrokenCase(AddsInRolloutOnly, FLAT, "replay", "output"),
    "state_of_replay_differs": BrokenCase(StateOfReplayDiffers, FLAT, "replay", "next_state"),
    "clipped_sampler": BrokenCase(ClippedSampler, FLAT, "replay", "log_likelihood.*clipping"),
    "forgets_to_emit": BrokenCase(ForgetsToEmit, FLAT, "replay", "output"),
    "unrolls_without_resets": BrokenCase(UnrollsWithoutResets, FLAT, "unroll", "output"),
    "unrolls_final_state": BrokenCase(UnrollsFinalState, FLAT, "unroll", "next_state"),
    "one_key_for_all": BrokenCase(OneKeyForAll, FLAT, "keys", "drew 1 different"),
    "key_never_moves": BrokenCase(KeyNeverMoves, FLAT, "keys", "at every step"),
    "bare_key_never_moves": BrokenCase(BareKeyNeverMoves, FLAT, "keys", "at every step"),
    "reset_rewinds_key": BrokenCase(ResetRewindsKey, FLAT, "keys", "after every reset"),
    "never_learns": BrokenCase(NeverLearns, FLAT, "statistics", "mean: .*did not move"),
    "learns_count_only": BrokenCase(
        LearnsCountOnly, FLAT, "statistics", "statistics: .*did not move"
    ),
    "no_update": BrokenCase(NoUpdate, FLAT, "statistics", "NotImplementedError"),
    "updates_in_place": BrokenCase(UpdatesInPlace, FLAT, "statistics", ""),
    "update_returns_nothing": BrokenCase(UpdateReturnsNothing, FLAT, "statistics", "NoneType"),
    "update_changes_kind": BrokenCase(
        UpdateChangesKind, FLAT, "statistics", r"mean\.value: .*\[\]"
    ),
    "update_moves_gain": BrokenCase(UpdateMovesGain, FLAT, "statistics", "gain: .*trained"),
    "forgets_to_route": BrokenCase(
        lambda: Host(nets.Normalizer(3)), FLAT, "statistics", r"inner\.statistics: .*Container"
    ),
    "counts_iterations": BrokenCase(CountsIterations, FLAT, "retracing", "compiled anew"),
    "new_structure": BrokenCase(
        NewStructure, FLAT, "statistics", "must keep the module.s structure"
    ),
    "stops_gradient": BrokenCase(StopsGradient, FLAT, "gradients", "gain: .*no gradient"),
    "rounds_gain": BrokenCase(RoundsGain, FLAT, "gradients", "gain: .*no gradient"),
    "stores_likelihood": BrokenCase(
        StoresLikelihood, FLAT, "gradients", "gain: the output of the rollout depends"
    ),
    "nan_gradient": BrokenCase(NaNGradient, FLAT, "gradients", "gain: .*not finite"),
    "gradient_of_unroll_differs": BrokenCase(
        GradientOfUnrollDiffers, FLAT, "gradients", "gain: .*through `unroll`"
    ),
}
