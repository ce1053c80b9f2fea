"""Every module of the registry inside the containers: they carry all that it returns.

A host runs a module on inputs and adds nothing to what it returns, save its arrangement. So
the module's place in the host's outputs, state, extras, penalties, metrics, gradients and
statistics must hold what the module gives alone, and the host must replay what it rolled out.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import networks as nets
from tests.helpers.modules import MODULE_CASES, random_inputs
from tests.helpers.trees import assert_close, signature

T, B = 4, 2
DONE = np.array([[False, False], [True, False], [False, True], [False, False]])
CASES = {case.name: case for case in MODULE_CASES}


# --- Hosts --------------------------------------------------------------------------------


class Host(NamedTuple):
    """A network around a module.

    - `build`: makes it, from a module and one unbatched input of it.
    - `give`: arranges inputs `[T, B, *feat]` of the module as inputs of the host.
    - `read`: the module's output in that of the host, as one vector per sample.
    - `place`: the module's entry in the host's state or extras, or the module in the host.
    - `put`: the host's state with another entry for the module.
    - `metrics`: the names under which the host nests the module's metrics.
    """

    build: Callable
    give: Callable
    read: Callable
    place: Callable
    put: Callable
    metrics: tuple[str, ...]


def size_of(tree):
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def as_vectors(tree, n_lead):
    """All leaves as floats in one vector, behind the leading axes."""
    leaves = jax.tree.leaves(tree)
    flat = [leaf.reshape(*leaf.shape[:n_lead], -1).astype(jnp.float32) for leaf in leaves]
    return jnp.concatenate(flat, axis=-1)


def from_vector(sample):
    """A function of one vector that gives leaves of the shapes and dtypes of `sample`."""
    leaves, treedef = jax.tree.flatten(sample)
    cuts = np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()

    def rebuild(vector):
        parts = zip(jnp.split(vector, cuts), leaves, strict=True)
        return treedef.unflatten([part.reshape(x.shape).astype(x.dtype) for part, x in parts])

    return rebuild


def between_vectors(module, sample):
    """The module as a map from vectors to vectors, whatever its input and output are."""
    to_vector = functools.partial(as_vectors, n_lead=0)
    return nets.Sequential([nets.Lift(from_vector(sample)), module, nets.Lift(to_vector)])


def graph(*, recurrent):
    """The module as a connection; with a loop elsewhere, which makes a sequence a scan."""

    def build(module, sample):
        x = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), sample)
        output = jax.eval_shape(
            lambda: module(module.initialize_state(1, key=jax.random.key(0)), x).output
        )
        builder = nets.GraphBuilder()
        builder.add_output("target", size_of(output), output_to="module")
        builder.add_input("source", size_of(sample), input_from="vector")
        builder.connect("source", "target", between_vectors(module, sample))
        builder.add_output("later", size_of(sample))
        builder.connect("source", "later", nets.Scale(1.0), delay=2)
        if recurrent:
            builder.connect("later", "later", nets.Scale(0.5), delay=1)
        return builder.build(key=jax.random.key(3))

    return Host(
        build=build,
        give=lambda xs: {"vector": as_vectors(xs, 2), "unused": xs},
        read=lambda output: output["module"],
        place=lambda tree: (
            tree.connections["source->target"][1]
            if isinstance(tree, nets.PopulationGraph)
            else tree["connections"]["source->target"][1]
        ),
        put=lambda state, entry: {
            **state,
            "connections": {**state["connections"], "source->target": [(), entry, ()]},
        },
        metrics=("source->target", "1"),
    )


def map_of_sequential(module, sample):
    """The module on its own kind of input, between layers that pass everything on."""
    inner = nets.Sequential([nets.Lift(lambda x: x), module, nets.Lift(lambda x: x)])
    return nets.Map(other=nets.Delay(jnp.zeros(()), 2), inner=inner)


HOSTS = {
    "graph": graph(recurrent=False),
    "recurrent_graph": graph(recurrent=True),
    "map_of_sequential": Host(
        build=map_of_sequential,
        give=lambda xs: {"inner": xs, "other": jnp.ones((T, B)), "unused": xs},
        read=lambda output: as_vectors(output["inner"], 2),
        place=lambda tree: tree["inner"][1],
        put=lambda state, entry: {**state, "inner": [(), entry, ()]},
        metrics=("inner", "1"),
    ),
}

ALONE = Host(
    build=lambda module, sample: module,
    give=lambda xs: xs,
    read=lambda output: as_vectors(output, 2),
    place=lambda tree: tree,
    put=lambda state, entry: entry,
    metrics=(),
)


@functools.cache
def quick_to_compile():
    """Options of the compiler under which it takes a third of the time, if it knows them."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_llvm_disable_expensive_passes": True,
    }

    def is_known(name):
        try:
            jax.jit(lambda: 0, compiler_options={name: options[name]})()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: options[name] for name in options if is_known(name)}


