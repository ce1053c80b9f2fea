"""What containers refuse: states that drift, statistics out of reach, parameters in `local`."""

from typing import Self, final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import networks as nets
from eqx_ppo.networks import StatefulModuleOutput

KEY = jax.random.key(0)
X = jnp.ones((4, 3))
DONE = jnp.zeros((2, 4), bool)


@final
class Drifting(nets.StatefulModule):
    """Its next or its reset state is made from the old one by a function."""

    after_step: object
    after_reset: object

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, self.after_step(state))

    def initialize_state(self, batch_size, *, key):
        return {"count": jnp.zeros((batch_size, 2), jnp.int32)}

    def reset_state(self, prev_state):
        return self.after_reset(prev_state)


def same(state):
    return state


DRIFTS = {
    "dtype": (lambda s: {"count": s["count"].astype(jnp.float32)}, r"int32\[4, 2\].*float32"),
    "shape": (lambda s: {"count": s["count"][:, :1]}, r"int32\[4, 2\].*int32\[4, 1\]"),
    "structure": (lambda s: {"count": s["count"], "more": s["count"]}, "must have the structure"),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_a_next_state_that_drifts_is_named_with_its_place(name):
    change, message = DRIFTS[name]
    module = nets.Sequential([nets.Scale(1.0), Drifting(change, same)])
    state = module.initialize_state(4, key=KEY)
    with pytest.raises(ValueError, match="(?s)`next_state`.*" + message) as caught:
        module(state, X)
    assert "network.layers[1]" in caught.value.__notes__[-1]


@pytest.mark.parametrize("name", DRIFTS)
def test_a_reset_state_that_drifts_is_named_with_its_place(name):
    change, message = DRIFTS[name]
    module = nets.Sequential([nets.Scale(1.0), Drifting(same, change)])
    state = module.initialize_state(4, key=KEY)
    with pytest.raises(ValueError, match="(?s)`reset_state`.*" + message) as caught:
        module.reset_state(state)
    assert "network.layers[1]" in caught.value.__notes__[-1]


class Hidden(nets.Container):
    """Holds a normalizer in a field, out of reach of the routing."""

    norm: nets.Normalizer

    def __init__(self):
        super().__init__({"inner": nets.Scale(1.0)})
        self.norm = nets.Normalizer(3)

    def wire(self, call, x):
        return call("inner", x)


@final
class Routed(Hidden):
    """The same, with its own `update_statistics`."""

    def update_statistics(self, rollout_extras):
        return super().update_statistics(rollout_extras)


def test_statistics_beside_the_children_are_not_silently_lost():
    with pytest.raises(NotImplementedError, match="field `norm` of `Hidden`"):
        Hidden().update_statistics(None)
    assert isinstance(Routed().update_statistics(None), Routed)


@final
class Scaled(nets.Container):
    """Passes a parameter to `call.local`, as if it had a batch axis."""

    weight: jax.Array

    def __init__(self):
        super().__init__({})
        self.weight = jnp.ones(3)

    def wire(self, call, x):
        return call.local(lambda a, b: a * b[None], x, self.weight)


def test_parameters_are_not_arguments_of_local():
    with pytest.raises(ValueError, match="closes over parameters"):
        Scaled()({}, X)
    with pytest.raises(ValueError, match="closes over parameters"):
        Scaled().unroll({}, X[None].repeat(2, axis=0), DONE)


@final
class Quoted(nets.StatelessModule):
    """Annotates `Self` as a string."""

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state)

    def update_statistics(self, rollout_extras: None) -> "Self":
        return self


def test_self_may_be_quoted():
    module = Quoted()
    assert module.update_statistics(None) is module


def test_a_slice_of_a_sequence_is_a_sequence():
    whole = nets.Sequential([nets.Scale(2.0), nets.Scale(3.0), nets.Scale(5.0)])
    part = whole[1:]
    assert isinstance(part, nets.Sequential)
    np.testing.assert_array_equal(part([(), ()], X).output, 15.0)


def test_edge_names_never_collide():
    nodes = [nets.Population(name, 1, output_to=name) for name in ("a", "b", "b#2")]
    edges = [("a", "b#2"), ("a", "b"), ("a", "b")]
    graph = nets.PopulationGraph(nodes, [nets.Connection(*edge) for edge in edges], key=KEY)
    assert len(set(graph.connections.names)) == 3
