"""The bases: default hooks, checks of user subclasses, random state, keys."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError

from eqx_ppo.networks import (
    GRU,
    LSTM,
    Dense,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    RandomState,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
    StatelessModule,
    advance,
    draw_keys,
    make_mlp,
    make_mlp_actor_critic,
    make_mlp_layers,
    make_recurrent_actor_critic,
)
from tests.helpers.modules import CountUp, Noise
from tests.helpers.trees import assert_same


class Plain(StatefulModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state)


class Typed(StatefulModule):
    """A user's layer with a shape contract of its own."""

    weight: Float[Array, " features"]

    def __call__(self, state, x: Float[Array, "B features"], rollout_extras=None):
        return StatefulModuleOutput(x * self.weight[None], state)

    def scale(self, factor: Float[Array, ""]) -> Float[Array, " features"]:
        return self.weight * factor


# --- Default hooks ------------------------------------------------------------------------


def test_a_module_without_carry_needs_one_method(getkey):
    module = Plain()
    assert module.initialize_state(3, key=getkey()) == ()
    assert module.reset_state(()) == ()
    assert module.update_statistics(None) is module
    xs = jnp.arange(12.0).reshape(2, 3, 2)
    out = module.unroll((), xs, jnp.zeros((2, 3), jnp.bool_))
    np.testing.assert_array_equal(out.output, xs)
    assert out.next_state == ()
    assert out.regularization_loss is out.metrics is out.rollout_extras is None


def test_the_output_fields_come_in_the_order_of_the_contract():
    assert StatefulModuleOutput._fields == (
        "output",
        "next_state",
        "rollout_extras",
        "regularization_loss",
        "metrics",
    )
    out = StatefulModuleOutput(1, 2)
    assert out[2:] == (None, None, None)


def test_a_module_must_be_callable():
    class Nothing(StatefulModule):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


def test_the_default_unroll_resets_after_the_step_that_ends():
    """Starts at 7: 7, 8, then 0, 1, and 2 as the carry. Other orders give other numbers."""
    xs = jnp.zeros((4, 1, 1), jnp.float32)
    done = jnp.array([[False], [True], [False], [False]])
    out = CountUp().unroll(jnp.array([7], jnp.int32), xs, done)
    np.testing.assert_array_equal(out.output["count"][:, 0], [7, 8, 0, 1])
    np.testing.assert_array_equal(out.next_state, [2])
    done = jnp.array([[True], [False], [False], [True]])
    out = CountUp().unroll(jnp.array([7], jnp.int32), xs, done)
    np.testing.assert_array_equal(out.output["count"][:, 0], [7, 0, 1, 2])
    np.testing.assert_array_equal(out.next_state, [0])


def test_the_default_unroll_hands_each_step_its_extras():
    class Echo(StatefulModule):
        def __call__(self, state, x, rollout_extras=None):
            value = -x if rollout_extras is None else rollout_extras
            return StatefulModuleOutput(value, state, value)

    xs = jnp.arange(6.0).reshape(3, 2)
    done = jnp.zeros((3, 2), jnp.bool_)
    np.testing.assert_array_equal(Echo().unroll((), xs, done).output, -xs)
    np.testing.assert_array_equal(Echo().unroll((), xs, done, 10 + xs).output, 10 + xs)


def test_a_stateless_module_sees_a_sequence_as_one_batch():
    shapes = []

    class Spy(StatelessModule):
        def __call__(self, state, x, rollout_extras=None):
            shapes.append((x["a"].shape, rollout_extras.shape))
            penalty = x["a"][:, 0]
            return StatefulModuleOutput(x, state, rollout_extras, penalty, {"m": penalty})

    xs = {"a": jnp.arange(12.0).reshape(2, 3, 2), "flag": jnp.ones((2, 3), jnp.bool_)}
    extras = jnp.arange(6.0).reshape(2, 3, 1)
    out = Spy().unroll((), xs, jnp.zeros((2, 3), jnp.bool_), extras)
    assert shapes == [((6, 2), (6, 1))]
    assert_same(out.output, xs)
    np.testing.assert_array_equal(out.rollout_extras, extras)
    np.testing.assert_array_equal(out.regularization_loss, xs["a"][:, :, 0])
    np.testing.assert_array_equal(out.metrics["m"], xs["a"][:, :, 0])


# --- Checks of user subclasses ------------------------------------------------------------


def test_annotated_methods_of_a_user_are_checked():
    module = Typed(jnp.ones(3))
    np.testing.assert_array_equal(module((), jnp.ones((2, 3))).output, np.ones((2, 3)))
    with pytest.raises(TypeCheckError, match="expected `x`"):
        module((), jnp.ones((2, 3, 1)))
    with pytest.raises(TypeCheckError, match="expected `x`"):
        module((), jnp.ones((2, 3), jnp.int32))
    with pytest.raises(TypeCheckError, match="factor"):
        module.scale(jnp.ones(2))


def test_they_are_checked_under_jit_grad_and_vmap():
    module = Typed(jnp.ones(3))
    wrong = jnp.ones((2, 3, 1))
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeCheckError, match="expected `x`"):
            transform(lambda x: module((), x).output.sum())(
                wrong[None] if transform is jax.vmap else wrong
            )


