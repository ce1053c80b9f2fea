"""Shape contracts of users' own code: what is caught, how it is said, and what it costs."""

import re
from typing import NamedTuple, Optional, Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int32, PyTree, TypeCheckError

from eqx_ppo import networks as nets
from eqx_ppo._checks import typed
from eqx_ppo.algorithms import replay, unroll_env
from eqx_ppo.networks import StatefulModule, StatefulModuleOutput, StatelessModule
from eqx_ppo.ops import gae
from eqx_ppo.typing import Batch, BatchTree, TimeBatch, set_shape_checks, shape_checked
from tests.helpers.envs import ScriptedEnv

T, B = 5, 4


@pytest.fixture
def unchecked():
    set_shape_checks(False)
    yield
    set_shape_checks(True)


class Leaky(StatefulModule):
    """A user's annotated layer."""

    size: int

    def __call__(
        self,
        state: Float[Array, "B {self.size}"],
        x: Float[Array, "B {self.size}"],
        rollout_extras: None = None,
    ) -> StatefulModuleOutput:
        level = 0.5 * state + x
        return StatefulModuleOutput(level, level)

    def initialize_state(self, batch_size: int, *, key: Array) -> Float[Array, "B {self.size}"]:
        return jnp.zeros((batch_size, self.size), jnp.float32)

    def reset_state(self, prev_state: Float[Array, "B size"]) -> Float[Array, "B size"]:
        return jnp.zeros_like(prev_state)


class Obs(NamedTuple):
    """A user's structured observation."""

    speed: Array
    goal: Array


class Pick(StatelessModule):
    """A user's annotated layer on dictionaries."""

    def __call__(
        self, state: tuple, x: PyTree[Float[Array, "B ..."]], rollout_extras: None = None
    ) -> StatefulModuleOutput:
        return StatefulModuleOutput(x["speed"], state)


class WrongReturn(Leaky):
    """Starts without a batch axis."""

    def initialize_state(self, batch_size: int, *, key: Array) -> Float[Array, "B {self.size}"]:
        return jnp.zeros(self.size, jnp.float32)


class SwapsTime(Leaky):
    """Its own `unroll` returns `[B, T, *feat]`."""

    def unroll(self, state, xs, done, rollout_extras=None):
        out = StatefulModule.unroll(self, state, xs, done, rollout_extras)
        return out._replace(output=jnp.swapaxes(out.output, 0, 1))


def inside(layer):
    """The layer three levels down in a network, behind one that does nothing."""
    nothing = nets.Sequential([])
    return nets.Sequential([nothing, nets.Parallel(a=nets.Sequential([layer]))])


PLACE = "network.layers[1]['a'].layers[0]"


def run(network, x):
    return network(network.initialize_state(B, key=jax.random.key(0)), x)


def unroll(network, xs, done):
    return network.unroll(network.initialize_state(B, key=jax.random.key(0)), xs, done)