# --- Runs ---------------------------------------------------------------------------------


class Run(NamedTuple):
    """What is compared, of a module alone or in a host.

    - `rollout`, `replay`: all that the host returns, step by step and as a sequence.
    - `inner`: the module's place in the replay, its output as one vector per sample.
    - `gradient`: of the module, from a loss of all of `inner` that is a float.
    - `updated`: the arrays of the module once its statistics have taken in the rollout.
    """

    rollout: nets.StatefulModuleOutput
    replay: nets.StatefulModuleOutput
    inner: nets.StatefulModuleOutput
    gradient: object
    updated: list


def inner_of(host, out):
    metrics = out.metrics
    for name in host.metrics:
        metrics = None if metrics is None else metrics[name]
    extras = None if out.rollout_extras is None else host.place(out.rollout_extras)
    return nets.StatefulModuleOutput(
        host.read(out.output), host.place(out.next_state), extras, out.regularization_loss, metrics
    )


def weighted(tree):
    """A scalar that depends on every float of a tree, each by a weight of its own."""
    total = jnp.zeros((), jnp.float32)
    for index, leaf in enumerate(jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            weights = jnp.sin(1.0 + index + jnp.arange(leaf.size, dtype=jnp.float32))
            total = total + jnp.sum(weights * leaf.reshape(-1))
    return total


def run_in(host, network, start, xs, roll_out=nets.StatefulModule.unroll):
    """Rollout by steps, replay as a sequence, gradient and statistics: one compilation.

    `start` is the module's state, which is put into that of the network.
    """
    params, static = eqx.partition(network, nets.trainable(network))

    @functools.partial(jax.jit, compiler_options=quick_to_compile())
    def run(params, start, xs):
        network = eqx.combine(params, static)
        state = host.put(network.initialize_state(B, key=jax.random.key(4)), start)
        done, inputs = jnp.asarray(DONE), host.give(xs)
        rollout = roll_out(network, state, inputs, done)

        def loss(params):
            out = eqx.combine(params, static).unroll(state, inputs, done, rollout.rollout_extras)
            inner = inner_of(host, out)
            return weighted(inner._replace(rollout_extras=None)), (out, inner)

        gradient, (replay, inner) = jax.grad(loss, has_aux=True)(params)
        updated = host.place(network.update_statistics(rollout.rollout_extras))
        arrays = [leaf for leaf in jax.tree.leaves(updated) if eqx.is_array(leaf)]
        return Run(rollout, replay, inner, jax.tree.leaves(host.place(gradient)), arrays)

    return run(params, start, xs)


@functools.cache
def case(name):
    """A module, the state in which it starts, and its inputs."""
    module = CASES[name].build(jax.random.key(7))
    start = module.initialize_state(B, key=jax.random.key(2))
    return module, start, random_inputs(CASES[name].sample, (T, B), seed=1)


@functools.cache
def alone(name):
    module, start, xs = case(name)
    return run_in(ALONE, module, start, xs, type(module).unroll)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", CASES)
def test_a_host_carries_all_that_a_module_returns(name, host):
    module, start, xs = case(name)
    network = HOSTS[host].build(module, CASES[name].sample)
    expected = alone(name)
    got = run_in(HOSTS[host], network, start, xs)
    assert_close(got.replay, got.rollout, rtol=1e-5, atol=2e-6)
    assert signature(got.inner) == signature(expected.inner)
    assert_close(got.inner, expected.inner, rtol=1e-5, atol=2e-6)
    assert_close(got.updated, expected.updated, rtol=1e-5, atol=2e-6)
    assert_close(got.gradient, expected.gradient, rtol=2e-4, atol=2e-5)
    assert not got.gradient or max(np.abs(leaf).max() for leaf in got.gradient) > 1e-3


class Echo(nets.StatelessModule):
    """Returns its input in the rollout, and in the replay what it emitted there."""

    def __call__(self, state, x, rollout_extras=None):
        output = x if rollout_extras is None else rollout_extras
        return nets.StatefulModuleOutput(output, state, 2.0 * x)


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_gives_back_what_a_module_emitted(host):
    xs = random_inputs(jnp.zeros(3), (T, B), seed=1)
    network = HOSTS[host].build(Echo(), jnp.zeros(3))
    got = run_in(HOSTS[host], network, (), xs)
    np.testing.assert_array_equal(HOSTS[host].read(got.rollout.output), xs)
    np.testing.assert_array_equal(HOSTS[host].place(got.rollout.rollout_extras), 2.0 * xs)
    np.testing.assert_array_equal(got.inner.output, 2.0 * xs)
