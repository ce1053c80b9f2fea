import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    GRU,
    LSTM,
    AffineSampler,
    BetaSampler,
    CategoricalSampler,
    Dense,
    MultiCategoricalSampler,
    Normalizer,
    NormalSampler,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
    make_mlp,
    make_mlp_actor_critic,
    make_mlp_layers,
    make_recurrent_actor_critic,
)


def sizes(layers):
    dense = [layer for layer in layers if isinstance(layer, Dense)]
    return [dense[0].in_features, *(layer.out_features for layer in dense)]


def activations(layers):
    return [layer.activation for layer in layers if isinstance(layer, Dense)]


def test_mlp_layers(getkey):
    layers = make_mlp_layers((3, 4, 5, 2), activation=jnp.tanh, key=getkey())
    assert sizes(layers) == [3, 4, 5, 2]
    assert activations(layers) == [jnp.tanh] * 3
    linear = make_mlp_layers((3, 4, 2), activation_last_layer=False, key=getkey())
    assert activations(linear) == [jax.nn.swish, None]


def test_mlp_equals_numpy(getkey):
    network = make_mlp((3, 4, 2), activation=jnp.tanh, activation_last_layer=False, key=getkey())
    assert isinstance(network, Sequential)
    x = np.random.default_rng(0).normal(size=(5, 3))
    first, second = (np.float64(layer.kernel) for layer in network.layers)
    state = network.initialize_state(5, key=getkey())
    got = network(state, jnp.asarray(x, jnp.float32)).output
    np.testing.assert_allclose(got, np.tanh(x @ first) @ second, rtol=1e-4, atol=1e-6)


def test_layers_differ_and_initializers_are_used(getkey):
    equal = make_mlp_layers((4, 4, 4), key=getkey())
    assert (equal[0].kernel != equal[1].kernel).all()
    init = jax.nn.initializers
    layers = make_mlp_layers((3, 4, 4), kernel_init=init.ones, key=getkey())
    assert all((layer.kernel == 1).all() for layer in layers)
    layers = make_mlp_layers((3, 4, 4), last_kernel_init=init.zeros, key=getkey())
    assert not layers[-1].kernel.any()
    assert layers[0].kernel.all()


@pytest.mark.parametrize("few", [(), (3,)])
def test_too_few_sizes_are_refused(few, getkey):
    with pytest.raises(
        ValueError, match=rf"at least an input and an output.*{list(few)}".replace("[", r"\[")
    ):
        make_mlp_layers(few, key=getkey())


def test_actor_critic_has_the_standard_structure(getkey):
    network = make_mlp_actor_critic(7, 2, (8, 6), (5,), activation=jnp.tanh, key=getkey())
    normalizer, adapter = network.layers
    assert isinstance(normalizer, Normalizer)
    assert normalizer.shape == (7,)
    assert isinstance(adapter, PPOAdapter)
    assert sizes(adapter.action.layers) == [7, 8, 6, 4]
    assert activations(adapter.action.layers) == [jnp.tanh, jnp.tanh, None]
    sampler = adapter.action[-1]
    assert isinstance(sampler, NormalTanhSampler)
    assert (sampler.entropy_weight, sampler.min_std, sampler.std_scale) == (1e-2, 0.1, 1.0)
    assert sizes(adapter.value.layers) == [7, 5, 1]
    assert activations(adapter.value.layers) == [jnp.tanh, None]


def test_hidden_layers_are_optional_and_so_is_the_normalizer(getkey):
    network = make_mlp_actor_critic(3, 1, (), (), normalize_obs=False, key=getkey())
    (adapter,) = network.layers
    assert sizes(adapter.action.layers) == [3, 2]
    assert sizes(adapter.value.layers) == [3, 1]


def test_a_sampler_of_ones_own_is_used(getkey):
    sampler = NormalTanhSampler(entropy_weight=0.5, min_std=0.3)
    for network in (
        make_mlp_actor_critic(3, 1, (4,), (4,), sampler=sampler, key=getkey()),
        make_recurrent_actor_critic(3, 1, 4, sampler=sampler, key=getkey()),
    ):
        assert network[1].action[-1] is sampler


