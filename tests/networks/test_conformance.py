"""The contract, on every module of the registry.

Each case runs `T` steps of `B` environments whose episodes end at the first, a middle and the
last step, several times, at every step, and never. The reference is a loop of single steps
that selects the reset rows in NumPy.
"""

import functools
import io
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo import networks as nets
from tests.helpers.modules import MODULE_CASES, random_inputs
from tests.helpers.trees import as_numpy, assert_close, assert_same, is_key, signature

T, B = 6, 7
DONE = np.zeros((T, B), bool)
DONE[0, 0] = True  # first step
DONE[3, 1] = True  # middle
DONE[T - 1, 2] = True  # last
DONE[[1, 2], 3] = True  # two in a row
DONE[[0, 4, 5], 4] = True
DONE[:, 5] = True  # every step; environment 6 never ends

CASES = {case.name: case for case in MODULE_CASES}
EVERY = pytest.mark.parametrize("name", CASES)

SAMPLERS = (
    "sampler",
    "normal_sampler",
    "beta_sampler",
    "categorical_sampler",
    "masked_sampler",
    "multi_categorical_sampler",
    "masked_multi_sampler",
    "affine_sampler",
)
WITH_FROZEN = (
    "affine_sampler",
    "policy_of_all_kinds",
    "normalizer",
    "normalizer_before_data",
    "normalizer_mixed",
    "normalizer_behind_delay",
    "normalizer_after_encoder",
    "nested",
    "mlp_actor_critic",
    "lstm_actor_critic",
    "gru_actor_critic",
    "unused_child",
    "masked",
    "by_key",
    "graph",
    "graph_without_delay",
)
WITH_RANDOMNESS = (
    *SAMPLERS,
    "policy_of_all_kinds",
    "adapter",
    "mlp_actor_critic",
    "lstm_actor_critic",
    "gru_actor_critic",
    "noise",
    "bottleneck",
    "ar1_bottleneck",
    "graph",
)
WITHOUT_PARAMETERS = (
    "delay_1",
    "delay_3_mixed",
    "normalizer",
    "normalizer_before_data",
    "normalizer_mixed",
    "normalizer_behind_delay",
    *(name for name in SAMPLERS if name != "normal_sampler"),
    "empty_sequential",
    "count_up",
    "scale",
    "splitter",
    "flattener",
    "flattener_below",
    "filter",
)


class Rollout(NamedTuple):
    """A rollout as a plain loop: what each step was given and what it returned."""

    start: object  # the carry before the first step
    xs: object
    states: list  # the carry before each step
    steps: list  # what each step returned
    out: nets.StatefulModuleOutput  # the same as a sequence


@eqx.filter_jit
def step(module, state, x):
    return module(state, x)


@eqx.filter_jit
def reset(module, state):
    return module.reset_state(state)


@functools.cache
def build(name):
    return CASES[name].build(jax.random.key(7))


@functools.cache
def rollout(name):
    module = build(name)
    xs = random_inputs(CASES[name].sample, (T, B), seed=1)
    start = mid_episode(module, name)
    states, steps, state = [], [], start
    for t in range(T):
        states.append(state)
        steps.append(step(module, state, at(xs, t)))
        after = steps[-1].next_state
        state = select(DONE[t], reset(module, after), after)
    return Rollout(start, xs, states, steps, as_sequence(steps, state))


def mid_episode(module, name):
    """A carry in the middle of an episode, different in every environment."""
    state = module.initialize_state(B, key=jax.random.key(2))
    early = random_inputs(CASES[name].sample, (2, B), seed=3)
    for t, finished in enumerate((np.arange(B) % 2 == 0, np.arange(B) % 3 == 0)):
        after = step(module, state, at(early, t)).next_state
        state = select(finished, reset(module, after), after)
    return state


def by_unroll(module, start, xs, extras):
    return module.unroll(start, xs, jnp.asarray(DONE), extras)


