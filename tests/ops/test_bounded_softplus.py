import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import bounded_softplus, inverse_bounded_softplus

XS = jnp.array([-200.0, -20.0, -1.0, 0.0, 1.0, 20.0, 1e4], jnp.float32)


def test_without_a_maximum_it_is_a_shifted_softplus():
    got = bounded_softplus(XS, 0.3)
    np.testing.assert_allclose(got, 0.3 + np.logaddexp(np.float64(XS), 0.0), rtol=1e-6)


def test_by_hand_with_a_maximum():
    """s = log(1 + e^x) is harmonically added to the width 4: s = 4 gives half of it."""
    x = jnp.float32(math.log(math.expm1(4.0)))
    assert float(bounded_softplus(x, 1.0, 5.0)) == pytest.approx(3.0, rel=1e-6)


def test_it_rises_between_its_limits_with_a_slope_that_does_not_vanish():
    got = np.asarray(bounded_softplus(XS, 1.0, 5.0))
    assert (np.diff(got) >= 0).all()
    assert got[0] == 1.0
    assert 4.99 < got[-1] <= 5.0
    slopes = jax.vmap(jax.grad(lambda x: bounded_softplus(x, 1.0, 5.0)))(XS)
    assert np.isfinite(slopes).all()
    assert (slopes[1:] > 0).all()
    endless = jax.vmap(jax.grad(lambda x: bounded_softplus(x, 1.0)))(XS)
    np.testing.assert_allclose(endless, 1 / (1 + np.exp(-np.float64(XS))), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("maximum", [10.0, math.inf])
@pytest.mark.parametrize("y", [0.1001, 0.5, 3.0, 9.9])
def test_the_inverse_undoes_it(y, maximum):
    x = inverse_bounded_softplus(y, 0.1, maximum)
    assert float(bounded_softplus(jnp.float32(x), 0.1, maximum)) == pytest.approx(y, rel=1e-5)


@pytest.mark.parametrize("y", [0.1, 0.0, 10.0, 11.0, math.nan])
def test_the_inverse_refuses_what_is_outside(y):
    with pytest.raises(ValueError, match=r"between 0\.1 and 10\.0"):
        inverse_bounded_softplus(y, 0.1, 10.0)
