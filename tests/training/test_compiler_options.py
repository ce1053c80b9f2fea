"""`compiler_options` takes sums away from XLA's library of kernels, and nothing else."""

import jax
import jax.numpy as jnp
import pytest

from eqx_ppo import compiler_options
from eqx_ppo.training import _compiler_options

_KERNEL = "__ynn_fusion"


def _compiled(function, *shapes, options=None):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*args).compile(options).as_text()


@pytest.fixture
def unasked():
    """As if nobody had asked for the options yet."""
    _compiler_options._products_alone.cache_clear()
    yield
    _compiler_options._products_alone.cache_clear()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the options are for a CPU")
def test_sums_are_loops_and_products_stay_as_they_are():
    options = compiler_options()
    sums, product = lambda x: x.sum(1), lambda x, y: x @ y
    if _KERNEL in _compiled(sums, (64, 256)):
        assert options
    assert _KERNEL not in _compiled(sums, (64, 256), options=options)
    shapes = (256, 256), (256, 256)
    plain = _compiled(product, *shapes)
    assert _compiled(product, *shapes, options=options).count(_KERNEL) == plain.count(_KERNEL)


def test_a_jit_takes_them():
    double = jax.jit(lambda x: (2 * x).sum(), compiler_options=compiler_options())
    assert double(jnp.arange(4.0)) == 12


def test_flags_of_the_user_win(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=-reduce")
    assert compiler_options() == {}


def test_none_where_xla_has_no_such_option(monkeypatch, unasked):
    monkeypatch.setattr(_compiler_options, "_LIBRARY_FUSIONS", "xla_no_such_option")
    assert compiler_options() == {}


def test_none_where_sums_are_loops_anyway(monkeypatch, unasked):
    monkeypatch.setattr(_compiler_options, "_KERNEL", "no such kernel")
    assert compiler_options() == {}


def test_each_caller_gets_a_dict_of_its_own():
    compiler_options()["xla_something"] = "1"
    assert "xla_something" not in compiler_options()
