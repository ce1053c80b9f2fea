"""One sequence through a network of this library and through its ancestor's twin."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("nnx_ppo")

from nnx_ppo.algorithms.rollout import tree_where

from eqx_ppo import networks as nets
from tests.parity.carry import extras_to_ancestor, state_to_ancestor
from tests.parity.convert import to_ancestor

RENAMED = {"mean": "mu", "std": "sigma", "squared_change": "l2_diff"}  # ours to theirs


def jit(function):
    """Compiles with little optimization, which halves the time: nothing here runs often."""
    return eqx.filter_jit(function, compiler_options={"xla_backend_optimization_level": 0})


def with_weights(build, seed):
    """The module that `build(key)` makes, with arbitrary weights and statistics of nothing.

    Nothing is compiled for it.
    """
    shapes = eqx.filter_eval_shape(build, jax.random.key(0))

    def is_shape(leaf):
        return isinstance(leaf, jax.ShapeDtypeStruct)

    zeros = jax.tree.map(
        lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) if is_shape(leaf) else leaf,
        shapes,
    )
    return moved(zeros, 0.5, seed)


def moved(module, size, seed):
    """The module with noise on every weight."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf, is_weight: (
            jnp.asarray(leaf + size * rng.standard_normal(leaf.shape), jnp.float32)
            if is_weight
            else leaf
        ),
        module,
        nets.trainable(module),
    )


class Sequence(NamedTuple):
    """What goes into the replay of a sequence: leaves `[B, ...]` and `[T, B, ...]`."""

    start: object
    xs: object
    done: object
    extras: object


class Result(NamedTuple):
    """What comes out of it, in the ancestor's form.

    `penalty` is `[T, B]`; `metrics` are by path.
    """

    output: list
    next_state: list
    penalty: jax.Array
    metrics: dict


def as_the_ancestor_runs():
    """It does not run under strict promotion."""
    return jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")


def ours(module, sequence):
    """Our module, by the `unroll` that the loss uses."""
    start, xs, done, extras = sequence
    out = module.unroll(start, xs, done, extras)
    penalty = out.regularization_loss
    return Result(
        jax.tree.leaves(out.output),
        jax.tree.leaves(state_to_ancestor(module, out.next_state)),
        jnp.zeros(done.shape, jnp.float32) if penalty is None else penalty,
        by_path(out.metrics, RENAMED),
    )


def theirs(module, sequence):
    """The ancestor's twin of our module, step by step, reset as its rollout resets."""
    start, xs, done, extras = sequence

    def step(state, inputs):
        x, done_now, stored = inputs
        twin = to_ancestor(module)
        out = twin(state, x, stored)
        state = tree_where(done_now, twin.reset_state(out.next_state), out.next_state)
        penalty = jnp.broadcast_to(out.regularization_loss, done_now.shape)
        return state, (jax.tree.leaves(out.output), penalty, by_path(out.metrics, {}))

    promotion, rank = as_the_ancestor_runs()
    with promotion, rank:
        inputs = (xs, done, extras_to_ancestor(module, extras))
        start = state_to_ancestor(module, start)
        state, (output, penalty, metrics) = jax.lax.scan(step, start, inputs)
    return Result(output, jax.tree.leaves(state), penalty, metrics)


def at(tree, t):
    return jax.tree.map(lambda leaf: leaf[t], tree)


def by_path(metrics, renamed):
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        *parents, name = (jax.tree_util.keystr((entry,), simple=True) for entry in path)
        flat["/".join([*parents, renamed.get(name, name)])] = leaf
    return flat


class Compared(NamedTuple):
    """Values, and the gradients of one random function of them by weights and inputs."""

    ours: Result
    theirs: Result
    our_gradients: object
    their_gradients: object
    only_ours: list[str]  # metrics that the ancestor does not have


@jit
def compare(module, sequence, run_ours=ours, run_theirs=theirs):
    params, rest = eqx.partition(module, nets.trainable(module))
    smooth, fixed = eqx.partition(sequence.xs, eqx.is_inexact_array)

    def of(run):
        def function(params, smooth):
            xs = eqx.combine(smooth, fixed)
            return run(eqx.combine(params, rest), sequence._replace(xs=xs))

        return function

    their_result, their_pullback = jax.vjp(of(run_theirs), params, smooth)
    only_ours = set()

    def shared(module, sequence):
        result = run_ours(module, sequence)
        only_ours.update(result.metrics.keys() - their_result.metrics.keys())
        metrics = {name: result.metrics[name] for name in their_result.metrics}
        return result._replace(metrics=metrics)

    our_result, our_pullback = jax.vjp(of(shared), params, smooth)
    cotangents = directions(their_result)
    return Compared(
        our_result,
        their_result,
        our_pullback(cotangents),
        their_pullback(cotangents),
        sorted(only_ours),
    )


def directions(result):
    """Cotangents of moderate size, another for every number; none for what is no float."""

    def direction(index, leaf):
        if not eqx.is_inexact_array(leaf):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        wave = jnp.sin(1.0 + index + jnp.arange(leaf.size, dtype=jnp.float32))
        # A latent before the first is NaN in the ancestor's state: nothing flows there.
        return jnp.where(jnp.isnan(leaf), 0.0, wave.reshape(leaf.shape))

    leaves, treedef = jax.tree.flatten(result)
    return jax.tree.unflatten(treedef, [direction(i, leaf) for i, leaf in enumerate(leaves)])


def assert_equal(got, expected, *, at_least=0.0):
    """Two trees of one structure, to 1e-5 of the scale of each leaf (or of `at_least`)."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    flat = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (path, right), left in zip(flat, jax.tree.leaves(got), strict=True):
        where = jax.tree_util.keystr(path)
        a, b = numbers(left), numbers(right)
        assert a.shape == b.shape, where
        if np.issubdtype(b.dtype, np.floating):
            scale = np.max(np.abs(b), initial=at_least, where=np.isfinite(b))
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale, err_msg=where)
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)


def numbers(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def spread(leaves):
    """The largest number in a tree, to see that a comparison compares something."""
    floats = [leaf for leaf in jax.tree.leaves(leaves) if eqx.is_inexact_array(leaf)]
    return max((float(np.nanmax(np.abs(leaf), initial=0.0)) for leaf in floats), default=0.0)
