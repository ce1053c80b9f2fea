"""What differs from `nnx-ppo` 0.3.0, and how.

Differences that a comparison has to take into account: how keys move on (see `convert.py`),
the formula of the entropy bonus, the penalty of a population graph, which is summed over the
batch there (`test_modules.py`), and time limits (`test_loss.py`). The others are refusals and
repairs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("nnx_ppo")

from flax import nnx
from nnx_ppo.networks import adapter, containers, feedforward, normalizer, sampling_layers

from eqx_ppo import networks as nets
from tests.parity.common import as_the_ancestor_runs
from tests.parity.convert import to_ancestor


@pytest.fixture(autouse=True)
def loose():
    promotion, rank = as_the_ancestor_runs()
    with promotion, rank:
        yield


def merged(module):
    """The ancestor's module as any NNX transform sees it."""
    return nnx.merge(*nnx.split(module))


def test_entropy_of_one_more_sample():
    """The ancestor's entropy is one draw of a random variable whose mean is ours."""
    n = 20_000
    x = jnp.array([[0.3, -1.0, 0.2, -0.7]])
    ours = nets.NormalTanhSampler(entropy_weight=1.0)
    mean, std = ours.distribution(x)
    expected = float(ours(ours.initialize_state(1, key=jax.random.key(0)), x).metrics["entropy"][0])

    @jax.jit
    def their_entropy(mean, std):
        theirs = sampling_layers.NormalTanhSampler(nnx.Rngs(0), entropy_weight=1.0)
        return theirs._entropy(jnp.repeat(mean, n, axis=0), jnp.repeat(std, n, axis=0))

    draws = np.asarray(their_entropy(mean, std))
    error = draws.std() / np.sqrt(n)
    assert abs(draws.mean() - expected) < 4 * error
    assert 1e-3 < error < 1e-2


def test_columns_of_concat_keep_the_order_given():
    """NNX sorts the ancestor's children when it merges them, and with them the columns."""
    ours = nets.Concat(b=nets.Scale(1.0), a=nets.Scale(10.0))
    x = {"a": jnp.ones((1, 1)), "b": jnp.ones((1, 1))}
    state = ours.initialize_state(1, key=jax.random.key(0))
    copied = jax.tree.map(lambda leaf: leaf, ours)
    for module in (ours, copied):
        np.testing.assert_array_equal(module(state, x).output, [[1.0, 10.0]])
    theirs = to_ancestor(ours)
    np.testing.assert_array_equal(theirs(state, x).output, [[1.0, 10.0]])
    np.testing.assert_array_equal(merged(theirs)(state, x).output, [[10.0, 1.0]])


def test_slices_cover_the_input():
    """The ancestor leaves out what is too much."""
    ours, theirs = nets.Splitter(b=2, a=1), containers.Splitter(b=2, a=1)
    wide = jnp.array([[0.0, 1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(theirs((), wide).output["a"], [[2.0]])
    np.testing.assert_array_equal(ours((), wide[:, :3]).output["a"], [[2.0]])
    with pytest.raises(ValueError, match=r"shape \[B, 3\], but got \[1, 4\]"):
        ours((), wide)


def test_a_value_of_one_environment_keeps_its_batch_axis():
    """The ancestor drops any last axis of length 1, that of a batch of one included."""

    class Total(nets.StatelessModule):
        def __call__(self, state, x, rollout_extras=None):
            return nets.StatefulModuleOutput(x.sum(axis=-1), state)

    class TheirTotal(feedforward.StatefulModule):
        def __call__(self, state, x, rollout_extras=None):
            return feedforward.StatefulModuleOutput(state, x.sum(axis=-1), jnp.zeros(()), {})

    def policy():
        return nets.NormalTanhSampler(entropy_weight=0.0)

    ours = nets.PPOAdapter(action=policy(), value=Total())
    theirs = adapter.PPOAdapter(action=to_ancestor(policy()), value=TheirTotal())
    for batch, theirs_shape in ((2, (2,)), (1, ())):
        x = jnp.ones((batch, 4))
        state = ours.initialize_state(batch, key=jax.random.key(0))
        assert ours(state, x).output.value_estimates.shape == (batch,)
        empty = {"action": (), "value": ()}
        assert theirs(empty, x).output.value_estimates.shape == theirs_shape


def test_a_sample_that_is_not_finite_is_left_out_of_the_statistics():
    """It spoils those of the ancestor for ever."""
    xs = jnp.array([[[1.0], [jnp.nan]], [[3.0], [5.0]]])
    ours = nets.Normalizer(1).update_statistics(xs)
    np.testing.assert_allclose(ours.mean, [3.0], rtol=1e-6)
    theirs = normalizer.Normalizer(1)
    theirs.update_statistics(xs)
    assert np.isnan(theirs.mean.get_value()).all()
