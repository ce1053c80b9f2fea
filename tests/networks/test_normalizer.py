from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

from eqx_ppo.networks import (
    Dense,
    Lift,
    Normalizer,
    Parallel,
    Sequential,
    trainable,
)
from eqx_ppo.ops import Moments, new_counter


class Pair(NamedTuple):
    state: Array
    goal: Array


class Record(eqx.Module):
    """A user's observation whose fields are checked where it is built."""

    state: Float[Array, "*batch 3"]
    goal: Float[Array, "*batch 2"]


def array(*rows):
    return jnp.asarray(np.array(rows, np.float32))


def learned(module, *rollouts):
    for extras in rollouts:
        module = module.update_statistics(extras)
    return module


def test_before_data_the_mean_is_zero_and_the_deviation_ten():
    module = Normalizer(2)
    np.testing.assert_array_equal(module((), array([5.0, -20.0])).output, [[0.5, -2.0]])
    np.testing.assert_array_equal(module.mean, [0.0, 0.0])
    np.testing.assert_array_equal(module.std, [10.0, 10.0])
    assert int(module.count) == 0
    assert float(Normalizer((), initial_std=4)((), array(2.0)).output[0]) == 0.5


def test_standardizes_by_the_moments_of_what_it_saw():
    rng = np.random.default_rng(0)
    rollouts = [rng.normal(3.0, 2.0, (4, 5, 3)).astype(np.float32) for _ in range(3)]
    module = learned(Normalizer(3), *map(jnp.asarray, rollouts))
    seen = np.concatenate([r.reshape(-1, 3) for r in rollouts]).astype(np.float64)
    x = rng.normal(3.0, 2.0, (7, 3)).astype(np.float32)
    expected = (x - seen.mean(0)) / seen.std(0)
    np.testing.assert_allclose(module((), jnp.asarray(x)).output, expected, rtol=1e-5, atol=1e-5)
    assert int(module.count) == 60


def test_emits_its_input_in_both_phases():
    x = array([1.0, 2.0])
    out = Normalizer(2)((), x)
    assert out.rollout_extras is x
    replayed = Normalizer(2)((), x, array([7.0, 7.0]))
    np.testing.assert_array_equal(replayed.output, out.output)
    assert replayed.rollout_extras is x


def test_first_batch_far_from_zero():
    module = learned(Normalizer(1), jnp.full((1, 4, 1), 1800.0))
    np.testing.assert_array_equal(module((), array([1800.0])).output, [[0.0]])
    module = learned(Normalizer(1), array([[[1800.0], [1801.0]]])[0])
    np.testing.assert_array_equal(module.mean, [1800.5])
    np.testing.assert_array_equal(module.std, [0.5])


def test_a_constant_feature_gives_zero_and_a_documented_jump():
    """Variance floor 1e-6: a departure of 0.1 gives 0.1 / 1e-3."""
    module = learned(Normalizer(1), jnp.full((20, 256, 1), 0.5))
    got = module((), array([0.5], [0.6])).output[:, 0]
    assert float(got[0]) == 0.0
    np.testing.assert_allclose(got[1], 100.0, rtol=1e-5)
    wide = learned(Normalizer(1, min_variance=1e-2), jnp.full((20, 256, 1), 0.5))
    np.testing.assert_allclose(wide((), array([0.6])).output, [[1.0]], rtol=1e-5)


def test_time_and_batch_are_both_samples():
    """[1, 3, 5, 7] as [T=2, B=2], as [4, 1] and in two updates."""
    x = array(1.0, 3.0, 5.0, 7.0)
    ways = ([x.reshape(2, 2)], [x.reshape(4, 1)], [x[:2].reshape(1, 2), x[2:].reshape(2, 1)])
    for extras in ways:
        module = learned(Normalizer(()), *extras)
        assert float(module.mean) == pytest.approx(4.0, rel=1e-6)
        assert float(module.std) == pytest.approx(np.sqrt(5.0), rel=1e-6)
        assert int(module.count) == 4


