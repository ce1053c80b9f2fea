import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    Dense,
    Lift,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    PPONetworkOutput,
    Sample,
    Sequential,
    StatefulModuleOutput,
    StatelessModule,
)


class Values(StatelessModule):
    """The value port of a test: the first `size` features, or the first one without axis."""

    size: int | None

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x[:, 0] if self.size is None else x[:, : self.size], state)


class Fixed(StatelessModule):
    """An action port without randomness."""

    output: object

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(self.output(x), state)


def sample(x):
    return Sample(x, x[:, 1])


def run(network, x, sequence):
    state = network.initialize_state(x.shape[-2], key=jax.random.key(0))
    if not sequence:
        return network(state, x).output
    return network.unroll(state, x, jnp.zeros(x.shape[:2], jnp.bool_)).output


LEADS = pytest.mark.parametrize("lead", [(4,), (1,), (3, 4), (3, 1), (1, 1)])


def inputs(lead):
    size = int(np.prod(lead)) * 3
    return jnp.arange(float(size), dtype=jnp.float32).reshape(*lead, 3)


@LEADS
@pytest.mark.parametrize("size", [1, None])
def test_values_of_one_column_or_none_become_one_number_per_environment(lead, size):
    """Also for one environment, where [1, 1] and [1] are easily taken for each other."""
    network = PPOAdapter(action=Fixed(sample), value=Values(size))
    x = inputs(lead)
    out = run(network, x, sequence=len(lead) == 2)
    assert isinstance(out, PPONetworkOutput)
    np.testing.assert_array_equal(out.value_estimates, x[..., 0])
    np.testing.assert_array_equal(out.actions, x)
    np.testing.assert_array_equal(out.log_likelihoods, x[..., 1])


@LEADS
def test_values_of_two_columns_are_refused(lead):
    network = PPOAdapter(action=Fixed(sample), value=Values(2))
    with pytest.raises(ValueError, match=r"\[B, 1\] or \[B\] per reward, but got \[\d+, 2\]"):
        run(network, inputs(lead), sequence=len(lead) == 2)


def test_values_of_three_axes_are_refused():
    network = PPOAdapter(action=Fixed(sample), value=Lift(lambda x: x[None, :1]))
    with pytest.raises(ValueError, match=r"but got \[4, 1, 1\]"):
        run(network, inputs((4,)), sequence=False)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_values_are_float32(dtype):
    network = PPOAdapter(action=Fixed(sample), value=Lift(lambda x: x[:1].astype(dtype)))
    assert run(network, inputs((4,)), sequence=False).value_estimates.dtype == jnp.float32


@LEADS
def test_trees_of_samples_and_values_keep_their_structure(lead):
    def samples(x):
        return {"arm": sample(x), "legs": (sample(2 * x), [sample(3 * x)])}

    network = PPOAdapter(
        action=Fixed(samples), value=Parallel(speed=Values(1), energy=Values(None))
    )
    x = inputs(lead)
    out = run(network, x, sequence=len(lead) == 2)
    np.testing.assert_array_equal(out.actions["arm"], x)
    np.testing.assert_array_equal(out.actions["legs"][0], 2 * x)
    np.testing.assert_array_equal(out.actions["legs"][1][0], 3 * x)
    np.testing.assert_array_equal(out.log_likelihoods["legs"][1][0], 3 * x[..., 1])
    assert set(out.value_estimates) == {"speed", "energy"}
    for values in out.value_estimates.values():
        np.testing.assert_array_equal(values, x[..., 0])


def test_both_ports_see_the_same_input_and_only_theirs_is_routed(getkey):
    sampler = NormalTanhSampler(entropy_weight=0.5)
    network = PPOAdapter(
        action=Sequential([Dense(3, 4, key=getkey()), sampler]), value=Dense(3, 1, key=getkey())
    )
    state = network.initialize_state(4, key=getkey())
    x = inputs((4,)) / 10
    out = eqx.filter_jit(network)(state, x)
    direct = eqx.filter_jit(network.action)(state["action"], x)
    np.testing.assert_allclose(out.output.actions, direct.output.action, rtol=1e-6)
    value = network.value((), x).output[:, 0]
    np.testing.assert_allclose(out.output.value_estimates, value, rtol=1e-6)
    np.testing.assert_allclose(out.regularization_loss, direct.regularization_loss, rtol=1e-6)
    assert out.rollout_extras["value"] is None
    np.testing.assert_allclose(out.rollout_extras["action"][1], direct.rollout_extras[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (lambda x: x, "ArrayImpl"),
        (lambda x: {"arm": sample(x), "leg": x}, "ArrayImpl"),
        (lambda x: (x, x[:, 0]), "ArrayImpl"),
    ],
)
def test_an_action_port_without_sampler_is_refused(output, named):
    network = PPOAdapter(action=Fixed(output), value=Values(1))
    with pytest.raises(TypeError, match=f"must output a `Sample`.*`{named}`.*NormalTanhSampler"):
        run(network, inputs((4,)), sequence=False)


def test_errors_name_the_port(getkey):
    network = PPOAdapter(action=Fixed(sample), value=Dense(5, 1, key=getkey()))
    with pytest.raises(ValueError, match="`Dense` expected") as info:
        run(network, inputs((4,)), sequence=False)
    assert any("network.value`" in note for note in info.value.__notes__)


def test_a_log_likelihood_per_action_feature_is_refused():
    def sample(x):
        return Sample(x, x[:1])

    adapter = PPOAdapter(action=Lift(sample), value=Lift(lambda x: x[0]))
    state = adapter.initialize_state(4, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"\[B\], but gave \[4, 1\]"):
        adapter(state, jnp.zeros((4, 3)))
