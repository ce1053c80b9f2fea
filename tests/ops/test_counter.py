import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import add_count, count_as_float, new_counter

STARTS = [0, 1, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**40 + 5, 2**63]
AMOUNTS = [0, 1, 2, 5120, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1]


def test_sums_equal_those_of_python_integers():
    for start, amount in itertools.product(STARTS, AMOUNTS):
        assert int(add_count(new_counter(start), amount)) == start + amount


def test_arrays_of_any_integer_type_can_be_added_inside_jit():
    counter = new_counter(2**32 - 3)
    for dtype, amount in ((jnp.int32, 2**31 - 1), (jnp.uint32, 2**32 - 1), (jnp.int8, 7)):
        got = jax.jit(add_count)(counter, jnp.array(amount, dtype))
        assert int(got) == 2**32 - 3 + amount


def test_a_long_scan_of_additions_is_exact():
    amounts = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)

    def add(counter, amount):
        return add_count(counter, amount), count_as_float(counter)

    counter, seen = jax.jit(lambda c, a: jax.lax.scan(add, c, a))(new_counter(), amounts)
    expected = np.concatenate([[0], np.cumsum(amounts, dtype=np.uint64)])
    assert int(counter) == int(expected[-1]) > 2**40
    np.testing.assert_allclose(seen, expected[:-1].astype(np.float64), rtol=2**-23)


@pytest.mark.parametrize("value", [0, 1, 2**24 - 1, 2**32, 2**32 + 2**10, 3 * 2**50])
def test_float_is_the_nearest(value):
    got = count_as_float(new_counter(value))
    assert got.dtype == jnp.float32
    assert float(got) == pytest.approx(value, rel=2**-24)


def test_words_are_strong_32_bit_integers():
    counter = add_count(new_counter(3), 4)
    for word in counter:
        assert word.dtype == jnp.uint32
        assert not jax.typeof(word).weak_type


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="-1"):
        new_counter(-1)
    with pytest.raises(OverflowError):
        new_counter(2**64)
    with pytest.raises(OverflowError):
        add_count(new_counter(), 2**32)