# --- Dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "variance"),
    [
        (jnp.array([[0], [255]], jnp.uint8), 16256.25),
        (jnp.array([[-7], [3]], jnp.int32), 25.0),
        (jnp.array([[True], [False]]), 0.25),
        (jnp.array([[1.0], [3.0]], jnp.float16), 1.0),
    ],
)
def test_any_number_comes_out_float32(x, variance):
    module = learned(Normalizer(1), x[None])
    out = module((), x)
    assert out.output.dtype == module.mean.dtype == module.std.dtype == jnp.float32
    assert out.rollout_extras.dtype == x.dtype
    np.testing.assert_allclose(module.std, [np.sqrt(variance)], rtol=1e-6)
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(out.output, (exact - exact.mean()) / exact.std(), rtol=1e-3)


def test_numpy_float64_comes_out_float32():
    """As it reaches the network from a user's loop: through `jit`."""
    x = np.array([[1.0], [3.0]])
    assert x.dtype == np.float64
    module = jax.jit(lambda extras: Normalizer(1).update_statistics(extras))(x[None])
    got = jax.jit(lambda x: module((), x).output)(x)
    assert got.dtype == module.mean.dtype == jnp.float32
    np.testing.assert_allclose(got, [[-1.0], [1.0]], rtol=1e-6)


# --- Structured inputs --------------------------------------------------------------------


def test_every_leaf_of_a_dict_is_standardized_on_its_own():
    rng = np.random.default_rng(1)
    obs = {
        "state": rng.normal(1e3, 5.0, (6, 4, 3)).astype(np.float32),
        "privileged_state": rng.normal(-1e3, 1e2, (6, 4, 2)).astype(np.float32),
    }
    module = learned(
        Normalizer({"state": 3, "privileged_state": 2}), jax.tree.map(jnp.asarray, obs)
    )
    out = module((), {name: jnp.asarray(x[0]) for name, x in obs.items()}).output
    for name, x in obs.items():
        seen = x.reshape(-1, x.shape[-1]).astype(np.float64)
        expected = (x[0] - seen.mean(0)) / seen.std(0)
        np.testing.assert_allclose(out[name], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sequence", [False, True])
def test_missing_and_extra_keys_are_named(sequence):
    module = Normalizer({"state": 3, "privileged_state": 2})
    lead = (5, 4) if sequence else (4,)

    def run(**sizes):
        x = {name: jnp.zeros((*lead, size)) for name, size in sizes.items()}
        if sequence:
            return module.unroll((), x, jnp.zeros(lead, jnp.bool_))
        return module((), x)

    run(state=3, privileged_state=2)
    with pytest.raises(ValueError, match=r"missing .*'privileged_state'.* unexpected nothing"):
        run(state=3)
    with pytest.raises(ValueError, match=r"missing nothing, unexpected .*'goal'"):
        run(state=3, privileged_state=2, goal=1)
    with pytest.raises(ValueError, match=r"'state'.*\[B, 3\].*\[\d+, 4\]"):
        run(state=4, privileged_state=2)


def test_shapes_of_several_axes_and_nested_trees():
    shape = {"a": {"image": (2, 3), "flag": ()}, "b": [4, (1,)], "tuple": ((3,), (2,))}
    module = Normalizer(shape)
    assert module.shape == {
        "a": {"image": (2, 3), "flag": ()},
        "b": [(4,), (1,)],
        "tuple": ((3,), (2,)),
    }
    x = jax.tree.map(lambda m: jnp.ones((5, *m.shape)), module.mean)
    out = module((), x).output
    assert jax.tree.map(jnp.shape, out) == jax.tree.map(jnp.shape, x)


@pytest.mark.parametrize("kind", [Pair, Record])
def test_structured_observations_of_a_user(kind):
    """Their constructors never see placeholders: `Record` would refuse them."""
    sizes = Pair(3, 2) if kind is Pair else kind(jnp.zeros(3), jnp.zeros(2))
    if kind is Record:
        sizes = jax.tree.map(lambda leaf: leaf.shape, sizes)
    module = Normalizer(sizes)
    x = kind(jnp.arange(12.0).reshape(4, 3), jnp.arange(8.0).reshape(4, 2))
    module = module.update_statistics(jax.tree.map(lambda leaf: leaf[None], x))
    out = module((), x)
    assert isinstance(out.output, kind)
    assert isinstance(out.rollout_extras, kind)
    for field, values in (("state", np.arange(12.0)), ("goal", np.arange(8.0))):
        seen = values.reshape(4, -1)
        expected = (seen - seen.mean(0)) / seen.std(0)
        got = out.output.state if field == "state" else out.output.goal
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_leaf_without_features_is_no_obstacle():
    module = Normalizer({"state": 3, "nothing": 0})
    x = {"state": jnp.ones((5, 4, 3)), "nothing": jnp.ones((5, 4, 0))}
    out = module.unroll((), x, jnp.zeros((5, 4), jnp.bool_))
    assert out.output["nothing"].shape == (5, 4, 0)
    np.testing.assert_allclose(out.output["state"], 0.1, rtol=1e-6)
    module = module.update_statistics(out.rollout_extras)
    np.testing.assert_array_equal(module.mean["state"], [1.0, 1.0, 1.0])


@pytest.mark.parametrize("shape", [-1, (2, -3), True, 2.5, "3", {"a": -1}])
def test_bad_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="takes feature shapes"):
        Normalizer(shape)