SAMPLERS = {  # the action size, the outputs of the last layer, the shape and type of an action
    "normal": (NormalSampler(2, entropy_weight=0.0), 2, 2, (2,), jnp.float32),
    "beta": (BetaSampler(entropy_weight=0.0), 2, 4, (2,), jnp.float32),
    "affine": (
        AffineSampler(NormalTanhSampler(entropy_weight=0.0), [-1, -2], [1, 2]),
        2,
        4,
        (2,),
        jnp.float32,
    ),
    "categorical": (CategoricalSampler(5, entropy_weight=0.0), 1, 5, (), jnp.int32),
    "multi_categorical": (
        MultiCategoricalSampler((5, 2), entropy_weight=0.0),
        2,
        7,
        (2,),
        jnp.int32,
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_last_actor_layer_fits_the_sampler(name, getkey):
    sampler, action_size, n_outputs, shape, dtype = SAMPLERS[name]
    for network in (
        make_mlp_actor_critic(3, action_size, (4,), (4,), sampler=sampler, key=getkey()),
        make_recurrent_actor_critic(3, action_size, 4, sampler=sampler, key=getkey()),
    ):
        assert network[1].action[-1] is sampler
        assert network[1].action[-2].out_features == n_outputs
        state = network.initialize_state(6, key=getkey())
        actions = eqx.filter_eval_shape(network, state, jnp.ones((6, 3))).output.actions
        assert actions.shape == (6, *shape)
        assert actions.dtype == dtype


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "beta"])
def test_a_sampler_for_another_action_size_is_refused(name, getkey):
    sampler, action_size, *_ = SAMPLERS[name]
    message = f"actions of size {action_size}.*`action_size` is 5"
    with pytest.raises(ValueError, match=message):
        make_mlp_actor_critic(3, 5, (4,), (4,), sampler=sampler, key=getkey())
    with pytest.raises(ValueError, match=message):
        make_recurrent_actor_critic(3, 5, 4, sampler=sampler, key=getkey())


def test_the_last_actor_layer_is_small_and_the_critic_is_not(getkey):
    """A hundredth of LeCun's bound, sqrt(3 / in)."""
    network = make_mlp_actor_critic(48, 20, (48,), (48,), key=getkey())
    last_actor = np.abs(network[1].action[1].kernel)
    bound = np.sqrt(3 / 48)
    assert 0.0099 * bound < last_actor.max() <= 0.01 * bound * (1 + 1e-6)
    for layer in (network[1].action[0], network[1].value[0], network[1].value[1]):
        assert 0.9 * bound < np.abs(layer.kernel).max() <= bound * (1 + 1e-6)
    recurrent = make_recurrent_actor_critic(3, 20, 4, key=getkey())
    assert np.abs(recurrent[1].action[1].kernel).max() <= 0.01 * np.sqrt(3 / 4) * (1 + 1e-6)


def test_first_actions_are_near_zero_with_equal_deviations(getkey):
    network = make_mlp_actor_critic(6, 3, (4,), (4,), key=getkey())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 6)), jnp.float32)
    out = eqx.filter_jit(network)(network.initialize_state(50, key=getkey()), 10 * x)
    metrics = out.metrics["1"]["action"]["2"]
    assert np.abs(metrics["mean"]).max() < 0.05
    np.testing.assert_allclose(metrics["std"], np.log(2) + 0.1, atol=0.03)


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_recurrent_actor_critic_has_the_standard_structure(cell, getkey):
    network = make_recurrent_actor_critic(
        7,
        2,
        4,
        cell=cell,
        actor_hidden_sizes=(6,),
        critic_hidden_sizes=(5, 3),
        activation=jnp.tanh,
        trainable_initial_state=True,
        key=getkey(),
    )
    normalizer, adapter = network.layers
    assert normalizer.shape == (7,)
    for port in (adapter.action, adapter.value):
        assert type(port[0]) is cell
        assert (port[0].in_features, port[0].hidden_features) == (7, 4)
        assert port[0].initial_state is not None
    assert sizes(adapter.action.layers) == [4, 6, 4]
    assert sizes(adapter.value.layers) == [4, 5, 3, 1]
    assert activations(adapter.action.layers) == [jnp.tanh, None]
    assert activations(adapter.value.layers) == [jnp.tanh, jnp.tanh, None]
    actor, critic = (port[0].cell.weight_ih for port in (adapter.action, adapter.value))
    assert np.abs(actor - critic).max() > 1e-3


