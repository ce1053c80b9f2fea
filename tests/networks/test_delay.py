import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from eqx_ppo.networks import Delay, Normalizer, Sequential, StatefulModule
from tests.helpers.modules import Observation
from tests.helpers.trees import assert_same


def delayed(xs, done, k_steps, initial_value):
    """A queue per environment, as plain Python."""
    outputs = np.empty_like(xs)
    for env in range(xs.shape[1]):
        queue = [initial_value] * k_steps
        for t in range(xs.shape[0]):
            queue.append(xs[t, env])
            outputs[t, env] = queue.pop(0)
            if done[t, env]:
                queue = [initial_value] * k_steps
    return outputs


def rollout(module, state, xs, done):
    outputs = []
    step, reset = jax.jit(module), jax.jit(module.reset_state)
    for x, finished in zip(xs, done, strict=True):
        out = step(state, x)
        outputs.append(out.output)
        wiped = reset(out.next_state)
        state = jax.tree.map(
            lambda a, b, f=finished: jnp.stack(
                [x if e else y for e, x, y in zip(f, a, b, strict=True)]
            ),
            wiped,
            out.next_state,
        )
    return jnp.stack(outputs), state


def test_two_steps_with_a_reset_by_hand(getkey):
    module = Delay(jnp.zeros(()), k_steps=2)
    xs = jnp.arange(1.0, 7.0, dtype=jnp.float32)[:, None]
    done = np.array([[0], [0], [1], [0], [0], [0]], bool)
    state = module.initialize_state(1, key=getkey())
    outputs, last = rollout(module, state, xs, done)
    np.testing.assert_array_equal(outputs[:, 0], [0, 0, 1, 0, 0, 4])
    sequence = jax.jit(module.unroll)(state, xs, done)
    np.testing.assert_array_equal(sequence.output[:, 0], [0, 0, 1, 0, 0, 4])
    assert_same(sequence.next_state, last)


def test_calling_twice_on_one_state_gives_the_same(getkey):
    module = Delay(jnp.zeros(()), k_steps=2)
    state = module.initialize_state(1, key=getkey())
    step = jax.jit(module)
    for x in (1.0, 2.0):
        state = step(state, jnp.array([x], jnp.float32)).next_state
    first, second = (step(state, jnp.array([x], jnp.float32)).output for x in (3.0, 30.0))
    np.testing.assert_array_equal(first, [1.0])
    np.testing.assert_array_equal(second, [1.0])


@pytest.mark.parametrize("k_steps", [1, 2, 3, 5, 13])
def test_sequences_equal_a_queue(k_steps, getkey):
    """Sequences that start mid-episode and are shorter or longer than the delay."""
    rng = np.random.default_rng(k_steps)
    n_envs = 9
    module = Delay(jnp.zeros(2, jnp.int32), k_steps, initial_value=-1.0)
    xs = rng.integers(0, 1000, (12, n_envs, 2)).astype(np.int32)
    done = rng.random((12, n_envs)) < np.linspace(0, 1, n_envs)
    expected = delayed(xs, done, k_steps, np.full(2, -1, np.int32))
    state = module.initialize_state(n_envs, key=getkey())
    unroll = jax.jit(module.unroll)
    scan = jax.jit(lambda state, xs, done: StatefulModule.unroll(module, state, xs, done))
    outputs = []
    for part in (slice(0, 3), slice(3, 4), slice(4, 12)):
        out = unroll(state, xs[part], done[part])
        assert_same(out.next_state, scan(state, xs[part], done[part]).next_state)
        outputs.append(out.output)
        state = out.next_state
    np.testing.assert_array_equal(np.concatenate(outputs), expected)


def test_leaves_keep_their_dtype_and_the_structure_of_the_input(getkey):
    sample = {
        "pixels": jax.ShapeDtypeStruct((2, 2), jnp.uint8),
        "pair": Observation(jnp.zeros(3), jnp.zeros((), jnp.bool_)),
    }
    module = Delay(sample, 1, initial_value=1)
    state = module.initialize_state(2, key=getkey())
    x = {
        "pixels": jnp.full((2, 2, 2), 250, jnp.uint8),
        "pair": Observation(jnp.full((2, 3), 0.5), jnp.array([False, True])),
    }
    step = jax.jit(module)
    first = step(state, x)
    ones = jax.tree.map(jnp.ones_like, x)
    assert_same(first.output, ones)
    assert_same(step(first.next_state, ones).output, x)
    assert isinstance(first.output["pair"], Observation)


