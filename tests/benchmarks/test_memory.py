import dataclasses

import jax
import jax.numpy as jnp

from benchmarks._environments import Sizes
from benchmarks._memory import compiled_bytes, needed_bytes, peak_resident_bytes, tree_bytes
from benchmarks._settings import Setting

SIZES = Sizes(obs=3, action=2)
SETTING = Setting(
    env="Pendulum",
    n_envs=8,
    rollout_length=5,
    n_minibatches=4,
    actor_sizes=(7,),
    critic_sizes=(11,),
)


def test_needed_bytes_by_hand():
    needed = needed_bytes(SETTING, SIZES)
    # 3 observed, 2 raw actions, log-likelihood, reward, value, next value; two flags.
    assert needed.rollout == 8 * 5 * (4 * (3 + 2 + 4) + 2)
    # Outputs 7 and 4 of the actor, 11 and 1 of the critic, for 10 samples.
    assert needed.activations == 4 * 10 * (7 + 4 + 11 + 1)
    # Kernels and biases: 4 x 7, 8 x 4, 4 x 11, 12 x 1; with gradient and two moments.
    assert needed.weights == 16 * (28 + 32 + 44 + 12)
    assert needed.total == needed.rollout + needed.activations + needed.weights


def test_needed_bytes_grow_with_the_environments():
    twice = needed_bytes(dataclasses.replace(SETTING, n_envs=16), SIZES)
    once = needed_bytes(SETTING, SIZES)
    assert twice.rollout == 2 * once.rollout
    assert twice.activations == 2 * once.activations
    assert twice.weights == once.weights


def test_compiled_bytes_by_hand():
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    plain = compiled_bytes(lambda x: x + 1.0, x)
    assert (plain.arguments, plain.results, plain.total) == (4000, 4000, 8000)
    donated = compiled_bytes(lambda x: x + 1.0, x, donate=(0,))
    assert donated.total == 4000


def test_tree_bytes_leaves_out_keys():
    tree = {"a": jnp.zeros((2, 3), jnp.float32), "b": jnp.zeros(5, jnp.bool_)}
    assert tree_bytes(tree) == 29
    assert tree_bytes([tree, jax.random.key(0)]) == 29


def test_resident_bytes_are_bytes():
    assert 5e7 < peak_resident_bytes() < 1e12