FAULTS = {
    "feature size": (
        lambda: run(inside(Leaky(3)), jnp.zeros((B, 2))),
        r"`Leaky.__call__` expected `x` .*here `Float\[Array, '4 3'\]`, but got f32\[4,2\]",
    ),
    "rank": (
        lambda: run(inside(Leaky(3)), jnp.zeros((B, 3, 1))),
        r"expected `x` .*'4 3'.* got f32\[4,3,1\]",
    ),
    "dtype": (
        lambda: run(inside(Leaky(3)), jnp.zeros((B, 3), jnp.int32)),
        r"expected `x` .*Float.* got i32\[4,3\]",
    ),
    "missing batch axis": (
        lambda: run(inside(Leaky(3)), jnp.zeros(3)),
        r"must lead with \(B,\) = \(4,\), but has shape \(3,\)",
    ),
    "swapped time and batch": (
        lambda: unroll(inside(SwapsTime(3)), jnp.zeros((T, B, 3)), jnp.zeros((T, B), bool)),
        r"The output must lead with \(T, B\) = \(5, 4\), but has shape \(4, 5, 3\)",
    ),
    "wrong key": (
        lambda: run(inside(Pick()), {"velocity": jnp.zeros((B, 3))}),
        "'speed'",
    ),
    "wrong attribute": (
        lambda: run(inside(Pick()), Obs(jnp.zeros((B, 3)), jnp.zeros((B, 2)))),
        "indices must be",
    ),
    "returned shape": (
        lambda: run(inside(WrongReturn(3)), jnp.zeros((B, 3))),
        r"`WrongReturn.initialize_state` should return .*but returned f32\[3\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fault_is_found_while_tracing_with_its_place(fault, compiled):
    call, says = FAULTS[fault]
    # A batch axis is missed by the first layer of all.
    place = "network.layers[0]" if fault == "missing batch axis" else PLACE
    with pytest.raises(Exception, match=says) as caught:
        jax.make_jaxpr(call)() if compiled else call()
    assert any(f"`{place}`" in note for note in caught.value.__notes__)


def test_the_innermost_note_tells_the_input():
    with pytest.raises(TypeError) as caught:
        run(inside(Leaky(3)), jnp.zeros((B, 2)))
    (note,) = [note for note in caught.value.__notes__ if "network" in note]
    assert note == f"In module `{PLACE}` (`Leaky`), whose input was f32[4,2]."


def test_a_network_of_one_layer_is_named_in_rollout_and_replay():
    env = ScriptedEnv((0, 1, 0), (0, 0, 0))
    env_state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), B))
    layer = Leaky(7)
    state = layer.initialize_state(B, key=jax.random.key(1))
    with pytest.raises(TypeError, match="expected `x`") as caught:
        unroll_env(env, env_state, layer, state, T, jax.random.key(2))
    assert any("`network` (`Leaky`)" in note for note in caught.value.__notes__)
    policy = nets.make_mlp_actor_critic(2, 1, [2], [2], key=jax.random.key(3))
    start = policy.initialize_state(B, key=jax.random.key(1))
    _, _, transitions = unroll_env(env, env_state, policy, start, T, jax.random.key(2))
    with pytest.raises(TypeError, match="expected `x`") as caught:
        replay(layer, state, jnp.zeros(B, bool), transitions)
    assert any("`network` (`Leaky`)" in note for note in caught.value.__notes__)


# --- The switch, and the cost -------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_switched_off_a_users_layer_is_not_checked():
    """Nothing but the annotation objects to these shapes and dtypes."""
    out = Leaky(3)(jnp.zeros((B, 7)), jnp.ones((B, 7)))
    assert out.output.shape == (B, 7)
    assert double(jnp.ones(3, jnp.int32)).tolist() == [2, 2, 2]


@pytest.mark.usefixtures("unchecked")
def test_the_boundary_of_the_library_is_checked_always():
    flags = jnp.zeros((T, B), bool)
    numbers = jnp.zeros((T, B))
    with pytest.raises(TypeCheckError, match="`gae` expected `values` to be"):
        gae(numbers, numbers[0], numbers, flags, flags, gamma=0.9, lambda_=0.9)
    network = nets.Sequential([nets.Scale(1.0)])
    with pytest.raises(TypeCheckError, match=r"`Sequential.unroll` expected `done`.*Time comes"):
        network.unroll([()], jnp.zeros((T, B, 3)), jnp.zeros((B, T), bool))


def test_compiled_code_is_the_same_with_and_without_checks():
    network = inside(Leaky(3))
    state = network.initialize_state(B, key=jax.random.key(0))
    arguments = state, jnp.zeros((T, B, 3)), jnp.zeros((T, B), bool)

    def compile_it():
        def run(state, xs, done):  # a new function, which JAX has not traced yet
            return network.unroll(state, xs, done)

        return jax.jit(run).lower(*arguments).as_text()

    checked = compile_it()
    set_shape_checks(False)
    try:
        assert compile_it() == checked
    finally:
        set_shape_checks(True)


# --- The decorator and the aliases --------------------------------------------------------


