"""Every module equals its twin in the mutable ancestor `nnx-ppo` 0.3.0.

With the same weights, statistics, noise and carry in the middle of an episode, sequences with
resets inside agree to 1e-5 of their scale in everything that comes out, and so do the
gradients of a random function of that by weights and inputs. So do the statistics after
several rollouts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("nnx_ppo")

from flax import nnx
from nnx_ppo.networks import factories
from nnx_ppo.networks.normalizer import NormalizerStatistics

from eqx_ppo import networks as nets
from tests.helpers.modules import random_inputs, with_statistics
from tests.parity import common
from tests.parity.carry import extras_to_ancestor
from tests.parity.cases import CASES
from tests.parity.convert import to_ancestor

T, B = 5, 4
DONE = np.zeros((T, B), bool)
DONE[0, 0] = True  # the first step
DONE[[1, 2], 1] = True  # two in a row
DONE[T - 1, 2] = True  # the last; environment 3 never ends

GRAPHS = tuple(name for name in CASES if "graph" in name)
WITH_STATISTICS = (
    "normalizer_before_data",
    "normalizer",
    "normalizer_of_images",
    "normalizer_of_dicts",
    "nested",
    "mlp_actor_critic",
    "graph_with_transforms",
)


@functools.cache
def build(name):
    """The module, with arbitrary weights and statistics."""
    module = common.with_weights(CASES[name].build, seed=5)
    return module if name.endswith("before_data") else with_statistics(module)


@common.jit
def rollout(module, early, xs):
    """A carry from the middle of episodes, and what a rollout from it stores."""
    state = module.initialize_state(B, key=jax.random.key(7))
    start = module.unroll(state, early, jnp.asarray(DONE[::-1])).next_state
    return start, module.unroll(start, xs, jnp.asarray(DONE)).rollout_extras


def inputs(name, seed):
    return random_inputs(CASES[name].sample, (T, B), seed=seed)


@functools.cache
def sequence(name):
    xs = inputs(name, 2)
    start, extras = rollout(build(name), inputs(name, 1), xs)
    return common.Sequence(start, xs, jnp.asarray(DONE), extras)


def of_twin(name, read):
    """What `read` finds in the ancestor's twin of a case, which is not computed."""
    module, found = build(name), []
    jax.eval_shape(lambda: found.append(read(to_ancestor(module))))
    return found[0]


def test_every_module_of_the_ancestor_is_there():
    """All its layers and containers are the twin of a part of some case."""

    def kinds(twin):
        nodes = [node for _, node in nnx.iter_modules(twin)]
        return {kind.__name__ for node in nodes for kind in type(node).__mro__}

    seen = set().union(*(of_twin(name, kinds) for name in CASES))
    assert seen >= {
        "Dense",
        "LSTM",
        "Delay",
        "Normalizer",
        "VariationalBottleneck",
        "AR1VariationalBottleneck",
        "NormalTanhSampler",
        "PPOAdapter",
        "PopulationGraph",
        "Sequential",
        "Concat",
        "Parallel",
        "Splitter",
        "Flattener",
        "Filter",
        "Scale",
        "Merge",
        "Map",
    }


@pytest.mark.parametrize("name", CASES)
def test_sequence_and_gradients(name):
    run_ours, run_theirs = (summed, total) if name in GRAPHS else (common.ours, common.theirs)
    result = common.compare(build(name), sequence(name), run_ours, run_theirs)
    common.assert_equal(result.ours, result.theirs)
    common.assert_equal(result.our_gradients, result.their_gradients)
    assert result.only_ours == sorted(CASES[name].only_ours)
    assert common.spread(result.theirs.output) > 0.1


def summed(module, sequence):
    """The ancestor's graph sums its penalty over the batch; ours is one per environment."""
    result = common.ours(module, sequence)
    return result._replace(penalty=result.penalty.sum(axis=1))


def total(module, sequence):
    result = common.theirs(module, sequence)
    return result._replace(penalty=result.penalty[:, 0])


def statistics(twin):
    return nnx.to_pure_dict(nnx.state(twin, NormalizerStatistics))


def test_cases_with_statistics_are_complete():
    assert {name for name in CASES if of_twin(name, statistics)} == set(WITH_STATISTICS)


@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_statistics_after_several_rollouts(name):
    """Mean, sum of squares and count; each module sees what the statistics before it made."""
    module = build(name)
    extras = []
    for seed in (2, 3, 4):
        xs = jax.tree.map(lambda leaf, seed=seed: seed * leaf + 0.5 * seed, inputs(name, seed))
        extras.append(rollout(module, inputs(name, 1), xs)[1])
        module = common.jit(type(module).update_statistics)(module, extras[-1])

    @common.jit
    def both(before, after, extras):
        promotion, rank = common.as_the_ancestor_runs()
        with promotion, rank:
            twin = to_ancestor(before)
            for of_rollout in extras:
                twin.update_statistics(extras_to_ancestor(before, of_rollout))
            return statistics(to_ancestor(after)), statistics(twin)

    got, expected = both(build(name), module, extras)
    common.assert_equal(got, expected)
    counts = [leaf for leaf in jax.tree.leaves(expected) if leaf.ndim == 0]
    start = 0 if name.endswith("before_data") else 40
    assert {float(count) for count in counts} == {start + 3 * T * B}


@pytest.mark.parametrize("normalize_obs", [True, False])
def test_factory(normalize_obs):
    """The two factories make one structure, and one function of given weights."""

    def build(key):
        sampler = nets.NormalTanhSampler(entropy_weight=1e-2, min_std=0.1, inference=True)
        options = {"normalize_obs": normalize_obs, "sampler": sampler}
        return nets.make_mlp_actor_critic(4, 2, [5], [6, 3], key=key, **options)

    @common.jit
    def both(ours, obs):
        theirs = factories.make_mlp_actor_critic(
            4, 2, [5], [6, 3], nnx.Rngs(0), activation="swish", normalize_obs=normalize_obs
        )
        theirs.eval()  # the mean instead of a sample
        kinds = nnx.Any(nnx.Param, NormalizerStatistics)
        twin = to_ancestor(ours)
        twin = twin if normalize_obs else twin[0]  # the ancestor's is not in a `Sequential` then
        weights = nnx.state(twin, kinds)
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (weights, nnx.state(theirs, kinds))]
        assert shapes[0] == shapes[1]
        nnx.update(theirs, weights)
        expected = theirs(theirs.initialize_state(B), obs).output
        state = ours.initialize_state(B, key=jax.random.key(1))
        return jax.tree.leaves(ours(state, obs).output), jax.tree.leaves(expected)

    ours = with_statistics(common.with_weights(build, seed=6))
    obs = random_inputs(CASES["mlp_actor_critic"].sample, (B,), seed=3)
    promotion, rank = common.as_the_ancestor_runs()
    with promotion, rank:
        common.assert_equal(*both(ours, obs))
