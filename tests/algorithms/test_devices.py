"""Case J1: the environments of one run, spread over several devices, train as on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.algorithms.common import compiled, small_config
from tests.helpers.networks import CASES

assert len(jax.devices()) == 2
case = CASES["normalizer_on_top"]
mesh = Mesh(np.array(jax.devices()), ("envs",))
whole, by_env = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("envs",)))


def placed(state):
    # Leaves with an axis of environments are split, everything else is copied.
    def place(leaf):
        has_envs = leaf.ndim > 0 and leaf.shape[0] == 4
        return jax.device_put(leaf, by_env if has_envs else whole)

    rollout = jax.tree.map(place, state.rollout_state)
    rest = jax.tree.map(lambda leaf: jax.device_put(leaf, whole), state)
    return eqx.tree_at(lambda state: state.rollout_state, rest, rollout)


config = small_config(learning_rate=1e-2)
assert config.n_envs == 4
network = case.build(jax.random.key(0))
start, step = compiled(case.env, network, config)
single, several = start(jax.random.key(1)), placed(start(jax.random.key(1)))
assert len(several.rollout_state.fresh.sharding.device_set) == 2
for _ in range(2):
    single, expected = step(single)
    several, got = step(several)
for name, value in expected.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
for one, two in zip(single.arrays, several.arrays, strict=True):
    if one is not None:
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
assert np.isfinite(got["losses/total"])
print("equal")
"""


@pytest.mark.slow
def test_two_devices_equal_one():
    """Statistics, advantage moments and losses are those of all environments."""
    root = Path(__file__).parents[2]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