@shape_checked
def double(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    return x + x


@shape_checked
def weigh(x: Float[Array, "B D"], weights: Float[Array, " D"], times: int = 1) -> Batch:
    """A docstring."""
    return times * x * weights[None]


def test_a_checked_function_is_the_function():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(weigh(x, jnp.ones(3), times=2), 2 * x)
    assert (weigh.__name__, weigh.__doc__) == ("weigh", "A docstring.")
    with pytest.raises(TypeError, match="missing a required argument"):
        weigh(x)


def test_axes_are_bound_over_arguments():
    with pytest.raises(
        TypeCheckError,
        match=re.escape(
            "`weigh` expected `weights` to be `Float[Array, 'D']`, here `Float[Array, '3']`, but "
            "got f32[2]. Compare what feeds it"
        ),
    ):
        weigh(jnp.ones((2, 3)), jnp.ones(2))


def test_numpy_arrays_are_told_how_to_become_jax_arrays():
    with pytest.raises(TypeCheckError, match=r"got f32\[2,3\]\(numpy\).*`jnp.asarray`"):
        weigh(np.ones((2, 3), np.float32), jnp.ones(3))


def test_arguments_that_are_not_arrays_are_checked_too():
    with pytest.raises(TypeCheckError, match=r"`weigh` expected `times` to be `int` but got 'two'"):
        weigh(jnp.ones((2, 3)), jnp.ones(3), times="two")


def test_an_expression_in_an_axis_is_resolved():
    @shape_checked
    def sizes(n: int, x: Float[Array, " {n}"], y: Float[Array, " {n+1}"]) -> None: ...

    sizes(2, jnp.ones(2), jnp.ones(3))
    with pytest.raises(TypeCheckError, match=r"here `Float\[Array, '2'\]`, but got f32\[3\]"):
        sizes(2, jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeCheckError, match=r"`Float\[Array, '\{n\+1\}'\]` but got f32\[2\]"):
        sizes(2, jnp.ones(2), jnp.ones(2))


def test_an_error_of_a_function_further_in_stays_as_it_is():
    @shape_checked
    def outer(x: Float[Array, "B D"]) -> Array:
        return weigh(x, jnp.ones(7))

    with pytest.raises(TypeCheckError, match=r"^`weigh` expected `weights`"):
        outer(jnp.ones((2, 3)))


def test_self_is_the_class_wherever_it_stands():
    class Linked(StatelessModule):
        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(x, state)

        def follow(self, other: Self | None, others: list[Self]) -> Optional[Self]:  # noqa: UP045
            return other or others[0]

    one = Linked()
    assert one.follow(one, []) is one
    assert one.follow(None, [one]) is one
    with pytest.raises(TypeCheckError, match=r"`Linked.follow` expected `other` .*but got 3"):
        one.follow(3, [])


def test_other_errors_pass_unchanged():
    @typed
    def fails(x: int) -> int:
        raise KeyError("speed")

    with pytest.raises(KeyError, match=r"^'speed'$"):
        fails(1)


@pytest.mark.parametrize(
    ("alias", "good", "bad"),
    [
        (Batch, jnp.zeros((4, 3)), jnp.zeros(())),
        (Batch, jnp.zeros(4), jnp.zeros(4, jnp.int32)),
        (TimeBatch, jnp.zeros((5, 4)), jnp.zeros(5)),
        (BatchTree, {"a": jnp.zeros((4, 3)), "b": jnp.zeros(4, jnp.int32)}, {"a": jnp.zeros(())}),
        (BatchTree, (), [jnp.zeros((4, 3)), jnp.zeros(3)]),
    ],
)
def test_aliases_say_what_leads(alias, good, bad):
    @shape_checked
    def takes(x: alias, also: alias) -> None: ...

    takes(good, good)
    with pytest.raises(TypeCheckError):
        takes(bad, bad)


def test_axes_of_two_aliases_agree_within_a_call():
    @shape_checked
    def takes(x: Batch, xs: TimeBatch, count: Int32[Array, " T"]) -> None: ...

    takes(jnp.zeros((4, 3)), jnp.zeros((5, 4, 2)), jnp.zeros(5, jnp.int32))
    with pytest.raises(TypeCheckError, match=r"expected `xs` .*'4 4 ...'.*\[T, B, \*feat\]"):
        takes(jnp.zeros((4, 3)), jnp.zeros((4, 5, 2)), jnp.zeros(4, jnp.int32))