def by_scan(module, start, xs, extras):
    return nets.StatefulModule.unroll(module, start, xs, jnp.asarray(DONE), extras)


def by_loop(module, start, xs, extras):
    """Writes the steps out, with no help from the library."""
    state, steps = start, []
    for t in range(T):
        steps.append(module(state, at(xs, t), at(extras, t)))
        after = steps[-1].next_state

        def keep(fresh, used, done=DONE[t]):
            mask = jnp.asarray(done).reshape(-1, *(1,) * (used.ndim - 1))
            return jnp.where(mask, fresh, used)

        state = jax.tree.map(keep, module.reset_state(after), after)
    return as_sequence(steps, state)


@eqx.filter_jit
def value_and_gradient(params, static, start, xs, extras, how):
    def loss(params):
        out = how(eqx.combine(params, static), start, xs, extras)
        return weighted(out), out

    return jax.grad(loss, has_aux=True)(params)[::-1]


@functools.cache
def replay(name, how):
    """The sequence with the rollout's extras given back, and its gradient."""
    r, module = rollout(name), build(name)
    params, static = eqx.partition(module, nets.trainable(module))
    return value_and_gradient(params, static, r.start, r.xs, r.out.rollout_extras, how)


def weighted(out):
    """A scalar that depends on every float of an output, each by a weight of its own."""
    total = jnp.zeros((), jnp.float32)
    fields = (out.output, out.regularization_loss, out.metrics, out.next_state)
    for index, leaf in enumerate(floats(fields)):
        weights = jnp.sin(1.0 + index + jnp.arange(leaf.size, dtype=jnp.float32))
        total = total + jnp.sum(weights * leaf.reshape(-1))
    return total


def at(tree, t):
    return jax.tree.map(lambda leaf: leaf[t], tree)


def rows(tree, index):
    return jax.tree.map(lambda leaf: leaf[np.asarray(index)], tree)


def as_sequence(steps, next_state):
    """A list of outputs as the output of a sequence."""
    fields = [out._replace(next_state=()) for out in steps]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *fields)
    return stacked._replace(next_state=next_state)


def select(done, on_true, on_false):
    """Selects per environment, one row after the other."""

    def pick(a, b):
        pairs = zip(done, as_numpy(a), as_numpy(b), strict=True)
        chosen = jnp.asarray(np.stack([x if finished else y for finished, x, y in pairs]))
        return (
            jax.random.wrap_key_data(chosen, impl=jax.random.key_impl(b)) if is_key(b) else chosen
        )

    return jax.tree.map(pick, on_true, on_false)


def nodes(tree, kind):
    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def without_randomness(state):
    """Drops the states of `RandomModule`s, which survive a reset."""

    def is_random(node):
        return isinstance(node, nets.RandomState)

    return jax.tree.map(lambda node: None if is_random(node) else node, state, is_leaf=is_random)


def arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]


def floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]


def copied(tree):
    """The values of all arrays, in memory of their own."""
    return [as_numpy(leaf).copy() for leaf in arrays(tree)]


# --- The registry itself ------------------------------------------------------------------


def test_every_concrete_module_of_the_library_is_in_the_registry():
    offered = {
        value
        for value in vars(nets).values()
        if isinstance(value, type)
        and issubclass(value, nets.StatefulModule)
        and "__final__" in vars(value)
    }
    seen = set()

    def visit(node):
        seen.add(type(node))
        return False

    for name in CASES:
        jax.tree.leaves(build(name), is_leaf=visit)
    assert len(offered) >= 10
    assert offered - seen == set()
    assert len(CASES) == len(MODULE_CASES)


def test_lists_of_special_cases_are_complete():
    def where(condition):
        return {name for name in CASES if condition(build(name))}

    def state(module):
        return module.initialize_state(1, key=jax.random.key(0))

    assert where(lambda module: nodes(module, nets.Frozen)) == set(WITH_FROZEN)
    assert where(lambda module: nodes(state(module), nets.RandomState)) == set(WITH_RANDOMNESS)
    untrained = where(lambda module: not any(jax.tree.leaves(nets.trainable(module))))
    assert untrained == set(WITHOUT_PARAMETERS)


