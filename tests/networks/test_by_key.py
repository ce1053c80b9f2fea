"""`Map`, `Concat` and `Merge`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import networks as nets


def run(module, x, batch_size=2):
    state = module.initialize_state(batch_size, key=jax.random.key(1))
    return module(state, x)


X = {
    "b": jnp.arange(6.0).reshape(2, 3),
    "a": jnp.arange(4.0).reshape(2, 2),
    "unused": jnp.zeros((2, 1)),
}


def test_map_runs_each_child_on_its_entry_and_drops_the_rest():
    out = run(nets.Map(b=nets.Scale(2.0), a=nets.Scale(-1.0)), X)
    assert set(out.output) == {"a", "b"}
    np.testing.assert_array_equal(out.output["b"], 2.0 * np.asarray(X["b"]))
    np.testing.assert_array_equal(out.output["a"], -np.asarray(X["a"]))
    assert set(out.next_state) == {"a", "b"}


def test_concat_joins_in_the_given_order_not_in_the_sorted_one():
    module = nets.Concat(b=nets.Scale(1.0), a=nets.Scale(10.0))
    expected = np.concatenate([np.asarray(X["b"]), 10.0 * np.asarray(X["a"])], axis=1)
    np.testing.assert_array_equal(run(module, X).output, expected)
    # Tree operations re-sort dicts; the order of the columns must survive them.
    rebuilt = jax.tree.map(lambda leaf: leaf, module)
    np.testing.assert_array_equal(jax.jit(lambda x: run(rebuilt, x).output)(X), expected)


def test_merge_joins_the_dicts_of_its_children():
    module = nets.Merge(first=nets.Filter({"x": "a"}), second=nets.Filter({"y": "b", "z": "a"}))
    output = run(module, X).output
    assert set(output) == {"x", "y", "z"}
    np.testing.assert_array_equal(output["y"], X["b"])


@pytest.mark.parametrize("container", [nets.Map, nets.Concat])
def test_a_missing_key_is_named(container):
    with pytest.raises(ValueError, match=r"\['c'\] are missing; got \['b', 'a', 'unused'\]"):
        run(container(a=nets.Scale(1.0), c=nets.Scale(1.0)), X)
    with pytest.raises(TypeError, match="takes a dict"):
        run(container(a=nets.Scale(1.0)), X["a"])


def test_merge_refuses_a_key_of_two_children_and_an_output_that_is_no_dict():
    twice = nets.Merge(first=nets.Filter({"x": "a"}), second=nets.Filter({"x": "b"}))
    with pytest.raises(ValueError, match="'x' from both `first` and `second`"):
        run(twice, X)
    with pytest.raises(TypeError, match="`flat` returned a"):
        run(nets.Merge(flat=nets.Flattener()), X)


@pytest.mark.parametrize("container", [nets.Map, nets.Concat, nets.Merge])
def test_children_come_as_a_dict_or_as_keywords(container):
    as_dict = container({"a-b": nets.Scale(1.0)}, c=nets.Scale(1.0))
    assert as_dict.names == ("a-b", "c")
    with pytest.raises(ValueError, match="at least one child"):
        container()
    with pytest.raises(ValueError, match="both in its dict and as keywords"):
        container({"a": nets.Scale(1.0)}, a=nets.Scale(1.0))


def test_samplers_of_a_map_draw_different_noise():
    sampler = nets.NormalTanhSampler(entropy_weight=0.0)
    out = run(
        nets.Map(arm=sampler, leg=sampler), {"arm": jnp.zeros((2, 4)), "leg": jnp.zeros((2, 4))}
    )
    arm, leg = out.rollout_extras["arm"], out.rollout_extras["leg"]
    assert not np.any(np.asarray(arm) == np.asarray(leg))