@pytest.mark.parametrize("options", [{"min_variance": 0.0}, {"initial_std": -1.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="positive"):
        Normalizer(3, **options)


@pytest.mark.parametrize(("built", "got"), [(3, (4, 4)), (1, (4, 3)), (3, (3,)), (3, (4, 1, 3))])
def test_wrong_width_is_refused_with_both_sizes(built, got):
    """Statistics of one feature would broadcast over three."""
    with pytest.raises(ValueError, match="`Normalizer` expected") as info:
        Normalizer(built)((), jnp.zeros(got))
    assert f"[B, {built}]" in str(info.value)
    assert str(list(got)) in str(info.value)


# --- Updates ------------------------------------------------------------------------------


def test_two_built_from_one_specification_share_nothing():
    shape = {"a": 2, "b": (1,)}
    first, second = Normalizer(shape), Normalizer(shape)
    extras = {"a": jnp.ones((3, 4, 2)), "b": jnp.ones((3, 4, 1))}
    updated = first.update_statistics(extras)
    assert shape == {"a": 2, "b": (1,)}
    for untouched in (first, second):
        assert [int(count) for count in untouched.count.values()] == [0, 0]
        np.testing.assert_array_equal(untouched.mean["a"], [0.0, 0.0])
    np.testing.assert_array_equal(updated.mean["a"], [1.0, 1.0])


def test_all_normalizers_of_a_network_are_updated_at_once(getkey):
    """Three at different depths; the old network stays as it was."""
    double = Lift(lambda x: 2.0 * x)
    network = Sequential(
        [
            Normalizer(1, initial_std=1.0),
            Parallel(
                a=Sequential([double, Normalizer(1)]),
                b=Sequential([Parallel(inner=Normalizer(1)), Lift(lambda x: x["inner"])]),
            ),
        ]
    )
    state = network.initialize_state(2, key=getkey())
    xs = array([[1.0], [3.0]], [[5.0], [7.0]])
    out = network.unroll(state, xs, jnp.zeros((2, 2), jnp.bool_))
    new = network.update_statistics(out.rollout_extras)
    top, inner = new[0], new[1]
    np.testing.assert_allclose(top.mean, [4.0])
    np.testing.assert_allclose(inner["a"][1].mean, [8.0])
    np.testing.assert_allclose(inner["b"][0]["inner"].mean, [4.0])
    for module in (network[0], network[1]["a"][1], network[1]["b"][0]["inner"]):
        assert int(module.count) == 0


def test_what_was_not_seen_changes_nothing():
    module = learned(Normalizer(2), jnp.ones((3, 4, 2)))
    assert module.update_statistics(None) is module


def test_non_finite_rows_are_left_out():
    x = np.random.default_rng(2).normal(size=(4, 3, 2)).astype(np.float32)
    x[1, 2, 0] = np.nan
    x[3, 0, 1] = np.inf
    module = learned(Normalizer(2), jnp.asarray(x))
    kept = x[np.isfinite(x).all(-1)].astype(np.float64)
    assert int(module.count) == len(kept) == 10
    np.testing.assert_allclose(module.mean, kept.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.std, kept.std(0), rtol=1e-5)


def test_statistics_are_no_parameters(getkey):
    """Neither for the optimizer's state, nor for decay, nor in the gradient norm."""
    moments = Moments(jnp.full(3, 7.0), jnp.full(3, 2.0), new_counter(50))
    normalizer = eqx.tree_at(lambda m: m.statistics.moments, Normalizer(3), moments)
    network = Sequential([normalizer, Dense(3, 2, key=getkey())])
    params, static = eqx.partition(network, trainable(network))
    assert len(jax.tree.leaves(params)) == 2  # kernel and bias
    x = jnp.asarray(np.random.default_rng(3).normal(7, 1, (4, 3)), jnp.float32)

    def loss(params):
        network = eqx.combine(params, static)
        return jnp.sum(jnp.square(network([(), ()], x).output))

    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(params)
        for _ in range(5):
            gradient = jax.grad(loss)(params)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            params = optax.apply_updates(params, updates)
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(optax.tree.norm(gradient), norm, rtol=1e-5)
    trained = eqx.combine(params, static)
    np.testing.assert_array_equal(trained[0].mean, np.full(3, 7.0, np.float32))
    np.testing.assert_array_equal(trained[0].std, np.sqrt(np.full(3, 2.0, np.float32)))
    assert int(trained[0].count) == 50
    assert np.abs(trained[1].kernel - network[1].kernel).min() > 0


def test_gradient_passes_through_to_what_comes_before():
    module = learned(Normalizer(1), array([[-2.0], [2.0]]))
    slope = jax.grad(lambda x: jnp.sum(module((), x).output))(array([1.0]))
    np.testing.assert_allclose(slope, [[0.5]])


def test_several_in_one_network_are_all_updated():
    """Side by side and nested; the network that was given stays as it was (case F9)."""

    def normalizers(network):
        right = network.modules[1].modules[1]
        return network.modules[0], network.modules[1].modules[0], right.modules[1]

    deep = Sequential([Lift(lambda x: 2.0 * x + 1.0), Normalizer(2)])
    network = Sequential([Normalizer(2), Parallel({"left": Normalizer(2), "right": deep})])
    xs = np.random.default_rng(0).normal(3.0, 2.0, (6, 4, 2)).astype(np.float32)
    state = network.initialize_state(4, key=jax.random.key(0))
    out = network.unroll(state, jnp.asarray(xs), jnp.zeros((6, 4), jnp.bool_))
    updated = network.update_statistics(out.rollout_extras)
    mean = xs.reshape(-1, 2).mean(0)
    seen = (mean, mean / 10.0, 2.0 * mean / 10.0 + 1.0)  # the first one still divides by 10
    for old, new, expected in zip(normalizers(network), normalizers(updated), seen, strict=True):
        np.testing.assert_allclose(new.mean, expected, rtol=1e-5)
        assert (int(old.count), int(new.count)) == (0, 24)
        np.testing.assert_array_equal(old.mean, [0.0, 0.0])