def test_recurrent_defaults(getkey):
    network = make_recurrent_actor_critic(3, 1, 4, normalize_obs=False, key=getkey())
    (adapter,) = network.layers
    assert [type(layer) for layer in adapter.action.layers] == [LSTM, Dense, NormalTanhSampler]
    assert [type(layer) for layer in adapter.value.layers] == [LSTM, Dense]
    assert adapter.action[0].initial_state is None


@pytest.mark.parametrize(
    "build",
    [
        lambda key: make_mlp_actor_critic(3, 2, (4,), (4,), key=key),
        lambda key: make_recurrent_actor_critic(3, 2, 4, key=key),
    ],
)
def test_outputs_have_the_sizes_of_the_task(build, getkey):
    network = build(getkey())
    for batch in (1, 5):
        state = network.initialize_state(batch, key=getkey())
        out = eqx.filter_eval_shape(network, state, jnp.ones((batch, 3))).output
        assert out.actions.shape == (batch, 2)
        assert out.log_likelihoods.shape == out.value_estimates.shape == (batch,)


def test_one_key_gives_one_network_and_actor_and_critic_differ(getkey):
    key = getkey()
    first, again, other = (
        make_mlp_actor_critic(3, 1, (4,), (4,), key=k) for k in (key, key, getkey())
    )
    kernels = [network[1].action[0].kernel for network in (first, again, other)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).all()
    assert (first[1].action[0].kernel != first[1].value[0].kernel).all()


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, x):
        return jnp.tanh(x)


class Scaled(eqx.Module):
    """An activation with a NumPy constant."""

    scale: np.ndarray

    def __call__(self, x):
        return jnp.float32(self.scale) * jnp.tanh(x)


MAKERS = {
    "mlp": lambda **options: make_mlp_actor_critic(3, 2, [4, 5], [6], **options),
    "recurrent": lambda **options: make_recurrent_actor_critic(
        3, 2, 7, actor_hidden_sizes=[4, 5], critic_hidden_sizes=[6], **options
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("activation", [Unhashable(), Scaled(np.array(2.0)), lambda x: x * x])
def test_any_function_is_an_activation_and_stays_as_it_is(make, activation, getkey):
    network = make(activation=activation, key=getkey())
    dense = [
        layer
        for layer in jax.tree.leaves(network, is_leaf=lambda x: isinstance(x, Dense))
        if isinstance(layer, Dense)
    ]
    first, second, last, critic, value = (layer.activation for layer in dense)
    assert last is value is None
    for used in (first, second, critic):
        if isinstance(activation, Scaled):
            assert used.scale is activation.scale
        else:
            assert used is activation


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_weights_are_the_same_under_any_transformation(make, getkey):
    key = getkey()
    network = eqx.filter(make(key=key), eqx.is_array)
    with jax.disable_jit():
        op_by_op = eqx.filter(make(key=key), eqx.is_array)
    mapped = eqx.filter_vmap(lambda key: eqx.filter(make(key=key), eqx.is_array))(key[None])
    first = jax.tree.map(lambda leaf: leaf[0], mapped)
    compiled = eqx.filter_jit(lambda key: eqx.filter(make(key=key), eqx.is_array))(key)
    for other in (op_by_op, first, compiled):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), network, other
        )


def test_weights_are_those_of_make_mlp_layers(getkey):
    key = getkey()
    network = make_mlp_actor_critic(3, 2, [4], [6], key=key)
    kernels = [leaf for leaf in jax.tree.leaves(network) if eqx.is_array(leaf) and leaf.ndim == 2]
    _, critic_key = jax.random.split(key)
    critic = make_mlp_layers([3, 6, 1], key=critic_key)
    for got, expected in zip(kernels[-2:], critic, strict=True):
        np.testing.assert_allclose(got, expected.kernel, rtol=1e-6)