def test_a_method_may_be_inherited_overridden_and_use_self():
    class Scaled(Typed):
        def __call__(self, state, x: Float[Array, "B features"], rollout_extras=None):
            out = super().__call__(state, x, rollout_extras)
            return out._replace(output=2.0 * out.output)

    np.testing.assert_array_equal(
        Scaled(jnp.ones(3))((), jnp.ones((2, 3))).output, np.full((2, 3), 2)
    )
    with pytest.raises(TypeCheckError, match="expected `x`"):
        Scaled(jnp.ones(3))((), jnp.ones(3))


def test_an_int_may_stand_for_a_float():
    assert NormalTanhSampler(entropy_weight=0, min_std=1).min_std == 1


# --- Randomness ---------------------------------------------------------------------------


def test_draws_are_folded_into_the_key_of_each_environment(getkey):
    state = RandomState(jax.random.split(getkey(), 3), jnp.array([0, 5, 9], jnp.uint32))
    pairs = zip(state.keys, (0, 5, 9), strict=True)
    expected = [jax.random.key_data(jax.random.fold_in(key, draws)) for key, draws in pairs]
    np.testing.assert_array_equal(jax.random.key_data(draw_keys(state)), np.stack(expected))
    after = advance(state)
    np.testing.assert_array_equal(after.draws, [1, 6, 10])
    assert after.draws.dtype == jnp.uint32
    assert after.keys is state.keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_noise_is_the_same_alone_in_a_batch_and_in_a_sequence(impl):
    """Not so for `rbg` keys as they are: under `vmap` they depend on the whole batch."""
    module = Noise(2)
    state = module.initialize_state(3, key=jax.random.key(5, impl=impl))
    xs = jnp.zeros((4, 3, 2), jnp.float32)
    done = jnp.zeros((4, 3), jnp.bool_)
    noise = module.unroll(state, xs, done).output
    scanned = StatefulModule.unroll(module, state, xs, done).output
    np.testing.assert_allclose(scanned, noise, rtol=1e-5, atol=1e-6)
    alone = jax.tree.map(lambda leaf: leaf[1:2], state)
    got = module(alone, xs[0, :1]).output
    np.testing.assert_allclose(got, noise[0, 1:2], rtol=1e-5, atol=1e-6)
    assert len(np.unique(noise)) == noise.size


# --- Keys at the boundary -----------------------------------------------------------------

CONSTRUCTORS = {
    "dense": lambda key: Dense(3, 2, key=key),
    "lstm": lambda key: LSTM(3, 4, key=key),
    "gru": lambda key: GRU(3, 4, key=key),
    "mlp_layers": lambda key: make_mlp_layers((3, 2), key=key),
    "mlp": lambda key: make_mlp((3, 2), key=key),
    "actor_critic": lambda key: make_mlp_actor_critic(3, 2, (4,), (4,), key=key),
    "recurrent": lambda key: make_recurrent_actor_critic(3, 2, 4, key=key),
}


def sampler():
    return NormalTanhSampler(entropy_weight=0.0)


def states():
    dense = Dense(2, 1, key=jax.random.key(0))
    return {
        "sampler": sampler(),
        "sequential": Sequential([sampler(), dense]),
        "parallel": Parallel(a=Plain(), b=sampler()),
        "adapter": PPOAdapter(action=sampler(), value=dense),
        "stateless_network": Sequential([dense]),
    }


TAKES_KEY = {
    **CONSTRUCTORS,
    **{
        f"state_of_{name}": lambda key, module=module: module.initialize_state(3, key=key)
        for name, module in states().items()
    },
}


@pytest.mark.parametrize("name", TAKES_KEY)
def test_typed_and_raw_keys_are_the_same(name):
    typed, raw = jax.random.key(3), jax.random.PRNGKey(3)
    got, expected = (jax.tree.leaves(TAKES_KEY[name](key)) for key in (raw, typed))
    arrays = [[leaf for leaf in leaves if eqx.is_array(leaf)] for leaves in (got, expected)]
    assert_same(*arrays)


@pytest.mark.parametrize("name", ["dense", "lstm", "gru", "state_of_adapter"])
def test_rbg_keys_are_taken_typed_and_raw(name):
    typed, raw = jax.random.key(3, impl="rbg"), jax.random.PRNGKey(3, impl="rbg")
    got, expected = (
        [leaf for leaf in jax.tree.leaves(TAKES_KEY[name](key)) if eqx.is_array(leaf)]
        for key in (raw, typed)
    )
    assert_same(got, expected)


@pytest.mark.parametrize("name", TAKES_KEY)
@pytest.mark.parametrize(
    ("key", "named"),
    [(0, "`0` of type `int`"), ("batch", r"batch of keys of shape \(2,\)"), (None, "`None`")],
)
def test_anything_else_is_refused(name, key, named):
    key = jax.random.split(jax.random.key(0)) if key == "batch" else key
    with pytest.raises(TypeError, match=f"`key` must be one PRNG key.*{named}"):
        TAKES_KEY[name](key)