# --- State --------------------------------------------------------------------------------


@EVERY
def test_state_is_closed_under_step_and_reset(name):
    module, r = build(name), rollout(name)
    state = module.initialize_state(B, key=jax.random.key(5))
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(state))
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(state))
    assert signature(r.steps[0].next_state) == signature(state)
    assert signature(reset(module, state)) == signature(state)
    assert signature(replay(name, by_unroll)[0].next_state) == signature(state)


@EVERY
def test_reset_forgets_everything_but_the_random_stream(name):
    module = build(name)
    state = module.initialize_state(B, key=jax.random.key(5))
    assert_same(reset(module, state), state)
    used = rollout(name).steps[-1].next_state
    wiped = reset(module, used)
    assert_same(without_randomness(wiped), without_randomness(state))
    assert_same(nodes(wiped, nets.RandomState), nodes(used, nets.RandomState))


@EVERY
def test_everything_that_is_returned_leads_with_the_batch(name):
    out = rollout(name).steps[0]
    assert isinstance(out, nets.StatefulModuleOutput)
    fields = (out.output, out.next_state, out.rollout_extras, out.metrics)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(fields))
    assert out.regularization_loss is None or out.regularization_loss.shape == (B,)


# --- Replay and sequence ------------------------------------------------------------------


@EVERY
def test_replay_step_by_step_reproduces_the_rollout(name):
    out, _ = replay(name, by_scan)
    assert_close(out, rollout(name).out, rtol=1e-6, atol=1e-6)


@EVERY
def test_unroll_in_replay_equals_a_loop_of_steps(name):
    out, _ = replay(name, by_unroll)
    assert_close(out, rollout(name).out, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", WITH_RANDOMNESS)
def test_unroll_without_extras_draws_what_a_loop_of_steps_draws(name):
    r = rollout(name)
    out = eqx.filter_jit(by_unroll)(build(name), r.start, r.xs, None)
    assert_close(out, r.out, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITHOUT_PARAMETERS])
def test_gradients_of_unroll_equal_those_of_a_scan(name):
    _, got = replay(name, by_unroll)
    _, expected = replay(name, by_scan)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in floats(expected))
    assert_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["lstm_trained_start", "gru_trained_start", "smoothness"])
def test_gradients_of_unroll_equal_those_of_a_loop(name):
    _, got = replay(name, by_unroll)
    _, expected = replay(name, by_loop)
    assert_close(got, expected, rtol=2e-4, atol=2e-5)


# --- Per sample ---------------------------------------------------------------------------


@EVERY
def test_permuting_the_batch_permutes_everything(name):
    r = rollout(name)
    order = np.array([3, 0, 6, 2, 5, 1, 4])
    out = step(build(name), rows(r.start, order), rows(at(r.xs, 0), order))
    assert_close(out, rows(r.steps[0], order), rtol=1e-6, atol=1e-6)


@EVERY
def test_a_batch_of_one_is_a_row_of_the_batch(name):
    r = rollout(name)
    state = rows(r.start, [4])
    out = step(build(name), state, rows(at(r.xs, 0), [4]))
    assert_close(out, rows(r.steps[0], [4]), rtol=1e-5, atol=1e-6)
    assert signature(out.next_state) == signature(state)


@EVERY
def test_one_sample_does_not_touch_the_others(name):
    """A NaN in one row would show in any sum over the batch, even one with weight 0."""
    r = rollout(name)

    def spoil(leaf):
        if is_key(leaf):
            return leaf
        value = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 1
        return leaf.at[2].set(jnp.asarray(value, leaf.dtype))

    out = step(build(name), *jax.tree.map(spoil, (r.start, at(r.xs, 0))))
    others = [0, 1, 3, 4, 5, 6]
    assert_same(rows(out, others), rows(r.steps[0], others))


