"""Containers: routing, order, and what they refuse, with the place of the culprit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    GRU,
    LSTM,
    Container,
    Dense,
    Lift,
    Normalizer,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
    StatelessModule,
    make_mlp,
)
from tests.helpers.modules import CountUp, Observation, Residual, Smoothness, Unused
from tests.helpers.trees import assert_close, assert_same

LEADS = pytest.mark.parametrize("sequence", [False, True])


class Wired(Container):
    """A container with any wiring, given as a function."""

    wiring: object = eqx.field(static=True)

    def __init__(self, wiring, **children):
        self.wiring = wiring
        super().__init__(children)

    def wire(self, call, x):
        return self.wiring(call, x)


class Returns(StatelessModule):
    """Returns whatever it is told to."""

    make: object = eqx.field(static=True)

    def __call__(self, state, x, rollout_extras=None):
        return self.make(state, x)


class Penalty(StatefulModule):
    """A penalty of its own making in every step."""

    make: object = eqx.field(static=True)

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x, state, None, self.make(x))


def run(network, x, *, sequence, key):
    """One step, or a sequence of 4 such steps, of as many environments as `x` has."""
    batch = jax.tree.leaves(x)[0].shape[0]
    state = network.initialize_state(batch, key=key)
    if not sequence:
        return network(state, x)
    xs = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), x)
    return network.unroll(state, xs, jnp.zeros((4, batch), jnp.bool_))


def notes(info):
    return " ".join(info.value.__notes__)


# --- Routing ------------------------------------------------------------------------------


def test_sequential_composes_in_order(getkey):
    double, increment = Lift(lambda x: 2.0 * x), Lift(lambda x: x + 1.0)
    x = jnp.array([[3.0]], jnp.float32)
    for layers, expected in (([double, increment], 7.0), ([increment, double], 8.0), ([], 3.0)):
        out = run(Sequential(layers), x, sequence=False, key=getkey())
        np.testing.assert_array_equal(out.output, [[expected]])


def test_sequential_is_indexed_like_a_list(getkey):
    layers = [Dense(2, 2, key=getkey()) for _ in range(12)]  # "10" would sort before "2"
    network = Sequential(layers)
    assert len(network) == 12
    assert network.layers == tuple(layers)
    assert network[0] is layers[0]
    assert network[-1] is layers[11]
    assert network[10] is layers[10]
    state = network.initialize_state(1, key=getkey())
    assert isinstance(state, list)
    assert len(state) == 12
    with pytest.raises(IndexError):
        network[12]


def test_more_than_ten_layers_stay_in_order(getkey):
    """Also through tree operations, which sort dicts."""
    layers = [Lift(lambda x, n=n: 2.0 * x + n) for n in range(12)]
    network = jax.tree.map(lambda leaf: leaf, Sequential(layers))
    expected = 1.0
    for n in range(12):
        expected = 2.0 * expected + n
    x = jnp.array([[1.0]], jnp.float32)
    for sequence in (False, True):
        out = run(network, x, sequence=sequence, key=getkey()).output
        np.testing.assert_array_equal(out.ravel(), expected)


def test_parallel_feeds_all_and_names_their_outputs(getkey):
    network = Parallel({"b": Lift(lambda x: 2.0 * x), "a": Lift(lambda x: x)}, c=CountUp())
    assert network.names == ("b", "a", "c")
    out = run(network, jnp.array([[3.0]], jnp.float32), sequence=False, key=getkey())
    assert set(out.output) == {"a", "b", "c"}
    assert float(out.output["b"][0, 0]) == 6.0
    assert float(out.output["a"][0, 0]) == 3.0
    assert set(out.next_state) == {"a", "b", "c"}
    assert network["b"] is network.modules[0]


def test_state_and_extras_mirror_the_children(getkey):
    inner = Parallel(memory=GRU(3, 2, key=getkey()), input=Normalizer(3))
    head = PPOAdapter(action=NormalTanhSampler(entropy_weight=0.0), value=Lift(lambda x: x[:1]))
    join = Lift(lambda x: jnp.concatenate([x["memory"], x["input"][:2]]))
    network = Sequential([inner, join, head])
    state = network.initialize_state(4, key=getkey())
    out = eqx.filter_jit(network)(state, jnp.ones((4, 3)))
    memory, unit, ports = out.next_state
    assert unit == ()
    assert set(memory) == {"memory", "input"}
    assert memory["memory"].shape == (4, 2)
    assert memory["input"] == ()
    assert set(ports) == {"action", "value"}
    seen, nothing, sampled = out.rollout_extras
    assert seen["memory"] is None
    np.testing.assert_array_equal(seen["input"], jnp.ones((4, 3)))
    assert nothing is None
    assert sampled["value"] is None
    assert sampled["action"].shape == (4, 2)


def test_every_child_gets_a_key_of_its_own(getkey):
    samplers = {name: NormalTanhSampler(entropy_weight=0.0) for name in "abc"}
    state = Parallel(samplers).initialize_state(4, key=getkey())
    words = np.concatenate([jax.random.key_data(s.keys) for s in state.values()])
    assert len(np.unique(words, axis=0)) == 12


@LEADS
def test_penalties_add_up_and_metrics_nest(sequence, getkey):
    network = Parallel(
        one=Penalty(lambda x: x[:, 0]),
        two=Sequential([Penalty(lambda x: 10.0 * x[:, 0]), Lift(lambda x: x)]),
        smooth=Smoothness(1),
        none=Lift(lambda x: x),
    )
    out = run(network, jnp.array([[1.0], [2.0]], jnp.float32), sequence=sequence, key=getkey())
    expected = np.array([11.0, 22.0])
    if sequence:
        expected = np.stack([expected] * 4)
    np.testing.assert_allclose(out.regularization_loss, expected)  # constant: no smoothness loss
    assert set(out.metrics) == {"smooth"}
    assert set(out.metrics["smooth"]) == {"change"}
    assert out.metrics["smooth"]["change"].shape == (*expected.shape, 1)


def test_no_penalty_and_no_metrics_are_none(getkey):
    out = run(make_mlp((3, 2), key=getkey()), jnp.ones((4, 3)), sequence=False, key=getkey())
    assert out.regularization_loss is None
    assert out.metrics is None


def test_a_counter_is_replayed_with_its_resets():
    """Starts at 7; done after the second step: 7, 8, 0, 1, and then 2."""
    network = Sequential([Residual(Lift(lambda x: x)), CountUp()])
    state = [{"inner": ()}, jnp.array([7], jnp.int32)]
    xs = jnp.zeros((4, 1, 2), jnp.float32)
    done = jnp.array([[False], [True], [False], [False]])
    for unroll in (network.unroll, lambda *args: StatefulModule.unroll(network, *args)):
        out = unroll(state, xs, done)
        np.testing.assert_array_equal(out.output["count"][:, 0], [7, 8, 0, 1])
        np.testing.assert_array_equal(out.next_state[1], [2])


def test_local_arithmetic_sees_one_batch_in_both_ways(getkey):
    ranks = []

    def wiring(call, x):
        def scale_by_norm(x, y):
            ranks.append((x.ndim, y.ndim))
            return x / (1.0 + jnp.linalg.norm(y, axis=1, keepdims=True))

        return call.local(scale_by_norm, x, call("inner", x))

    network = Wired(wiring, inner=Dense(3, 2, key=getkey()))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    y = x @ network["inner"].kernel
    expected = x / (1.0 + np.linalg.norm(y, axis=1, keepdims=True))
    for sequence in (False, True):
        out = run(network, x, sequence=sequence, key=getkey()).output
        np.testing.assert_allclose(out[-1] if sequence else out, expected, rtol=1e-5)
    assert ranks == [(2, 2), (2, 2)]


@LEADS
def test_an_uncalled_child_keeps_its_state_and_emits_nothing(sequence, getkey):
    network = Unused(used=Lift(lambda x: x), spare=Sequential([Normalizer(2), CountUp()]))
    state = {"used": (), "spare": [(), jnp.array([5, 6], jnp.int32)]}
    x = jnp.ones((2, 2))
    if sequence:
        done = jnp.array([[False, True], [False, False]])
        out = network.unroll(state, jnp.ones((2, 2, 2)), done)
        expected = [5, 0]  # the episode of the second environment ended
    else:
        out = network(state, x)
        expected = [5, 6]
    np.testing.assert_array_equal(out.next_state["spare"][1], expected)
    assert out.rollout_extras == {"spare": None, "used": None}
    updated = network.update_statistics(out.rollout_extras)
    assert int(updated["spare"][0].count) == 0


def test_update_replaces_only_the_children(getkey):
    network = Parallel(a=Normalizer(1), b=Dense(1, 1, key=getkey()))
    extras = {"a": jnp.ones((2, 3, 1)), "b": None}
    new = network.update_statistics(extras)
    assert new.names == network.names
    assert_same(jax.tree.leaves(new["b"]), jax.tree.leaves(network["b"]))
    np.testing.assert_array_equal(new["a"].mean, [1.0])
    np.testing.assert_array_equal(network["a"].mean, [0.0])
    # The same, in one call for a network nobody ran.
    assert_same(jax.tree.leaves(network.update_statistics(None)), jax.tree.leaves(network))


@pytest.mark.parametrize("kind", ["tuple", "module", "dict", "list"])
@LEADS
def test_any_structure_passes_through(kind, sequence, getkey):
    """None leaves, booleans and integers included, without calling a constructor."""

    class Record(eqx.Module):
        proprio: jax.Array
        nothing: None
        flag: jax.Array

        def __check_init__(self):
            assert isinstance(self.proprio, jax.Array)

    proprio, flag = jnp.ones((3, 2)), jnp.array([1, 0, 1], jnp.bool_)
    x = {
        "tuple": Observation(proprio, {"flag": flag, "nothing": None}),
        "module": Record(proprio, None, flag),
        "dict": {"b": proprio, "a": (flag, None)},
        "list": [proprio, flag],
    }[kind]
    network = Sequential([Parallel(a=CountUp(), b=Unused(CountUp(), CountUp()))])
    out = run(network, x, sequence=sequence, key=getkey()).output
    got = out["b"]["input"]
    assert jax.tree.structure(got) == jax.tree.structure(x)
    assert_same(jax.tree.map(lambda leaf: leaf[-1], got) if sequence else got, x)


def test_a_container_is_a_tree_that_survives_partition_and_jit(getkey):
    network = Parallel(b=make_mlp((3, 2), key=getkey()), a=GRU(3, 2, key=getkey()))
    params, static = eqx.partition(network, eqx.is_inexact_array)
    state = network.initialize_state(4, key=getkey())

    @jax.jit
    def step(params, state, x):
        return eqx.combine(params, static)(state, x)

    x = jnp.ones((4, 3))
    assert_close(step(params, state, x), network(state, x))


# --- What is refused ----------------------------------------------------------------------


def actor_critic(key, broken):
    """`broken` sits at network.layers[1].action.layers[4]."""
    keys = jax.random.split(key, 5)
    dense = [Dense(3, 3, key=k) for k in keys[:4]]
    action = Sequential([*dense, broken, NormalTanhSampler(entropy_weight=0.0)])
    return Sequential([Normalizer(3), PPOAdapter(action=action, value=Dense(3, 1, key=keys[4]))])


@LEADS
@pytest.mark.parametrize("jitted", [False, True])
def test_errors_say_where_in_the_network(sequence, jitted, getkey):
    network = actor_critic(getkey(), Dense(5, 4, key=getkey()))

    def forward(x):
        return run(network, x, sequence=sequence, key=jax.random.key(0)).output

    with pytest.raises(ValueError, match="`Dense` expected") as info:
        (jax.jit(forward) if jitted else forward)(jnp.ones((2, 3)))
    assert "In module `network.layers[1].action.layers[4]` (`Dense`), whose input was f32" in notes(
        info
    )
    assert "[B, 5]" in str(info.value)


@LEADS
def test_the_place_survives_differentiation_and_other_errors(sequence, getkey):
    def fails(state, x):
        raise ZeroDivisionError("of the user's own")

    network = actor_critic(getkey(), Returns(fails))

    def loss(x):
        out = run(network, x, sequence=sequence, key=jax.random.key(0))
        return jnp.sum(out.output.value_estimates)

    with pytest.raises(ZeroDivisionError, match="own") as info:
        jax.jit(jax.grad(loss))(jnp.ones((2, 3)))
    assert "network.layers[1].action.layers[4]" in notes(info)


def test_dict_children_are_addressed_by_name(getkey):
    network = Sequential([Parallel(good=Dense(3, 1, key=getkey()), bad=Dense(4, 1, key=getkey()))])
    with pytest.raises(ValueError, match="`Dense` expected") as info:
        run(network, jnp.ones((2, 3)), sequence=False, key=getkey())
    assert "network.layers[0]['bad']" in notes(info)


@pytest.mark.parametrize("hook", ["initialize_state", "reset_state", "update_statistics"])
def test_errors_of_the_other_hooks_say_where(hook, getkey):
    class Fails(StatefulModule):
        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(x, state)

        def initialize_state(self, batch_size, *, key):
            raise RuntimeError("initialize_state")

        def reset_state(self, prev_state):
            raise RuntimeError("reset_state")

        def update_statistics(self, rollout_extras):
            raise RuntimeError("update_statistics")

    network = Sequential([Parallel(inner=Fails())])
    calls = {
        "initialize_state": lambda: network.initialize_state(2, key=getkey()),
        "reset_state": lambda: network.reset_state([{"inner": ()}]),
        "update_statistics": lambda: network.update_statistics(None),
    }
    with pytest.raises(RuntimeError, match=hook) as info:
        calls[hook]()
    assert "network.layers[0]['inner']" in notes(info)


@LEADS
def test_a_child_called_twice_is_refused(sequence, getkey):
    network = Wired(lambda call, x: call("twice", call("twice", x)), twice=GRU(3, 3, key=getkey()))
    with pytest.raises(ValueError, match="`twice` of `Wired` was called twice"):
        run(network, jnp.ones((2, 3)), sequence=sequence, key=getkey())


def test_an_unknown_child_is_refused(getkey):
    network = Wired(lambda call, x: call("nope", x), inner=Dense(3, 3, key=getkey()))
    with pytest.raises(ValueError, match=r"no child `nope`; its children are \['inner'\]"):
        run(network, jnp.ones((2, 3)), sequence=False, key=getkey())


@pytest.mark.parametrize(
    "build",
    [
        lambda layer: Sequential([layer]),
        lambda layer: Parallel(child=layer),
        lambda layer: PPOAdapter(action=Lift(layer), value=layer),
        Residual,
    ],
)
def test_a_child_that_is_no_module_is_refused(build, getkey):
    layer = eqx.nn.Linear(3, 3, key=getkey())
    with pytest.raises(TypeError, match=r"must be a `StatefulModule`, but is a `Linear`.*`Lift"):
        build(layer)


@LEADS
@pytest.mark.parametrize(
    "penalty",
    [
        jnp.mean,
        lambda x: jnp.mean(x, axis=1, keepdims=True),
        lambda x: x,
        lambda x: jnp.zeros(1),
    ],
)
def test_a_penalty_must_be_one_value_per_environment(sequence, penalty, getkey):
    network = Sequential([Penalty(penalty)])
    with pytest.raises(ValueError, match="`regularization_loss` must have one value") as info:
        run(network, jnp.ones((3, 2)), sequence=sequence, key=getkey())
    assert ("(4, 3)" if sequence else "(3,)") in str(info.value)
    assert "network.layers[0]" in notes(info)


def test_a_scalar_penalty_of_a_stateless_layer_is_refused_in_a_sequence(getkey):
    network = Sequential([Returns(lambda state, x: StatefulModuleOutput(x, state, None, x.mean()))])
    with pytest.raises(ValueError, match="scalar where one value per step and environment") as info:
        run(network, jnp.ones((3, 2)), sequence=True, key=getkey())
    assert "network.layers[0]" in notes(info)


@LEADS
@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("The output", lambda state, x: StatefulModuleOutput(x[:1], state)),
        ("`rollout_extras`", lambda state, x: StatefulModuleOutput(x, state, x[:2])),
        ("The metrics", lambda state, x: StatefulModuleOutput(x, state, None, None, {"m": x[:1]})),
    ],
)
def test_what_does_not_lead_with_the_batch_is_refused(sequence, field, make, getkey):
    network = Sequential([Returns(make)])
    with pytest.raises((ValueError, TypeError)) as info:
        run(network, jnp.ones((3, 2)), sequence=sequence, key=getkey())
    if not sequence:  # a sequence reports what it could not cut into steps
        assert str(info.value).startswith(field)
        assert "(3,)" in str(info.value)
    assert "network.layers[0]" in notes(info)


def test_a_state_without_batch_axis_is_refused(getkey):
    class Total(CountUp):
        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(x, jnp.sum(state))

    with pytest.raises(ValueError, match=r"`next_state` must lead with \(B,\) = \(3,\)"):
        run(Sequential([Total()]), jnp.ones((3, 2)), sequence=False, key=getkey())


@LEADS
def test_a_state_for_another_batch_is_refused(sequence, getkey):
    """One row would broadcast over the batch."""
    network = Sequential([Smoothness(2)])
    args = (network.initialize_state(1, key=getkey()), jnp.ones((3, 2)))
    if sequence:
        args = (args[0], jnp.ones((4, 3, 2)), jnp.zeros((4, 3), jnp.bool_))
    with pytest.raises(ValueError, match=r"must lead with \(B,\) = .*, but has shape"):
        (network.unroll if sequence else network)(*args)


def test_inputs_of_two_batch_sizes_are_refused(getkey):
    network = Sequential([CountUp()])
    state = network.initialize_state(3, key=getkey())
    with pytest.raises(ValueError, match=r"The input at `\['b'\]` must lead with \(B,\) = \(3,\)"):
        network(state, {"a": jnp.ones((3, 2)), "b": jnp.ones((2, 2))})


def test_a_result_of_another_kind_is_refused(getkey):
    network = Sequential([Returns(lambda state, x: x)])
    with pytest.raises(TypeError, match="must return a `StatefulModuleOutput`, but got"):
        run(network, jnp.ones((3, 2)), sequence=False, key=getkey())


@pytest.mark.parametrize("wrong", [[()], {"a": ()}, (), [(), (), ()], ((), ())])
def test_a_state_of_another_structure_is_refused(wrong, getkey):
    network = Sequential([Dense(2, 2, key=getkey()), Dense(2, 2, key=getkey())])
    with pytest.raises(ValueError, match="`Sequential` do not mirror its children"):
        network(wrong, jnp.ones((3, 2)))


def test_missing_state_of_a_named_child_is_refused(getkey):
    network = Parallel(a=GRU(2, 2, key=getkey()), b=LSTM(2, 2, key=getkey()))
    state = network.initialize_state(3, key=getkey())
    with pytest.raises(ValueError, match=r"one entry for each of \['a', 'b'\]"):
        network({"a": state["a"]}, jnp.ones((3, 2)))


def test_parallel_refuses_no_children_and_names_given_twice():
    with pytest.raises(ValueError, match="`Parallel` needs at least one child"):
        Parallel()
    with pytest.raises(ValueError, match=r"the names \['a'\] both"):
        Parallel({"a": CountUp()}, a=CountUp())