def test_sample_may_be_numpy_and_float64():
    module = Delay(np.zeros(3), 2)
    assert module.leaves[0].dtype == jnp.float32


def test_delayed_gradients_reach_the_inputs(getkey):
    """The output at t is the input at t - 2, so its gradient is shifted as much."""
    module = Delay(jnp.zeros(()), k_steps=2)
    state = module.initialize_state(1, key=getkey())
    weights = jnp.arange(1.0, 6.0, dtype=jnp.float32)
    done = jnp.array([0, 0, 1, 0, 0], jnp.bool_)[:, None]

    def loss(xs):
        return jnp.sum(weights[:, None] * module.unroll(state, xs, done).output)

    gradient = jax.jit(jax.grad(loss))(jnp.ones((5, 1), jnp.float32))
    np.testing.assert_array_equal(gradient[:, 0], [3.0, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("k_steps", [0, -1, True])
def test_delays_below_one_are_refused(k_steps):
    with pytest.raises(ValueError, match=f"int of at least 1, got {k_steps}"):
        Delay(jnp.zeros(3), k_steps)


@pytest.mark.parametrize("k_steps", [2.0, "2", None])
def test_delays_are_integers(k_steps):
    with pytest.raises((TypeCheckError, ValueError), match="k_steps"):
        Delay(jnp.zeros(3), k_steps)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (jnp.int32, 0.5),
        (jnp.int32, float("nan")),
        (jnp.int32, float("inf")),
        (jnp.uint8, 256.0),
        (jnp.uint8, -1.0),
        (jnp.bool_, 2.0),
    ],
)
def test_initial_values_that_a_leaf_cannot_hold_are_refused(dtype, value):
    with pytest.raises(ValueError, match=f"{value}.*{jnp.dtype(dtype)}"):
        Delay(jnp.zeros(3, dtype), 1, initial_value=value)


@pytest.mark.parametrize("sequence", [False, True])
def test_wrong_inputs_are_refused(sequence, getkey):
    module = Delay({"a": jnp.zeros(3), "b": jnp.zeros((), jnp.int32)}, 2)
    state = module.initialize_state(4, key=getkey())
    lead = (5, 4) if sequence else (4,)

    def run(**leaves):
        x = {name: jnp.zeros((*lead, *shape), dtype) for name, (shape, dtype) in leaves.items()}
        if sequence:
            return jax.eval_shape(module.unroll, state, x, jnp.zeros(lead, jnp.bool_))
        return jax.eval_shape(module, state, x)

    good = {"a": ((3,), jnp.float32), "b": ((), jnp.int32)}
    run(**good)
    with pytest.raises(ValueError, match=r"`Delay`.*\[B, 3\]"):
        run(**good | {"a": ((2,), jnp.float32)})
    with pytest.raises(ValueError, match=r"int32.*float32"):
        run(**good | {"b": ((), jnp.float32)})
    with pytest.raises(ValueError, match=r"missing \[\"\['b'\]\"\]"):
        run(a=good["a"])
    with pytest.raises(ValueError, match=r"unexpected \[\"\['c'\]\"\]"):
        run(**good, c=good["a"])


def test_a_normalizer_behind_it_learns_the_delayed_signal(getkey):
    network = Sequential([Delay(jnp.zeros(1), 2), Normalizer(1)])
    state = network.initialize_state(1, key=getkey())
    xs = jnp.arange(1.0, 6.0, dtype=jnp.float32)[:, None, None]
    out = eqx.filter_jit(network.unroll)(state, xs, jnp.zeros((5, 1), jnp.bool_))
    seen = np.array([0.0, 0.0, 1.0, 2.0, 3.0])
    learned = network.update_statistics(out.rollout_extras)[1]
    np.testing.assert_allclose(learned.mean, [seen.mean()], rtol=1e-6)
    np.testing.assert_allclose(learned.std, [seen.std()], rtol=1e-6)
