import math

import numpy as np
import pytest

from eqx_ppo.ops._quadrature import (
    HERMITE_NODES,
    HERMITE_WEIGHTS,
    SOFTPLUS_NODES,
    SOFTPLUS_WEIGHTS,
)


def eta(s):
    """The Dirichlet eta function, by averaging the partial sums of its alternating series."""
    terms = [(-1.0) ** (n + 1) / n**s for n in range(1, 60)]
    sums = np.cumsum(terms)
    while len(sums) > 1:
        sums = 0.5 * (sums[1:] + sums[:-1])
    return sums[0]


def test_eta_is_right():
    assert eta(2) == pytest.approx(math.pi**2 / 12, rel=1e-14)
    assert eta(4) == pytest.approx(7 * math.pi**4 / 720, rel=1e-14)


@pytest.mark.parametrize("degree", range(16))
def test_softplus_nodes_reproduce_the_moments(degree):
    nodes, weights = np.float64(SOFTPLUS_NODES), np.float64(SOFTPLUS_WEIGHTS)
    exact = math.factorial(degree) * eta(degree + 2) / 2 ** (degree + 1)
    assert np.sum(weights * nodes**degree) == pytest.approx(exact, rel=2e-6)


def test_softplus_nodes_are_a_gauss_rule_and_no_better():
    """Degree 16 is the first that 8 nodes miss, so they are used up by the others."""
    nodes, weights = np.float64(SOFTPLUS_NODES), np.float64(SOFTPLUS_WEIGHTS)
    exact = math.factorial(16) * eta(18) / 2**17
    assert np.sum(weights * nodes**16) < 0.99995 * exact
    assert len(nodes) == 8
    assert (nodes > 0).all()
    assert (weights > 0).all()


def test_softplus_nodes_integrate_a_smooth_function():
    u = np.linspace(0.0, 40.0, 400_001)
    weight = np.log1p(np.exp(-2.0 * u))
    exact = np.trapezoid(weight * np.cos(u), u)
    got = np.sum(np.float64(SOFTPLUS_WEIGHTS) * np.cos(np.float64(SOFTPLUS_NODES)))
    assert got == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("degree", range(24))
def test_hermite_nodes_reproduce_the_normal_moments(degree):
    nodes, weights = np.float64(HERMITE_NODES), np.float64(HERMITE_WEIGHTS)
    exact = 0.0 if degree % 2 else math.prod(range(1, degree, 2))
    size = np.sum(weights * np.abs(nodes) ** degree)
    assert np.sum(weights * nodes**degree) == pytest.approx(exact, abs=3e-6 * size)
