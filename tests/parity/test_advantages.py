"""Advantages with masked time limits equal those of `nnx-ppo` 0.3.0, save in two corners."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("nnx_ppo")

from nnx_ppo.algorithms import ppo as their_ppo

from eqx_ppo.ops import gae
from tests.parity.common import as_the_ancestor_runs

T = 4


def both_advantages(terminated, truncated, done):
    """Ours with the mask, and the ancestor's, which is told `done` instead of `terminated`."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, *truncated.shape)).astype(np.float32)
    last = rng.normal(size=truncated.shape[1]).astype(np.float32)
    terminated, truncated = jnp.asarray(terminated), jnp.asarray(truncated)
    ours = gae(
        jnp.asarray(rewards),
        jnp.asarray(values),
        jnp.asarray(np.concatenate([values[1:], last[None]])),
        terminated,
        truncated,
        gamma=0.9,
        lambda_=0.8,
        valid=terminated | ~truncated,
    )
    promotion, rank = as_the_ancestor_runs()
    with promotion, rank:
        theirs = jax.jit(their_ppo.gae)(rewards, values, last, done, truncated, 0.8, 0.9)
    return np.asarray(ours), np.asarray(theirs)


def test_masked_advantages_for_every_way_to_end():
    """One environment for each sequence of steps that go on, terminate or are cut off."""
    kinds = np.array(list(itertools.product(range(3), repeat=T))).T
    ours, theirs = both_advantages(kinds == 1, kinds == 2, kinds > 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (theirs[kinds == 2] == 0).all()
    assert np.abs(theirs[kinds == 1]).min() > 0


def test_a_termination_on_the_last_allowed_step_counts():
    """Where both flags are set, the ancestor masks the failure; here termination wins."""
    ends, never = np.zeros((2, T, 2), bool)
    ends[2] = True
    ours, theirs = both_advantages(ends, ends, ends)
    assert (theirs[2] == 0).all()
    assert np.abs(ours[2]).min() > 0.1
    np.testing.assert_array_equal(ours, both_advantages(ends, never, ends)[0])


def test_a_time_limit_ends_the_episode_without_done():
    """The ancestor then goes on to add up the differences that follow, if `done` is not set."""
    ends, never = np.zeros((2, T, 2), bool)
    ends[1] = True
    ours, theirs = both_advantages(never, ends, never)
    assert (ours[1] == 0).all()
    np.testing.assert_allclose(theirs[1], 0.9 * 0.8 * theirs[2], rtol=1e-5)
    assert np.abs(theirs[1]).min() > 0.1
