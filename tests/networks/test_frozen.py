import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    Constant,
    Container,
    Dense,
    Frozen,
    Normalizer,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
    Statistics,
    trainable,
)


class Count(Statistics):
    value: jax.Array


class Forgetful(StatefulModule):
    """Holds statistics and does not say how they are updated."""

    count: Count

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state)


class Wrapper(StatefulModule):
    """Holds another module and forgets to route its extras."""

    inner: StatefulModule

    def __call__(self, state, x, rollout_extras=None):
        return self.inner(state, x, rollout_extras)


class Routed(Container):
    def __init__(self, inner):
        super().__init__({"inner": inner})

    def wire(self, call, x):
        return call("inner", x)


class Everything(eqx.Module):
    weight: jax.Array
    integer: jax.Array
    flag: jax.Array
    number: float
    function: object
    nothing: None
    table: Constant
    frozen: Frozen


def everything():
    class Own(Frozen):
        array: jax.Array
        nested: Dense

    return Everything(
        weight=jnp.ones(2),
        integer=jnp.ones(2, jnp.int32),
        flag=jnp.ones(2, jnp.bool_),
        number=1.5,
        function=jnp.tanh,
        nothing=None,
        table=Constant({"a": jnp.ones(3), "b": [jnp.zeros(1)]}),
        frozen=Own(jnp.ones(4), Dense(2, 2, key=jax.random.key(0))),
    )


def test_only_floating_arrays_outside_frozen_nodes_are_trained():
    tree = everything()
    mask = trainable(tree)
    assert jax.tree.structure(mask) == jax.tree.structure(tree)
    assert mask.weight is True
    assert jax.tree.leaves(mask).count(True) == 1
    params = eqx.filter(tree, mask)
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [(2,)]


def test_the_mask_partitions_and_combines():
    tree = everything()
    params, rest = eqx.partition(tree, trainable(tree))
    whole = eqx.combine(params, rest)
    assert jax.tree.structure(whole) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(tree), strict=True):
        assert a is b


def test_a_frozen_node_at_the_root_is_frozen():
    assert jax.tree.leaves(trainable(Constant(jnp.ones(3)))) == [False]
    assert jax.tree.leaves(trainable(jnp.ones(3))) == [True]


def test_a_network_trains_its_layers_and_not_its_statistics(getkey):
    network = Sequential([Normalizer({"a": 2}), Dense(2, 3, key=getkey())])
    mask = trainable(network)
    assert jax.tree.leaves(mask[1]) == [True, True]
    assert not any(jax.tree.leaves(mask[0]))


@pytest.mark.parametrize(
    "module",
    [Forgetful(Count(jnp.zeros(2))), Wrapper(Normalizer(2)), Wrapper(Routed(Normalizer(2)))],
)
def test_statistics_that_nobody_updates_are_an_error(module):
    with pytest.raises(NotImplementedError, match=f"`{type(module).__name__}` holds `Statistics`"):
        module.update_statistics(None)


def test_the_error_says_where_in_the_network():
    network = Sequential([Routed(Forgetful(Count(jnp.zeros(2))))])
    with pytest.raises(NotImplementedError, match="override") as info:
        network.update_statistics([{"inner": None}])
    assert any("network.layers[0]['inner']" in note for note in info.value.__notes__)


def test_modules_without_statistics_are_returned_as_they_are(getkey):
    for module in (Dense(2, 2, key=getkey()), Wrapper(Dense(2, 2, key=getkey()))):
        assert module.update_statistics(None) is module


def test_a_constant_table_needs_no_update(getkey):
    class Masked(StatefulModule):
        mask: Constant

        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(x * self.mask.value, state)

    module = Masked(Constant(jnp.ones((1, 2))))
    assert module.update_statistics(None) is module


def test_a_container_routes_what_a_wrapper_forgets():
    updated = Routed(Normalizer(1)).update_statistics({"inner": jnp.full((2, 2, 1), 3.0)})
    np.testing.assert_array_equal(updated["inner"].mean, [3.0])