# --- Purity -------------------------------------------------------------------------------


@EVERY
def test_jit_equals_eager(name):
    r = rollout(name)
    out = build(name)(r.start, at(r.xs, 0))
    assert_close(out, r.steps[0], rtol=1e-5, atol=1e-6)


@EVERY
def test_calling_changes_nothing(name):
    """Neither steps, sequences nor statistics move what a later call returns."""
    module, r = build(name), rollout(name)
    before = copied((module, r.start))
    replay(name, by_unroll)
    module.update_statistics(r.out.rollout_extras)
    assert_same(step(module, r.start, at(r.xs, 0)), r.steps[0])
    assert_same(copied((module, r.start)), before)


# --- Parameters and statistics ------------------------------------------------------------


@EVERY
def test_update_statistics_returns_a_new_module_of_the_same_kind(name):
    module, r = build(name), rollout(name)
    before = copied(module)
    new = module.update_statistics(r.out.rollout_extras)
    assert_same(copied(module), before)
    assert jax.tree.structure(new) == jax.tree.structure(module)
    assert signature(arrays(new)) == signature(arrays(module))
    mask = nets.trainable(module)
    assert_same(eqx.filter(new, mask), eqx.filter(module, mask))
    is_called = name != "unused_child"  # its normalizer is never called
    learns = bool(nodes(module, nets.Statistics)) and is_called
    changed = any(map(np.any, (a != b for a, b in zip(copied(new), before, strict=True))))
    assert changed == learns


@pytest.mark.parametrize("name", WITH_FROZEN)
def test_the_optimizer_leaves_frozen_arrays_alone(name):
    """Weight decay moves every array that it is given, with a gradient or without."""
    module = build(name)
    mask = nets.trainable(module)
    params, static = eqx.partition(module, mask)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    _, grads = replay(name, by_unroll)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        opt_state = optimizer.init(params)
        for _ in range(5):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
    trained = eqx.combine(params, static)
    assert_same(
        [arrays(node) for node in nodes(trained, nets.Frozen)],
        [arrays(node) for node in nodes(module, nets.Frozen)],
    )
    before = copied(eqx.filter(module, mask))
    assert all(np.any(a != b) for a, b in zip(copied(params), before, strict=True) if b.any())
    assert before or name in WITHOUT_PARAMETERS


@EVERY
def test_serialize_round_trip(name):
    module = build(name)
    other = CASES[name].build(jax.random.key(8))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, module)
    file.seek(0)
    restored = eqx.tree_deserialise_leaves(file, other)
    assert_same(arrays(restored), arrays(module))
    assert jax.tree.structure(restored) == jax.tree.structure(other)


# --- Randomness ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SAMPLERS, "noise", "lstm_actor_critic"])
def test_no_key_is_used_twice_in_rollout_and_replay(name):
    module, r = build(name), rollout(name)

    @eqx.filter_jit
    def rollout_and_replay(module, key, xs):
        state = module.initialize_state(B, key=key)
        first = by_scan(module, state, xs, None)
        return first, by_unroll(module, state, xs, first.rollout_extras)

    with jax.debug_key_reuse(True):
        first, replayed = rollout_and_replay(module, jax.random.key(11), r.xs)
    assert_close(replayed, first, rtol=1e-5, atol=2e-6)


def test_the_check_for_keys_used_twice_can_fail():
    @jax.jit
    def twice(key):
        return jax.random.normal(key, ()) + jax.random.normal(key, ())

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        twice(jax.random.key(11))


@pytest.mark.parametrize("name", ["dense", "lstm", "gru", "mlp_actor_critic", "lstm_actor_critic"])
def test_no_key_is_used_twice_in_a_constructor(name):
    with jax.debug_key_reuse(True):
        CASES[name].build(jax.random.key(12))
