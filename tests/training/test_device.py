import gc

import jax
import jax.numpy as jnp
import pytest

from eqx_ppo.training._device import _lower


@pytest.fixture
def collector():
    """Leaves the collector as it was."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_rests_while_jax_traces_and_is_as_before_afterwards(
    enabled, fails, collector
):
    (gc.enable if enabled else gc.disable)()
    seen = []

    def traced(x):
        seen.append(gc.isenabled())
        if fails:
            raise ArithmeticError
        return x + 1

    try:
        lowered = _lower(jax.jit(traced), jnp.zeros(()))
    except ArithmeticError:
        assert fails
    else:
        assert lowered.compile()(jnp.zeros(())) == 1
    assert seen == [False]
    assert gc.isenabled() == enabled
