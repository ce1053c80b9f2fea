import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from eqx_ppo._tree import (
    all_finite,
    all_true,
    are_finite,
    env_axes,
    expand_to,
    is_floating,
    merge_time,
    replace,
    split_time,
    stay_finite,
    take_rows,
    tree_where,
)
from tests.helpers.trees import assert_same

DONE = jnp.array([True, False, True])


class Checked(eqx.Module):
    """A user's state whose constructor accepts arrays of these shapes alone."""

    position: Float[Array, "*batch 2"]
    steps: Int[Array, "*batch"]

    def __check_init__(self):
        if not isinstance(self.position, jax.Array):
            raise TypeError("the constructor was called with a placeholder")


class Plain(NamedTuple):
    position: Array
    nothing: None
    data: dict


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    position: Array
    steps: Array


# --- tree_where ---------------------------------------------------------------------------


def test_selects_each_environment_on_its_own():
    """Floats, integers, booleans and keys of any rank."""
    one = {
        "scalar": jnp.arange(3.0),
        "image": jnp.arange(24, dtype=jnp.int32).reshape(3, 2, 4),
        "flag": jnp.array([True, True, False]),
        "key": jax.random.split(jax.random.key(0), 3),
        "raw": jax.random.split(jax.random.PRNGKey(1), 3),
    }
    two = {
        "scalar": -jnp.arange(3.0),
        "image": -one["image"],
        "flag": ~one["flag"],
        "key": jax.random.split(jax.random.key(2), 3),
        "raw": jax.random.split(jax.random.PRNGKey(3), 3),
    }
    got = tree_where(DONE, one, two)
    for name in one:
        expected = jnp.stack([one[name][0], two[name][1], one[name][2]])
        assert_same(got[name], expected)


def test_a_nan_on_the_unused_side_stays_there():
    got = tree_where(DONE, jnp.array([1.0, jnp.nan, 1.0]), jnp.array([jnp.nan, 2.0, jnp.nan]))
    np.testing.assert_array_equal(got, [1.0, 2.0, 1.0])


@pytest.mark.parametrize("kind", [Checked, Frozen])
def test_constructors_of_a_user_see_no_placeholders(kind):
    fresh = kind(jnp.zeros((3, 2)), jnp.zeros(3, jnp.int32))
    stepped = kind(jnp.ones((3, 2)), jnp.ones(3, jnp.int32))
    got = tree_where(DONE, fresh, stepped)
    assert type(got) is kind
    np.testing.assert_array_equal(got.steps, [0, 1, 0])
    np.testing.assert_array_equal(got.position, [[0, 0], [1, 1], [0, 0]])
    assert env_axes(stepped, 3) == (True, True)
    np.testing.assert_array_equal(take_rows(stepped, jnp.array([1])).steps, [1])


def test_none_and_empty_parts_are_kept():
    state = Plain(jnp.ones((3, 1)), None, {"empty": {}, "unit": ()})
    got = tree_where(DONE, jax.tree.map(jnp.zeros_like, state), state)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    np.testing.assert_array_equal(got.position, [[0], [1], [0]])
    assert tree_where(DONE, (), ()) == ()


