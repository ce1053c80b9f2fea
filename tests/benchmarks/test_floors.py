import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from benchmarks._environments import Sizes
from benchmarks._floors import PARTS, Product, _gates, _recurrence, product_floor, products
from benchmarks._settings import Setting
from eqx_ppo.ops import linear

SIZES = Sizes(obs=3, action=1)
MLP = Setting(
    env="Pendulum",
    n_envs=8,
    rollout_length=5,
    n_epochs=2,
    n_minibatches=4,
    actor_sizes=(7,),
    critic_sizes=(11, 13),
)
LSTM = Setting(
    env="Pendulum",
    network="lstm",
    n_envs=8,
    rollout_length=5,
    n_epochs=2,
    n_minibatches=4,
    actor_sizes=(),
    critic_sizes=(),
    lstm_features=6,
)
DEEP_LSTM = dataclasses.replace(LSTM, actor_sizes=(7,), critic_sizes=(11, 13))


def total(setting: Setting, part: str) -> int:
    return sum(item.multiply_adds for item in products(setting, SIZES) if item.part == part)


def test_products_of_an_mlp_by_hand():
    # Actor 3-7-2: 35 weights; critic 3-11-13-1: 189.
    assert total(MLP, "rollout") == 8 * 5 * (35 + 189)
    assert total(MLP, "bootstrap") == 8 * 189
    # 8 updates on 10 samples: forward and weights for all, inputs for all but the first.
    later = (35 - 3 * 7) + (189 - 3 * 11)
    assert total(MLP, "update") == 8 * 10 * (2 * (35 + 189) + later)


def test_products_of_an_lstm_by_hand():
    # Each: input 3 x 24, state 6 x 24; heads 6 x 2 and 6 x 1.
    actor, critic = 72 + 144 + 12, 72 + 144 + 6
    assert total(LSTM, "rollout") == 8 * 5 * (actor + critic)
    assert total(LSTM, "bootstrap") == 8 * critic
    # 8 updates on 2 envs x 5 steps; nothing goes back into the observations.
    assert total(LSTM, "update") == 8 * 10 * (3 * (actor + critic) - 72 - 72)


def test_dense_layers_after_an_lstm_by_hand():
    # Heads 6-7-2 and 6-11-13-1 instead, each with all three products.
    added = (6 * 7 + 7 * 2) + (6 * 11 + 11 * 13 + 13) - (12 + 6)
    assert total(DEEP_LSTM, "rollout") - total(LSTM, "rollout") == 8 * 5 * added
    assert total(DEEP_LSTM, "update") - total(LSTM, "update") == 8 * 10 * 3 * added


def multiply_adds(jaxpr) -> int:
    """Of every product in a program, loops included."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, right = (variable.aval for variable in equation.invars)
            inner = 1
            for axis in contracted:
                inner *= left.shape[axis]
            count += left.size * right.size // inner
            continue
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            if isinstance(value, ClosedJaxpr):
                count += repeats * multiply_adds(value.jaxpr)
    return count


@pytest.mark.parametrize("setting", [MLP, LSTM, DEEP_LSTM], ids=["mlp", "lstm", "deep lstm"])
@pytest.mark.parametrize("part", PARTS)
def test_the_compiled_floor_does_just_these_products(setting, part):
    fn, args = product_floor(setting, SIZES, part)
    assert multiply_adds(jax.make_jaxpr(fn)(*args).jaxpr) == total(setting, part)


@pytest.mark.parametrize("part", PARTS)
def test_activations_follow_every_layer_but_the_last(part):
    """As many as the networks have hidden layers, and no product more."""
    fn, args = product_floor(MLP, SIZES, part, jnp.tanh)
    jaxpr = jax.make_jaxpr(fn)(*args)
    assert multiply_adds(jaxpr.jaxpr) == total(MLP, part)
    hidden = {"rollout": 1 + 2, "bootstrap": 2, "update": 1 + 2}[part]
    assert str(jaxpr).count("= tanh ") == hidden


def test_every_layer_multiplies_in_the_way_that_was_asked_for():
    rows = []

    def multiply(x, matrix):
        rows.append((*x.shape, matrix.shape[-1]))
        return linear(x, matrix)

    fn, args = product_floor(MLP, SIZES, "update", multiply=multiply)
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    assert sorted(rows) == [(10, 3, 7), (10, 3, 11), (10, 7, 2), (10, 11, 13), (10, 13, 1)]
    assert multiply_adds(jaxpr) == total(MLP, "update")


def test_multiply_adds_of_a_product():
    assert Product("update", rows=2, inner=3, columns=5, times=7).multiply_adds == 210


def test_the_floor_of_an_update_runs_every_update():
    fn, args = product_floor(MLP, SIZES, "update")
    weights = jax.jit(fn)(*args)
    assert jax.tree.structure(weights) == jax.tree.structure(args[0])
    assert args[1].shape == (4, 5, 2, 3)


def test_the_gradient_of_a_recurrence_is_that_of_its_steps():
    keys = jax.random.split(jax.random.key(0), 3)
    projected = jax.random.normal(keys[0], (5, 2, 12))
    recurrent, weights = jax.random.normal(keys[1], (3, 12)), jax.random.normal(keys[2], (5, 2, 3))

    def scanned(projected, recurrent):
        def step(carry, one):
            carry, _ = _gates(carry, one, recurrent)
            return carry, carry[0]

        return jax.lax.scan(step, (jnp.zeros((2, 3)), jnp.zeros((2, 3))), projected)[1]

    def gradient(hidden_states):
        size = lambda *args: jnp.sum(weights * hidden_states(*args))  # noqa: E731
        return jax.grad(size, (0, 1))(projected, recurrent)

    pairs = zip(gradient(_recurrence), gradient(scanned), strict=True)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, atol=1e-5)