@pytest.mark.parametrize("batch", [2, 3])
def test_shared_leaves_come_from_the_stepped_state(batch):
    """By structure: a table of length 3 is shared, even where there are 3 environments."""
    done = jnp.ones(batch, jnp.bool_)
    single = {
        "x": jax.ShapeDtypeStruct((), jnp.float32),
        "table": jax.ShapeDtypeStruct((3,), jnp.float32),
        "matrix": jax.ShapeDtypeStruct((3, 3), jnp.float32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }

    def state(value):
        return {
            "x": jnp.full(batch, value),
            "table": jnp.full(3, value),
            "matrix": jnp.full((batch, 3, 3), value),
            "step": jnp.asarray(value, jnp.int32),
        }

    got = tree_where(done, state(1.0), state(2.0), single=single)
    assert env_axes(state(2.0), batch, single) == (True, False, False, True)  # sorted by key
    np.testing.assert_array_equal(got["x"], np.full(batch, 1.0))
    np.testing.assert_array_equal(got["table"], np.full(3, 2.0))
    np.testing.assert_array_equal(got["matrix"], np.full((batch, 3, 3), 1.0))
    assert int(got["step"]) == 2
    # The sequence of the leaves serves as well as the state itself.
    again = tree_where(done, state(1.0), state(2.0), single=jax.tree.leaves(single))
    assert_same(again, got)


def test_without_a_single_state_scalars_are_shared_and_the_rest_is_not():
    got = tree_where(
        DONE, {"n": jnp.int32(1), "x": jnp.zeros(3)}, {"n": jnp.int32(2), "x": jnp.ones(3)}
    )
    assert int(got["n"]) == 2
    np.testing.assert_array_equal(got["x"], [0, 1, 0])


def test_python_numbers_pass_through():
    got = tree_where(DONE, {"dt": 0.1, "x": jnp.zeros(3)}, {"dt": 0.2, "x": jnp.ones(3)})
    assert got["dt"] == 0.2


def test_the_same_array_on_both_sides_is_passed_through():
    shared = jnp.ones((3, 4))
    assert tree_where(DONE, {"a": shared}, {"a": shared})["a"] is shared


@pytest.mark.parametrize("shape", [(2,), (2, 3), (4, 3)])
def test_a_leaf_that_fits_neither_form_is_named(shape):
    """`where` would broadcast [3, 1] against [3] without a word."""
    state = {"ok": jnp.zeros(3), "bad": jnp.zeros(shape)}
    with pytest.raises(ValueError, match=r"\['bad'\]") as info:
        tree_where(DONE, state, state | {"bad": jnp.ones(shape)})
    assert str(shape) in str(info.value)
    single = {"ok": jnp.zeros(()), "bad": jnp.zeros(5)}
    with pytest.raises(ValueError, match=r"Expected \(3, 5\).*\(5,\)"):
        tree_where(DONE, state, state | {"bad": jnp.ones(shape)}, single=single)


def test_two_shapes_of_one_leaf_are_refused():
    with pytest.raises(ValueError, match=r"two shapes: \(3, 1\) on the true side, \(3, 2\)"):
        tree_where(DONE, {"a": jnp.zeros((3, 1))}, {"a": jnp.zeros((3, 2))})


def test_two_structures_are_refused():
    with pytest.raises(ValueError, match="different structure"):
        tree_where(DONE, {"a": jnp.zeros(3)}, {"b": jnp.zeros(3)})


def test_the_gradient_reaches_only_the_side_that_was_taken():
    def total(a, b):
        return jnp.sum(tree_where(DONE, a, b))

    by_true, by_false = jax.grad(total, (0, 1))(jnp.zeros(3), jnp.zeros(3))
    np.testing.assert_array_equal(by_true, [1, 0, 1])
    np.testing.assert_array_equal(by_false, [0, 1, 0])


# --- Rows, time, records ------------------------------------------------------------------


def test_rows_are_taken_in_the_given_order():
    state = {"x": jnp.arange(8.0).reshape(4, 2), "n": jnp.arange(4)}
    taken = take_rows(state, jnp.array([3, 0, 3]))
    np.testing.assert_array_equal(taken["x"], [[6, 7], [0, 1], [6, 7]])
    np.testing.assert_array_equal(taken["n"], [3, 0, 3])


@pytest.mark.parametrize("features", [(), (5,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("lead", [(3, 4), (1, 4), (3, 1)])
def test_time_is_merged_in_order_and_split_again(features, lead):
    size = int(np.prod((*lead, *features)))
    x = jnp.arange(size, dtype=jnp.int32).reshape(*lead, *features)
    merged = merge_time({"a": x, "none": None})["a"]
    assert merged.shape == (lead[0] * lead[1], *features)
    np.testing.assert_array_equal(merged, np.asarray(x).reshape(merged.shape))
    np.testing.assert_array_equal(split_time(merged, lead[0]), x)


def test_keys_are_merged_and_split_too():
    keys = jax.random.split(jax.random.key(0), (3, 4))
    assert_same(split_time(merge_time(keys), 3), keys)


def test_a_scalar_cannot_be_split():
    with pytest.raises(ValueError, match="a scalar where one value per step"):
        split_time({"a": jnp.zeros(6), "b": jnp.zeros(())}, 3)


def test_expand_to_appends_axes():
    assert expand_to(jnp.ones(3), jnp.ones((3, 2, 2))).shape == (3, 1, 1)
    assert expand_to(jnp.ones((4, 3)), jnp.ones((4, 3))).shape == (4, 3)


@pytest.mark.parametrize(
    "record",
    [
        Plain(jnp.ones(2), None, {}),
        Frozen(jnp.ones(2), jnp.zeros(2)),
        Checked(jnp.ones(2), jnp.array(0, jnp.int32)),
    ],
)
def test_replace_changes_a_copy(record):
    new = replace(record, position=jnp.full(2, 5.0))
    assert type(new) is type(record)
    np.testing.assert_array_equal(new.position, [5.0, 5.0])
    np.testing.assert_array_equal(record.position, [1.0, 1.0])


@pytest.mark.parametrize("record", [{"position": 1}, [1], 3.0, Plain])
def test_replace_needs_a_record(record):
    with pytest.raises(TypeError, match="must be a dataclass"):
        replace(record, position=2)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a": jnp.ones(3), "b": (jnp.zeros(2), None)}, True),
        ({"a": jnp.ones(3), "b": (jnp.array([0.0, jnp.nan]), None)}, False),
        ({"a": jnp.array(-jnp.inf)}, False),
        ({"a": jnp.array([1, 2], jnp.int32), "key": jax.random.key(0)}, True),
        ({"a": jnp.array(jnp.nan, jnp.bfloat16)}, False),
        ({"a": jnp.ones(2), "b": jnp.array([jnp.inf, -jnp.inf]), "c": jnp.ones(2)}, False),
        ({"a": jnp.full(3, jnp.finfo(jnp.float32).max), "b": jnp.full(3, -1e38)}, True),
        ({"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2), "c": jnp.ones((2, 0))}, True),
        ({"a": jnp.array([1.0, 1j]), "b": jnp.array([1.0, jnp.nan * 1j])}, False),
        ({}, True),
    ],
)
def test_which_are_finite(tree, expected):
    def three_ways(tree):
        return (
            all_true(are_finite(tree)),
            all_true(stay_finite(tree, _ones(tree))),
            all_finite(tree),
        )

    for found in (three_ways(tree), jax.jit(lambda: three_ways(tree))(), jax.jit(three_ways)(tree)):
        assert [bool(each) for each in found] == [expected] * 3


def _ones(tree):
    return jax.tree.map(lambda leaf: jnp.ones_like(leaf) if is_floating(leaf) else leaf, tree)


@pytest.mark.parametrize("index", range(7))
def test_one_false_among_all_shapes(index):
    """Also where arrays of one shape are combined."""
    tests = [np.ones(shape, bool) for shape in ((3,), (), (2, 3), (3,), (2, 3), (3, 2), ())]
    assert all_true([jnp.asarray(test) for test in tests])
    tests[index][(-1,) * tests[index].ndim] = False
    assert not all_true([jnp.asarray(test) for test in tests])


def test_what_was_never_finite_stays_finite():
    old = {"a": jnp.array([1.0, jnp.inf]), "n": jnp.array(1, jnp.int32), "b": jnp.ones(2)}
    for new, expected in (([2.0, jnp.nan], True), ([2.0, 0.0], True), ([jnp.nan, 0.0], False)):
        changed = {**old, "a": jnp.array(new)}
        assert bool(all_true(stay_finite(changed, old))) is expected


def test_is_floating():
    assert is_floating(jnp.ones(2))
    assert is_floating(jnp.ones(2, jnp.bfloat16))
    for other in (jnp.ones(2, jnp.int32), jnp.ones(2, jnp.bool_), jax.random.key(0), 1.0, None):
        assert not is_floating(other)
