"""`PopulationGraph`: delays, order, cycles, what is refused, and recurrences written by hand."""

import functools
import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import networks as nets
from tests.helpers.trees import assert_close, assert_same, signature

KEY = jax.random.key(0)


def identity():
    return nets.Lift(lambda x: x)


def signal_graph(*delays, recurrent=False):
    """One input unit that reaches one output unit after each of `delays`, unchanged.

    `recurrent` adds a loop of weight 0, which changes nothing but how a sequence is run.
    """
    builder = nets.GraphBuilder()
    builder.add_input("in", 1, input_from="obs")
    builder.add_output("out", 1)
    for delay in delays:
        builder.connect("in", "out", identity(), delay=delay)
    if recurrent:
        builder.connect("out", "out", nets.Scale(0.0), delay=1)
    return builder.build(key=KEY)


def by_steps(graph, state, xs, done, extras=None):
    """The sequence as a plain loop of calls, with the resets of single environments."""
    outputs, all_extras = [], []
    for t in range(done.shape[0]):
        slot = None if extras is None else jax.tree.map(lambda leaf, t=t: leaf[t], extras)
        out = graph(state, jax.tree.map(lambda leaf, t=t: leaf[t], xs), slot)

        def pick(fresh, used, t=t):
            mask = done[t].reshape(-1, *(1,) * (used.ndim - 1))
            return jnp.where(mask, fresh, used)

        state = jax.tree.map(pick, graph.reset_state(out.next_state), out.next_state)
        outputs.append(out.output)
        all_extras.append(out.rollout_extras)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
    stacked_extras = jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_extras)
    return nets.StatefulModuleOutput(stacked, state, stacked_extras)


def by_unroll(graph, state, xs, done):
    return graph.unroll(state, xs, done)


def by_replay(graph, state, xs, done):
    extras = by_steps(graph, state, xs, done).rollout_extras
    return graph.unroll(state, xs, done, extras)


def by_steps_of_replay(graph, state, xs, done):
    extras = graph.unroll(state, xs, done).rollout_extras
    return by_steps(graph, state, xs, done, extras)


WAYS = pytest.mark.parametrize("way", [by_steps, by_unroll, by_replay, by_steps_of_replay])


def trace(graph, values):
    """The output of a one-unit graph for one environment, as a sequence."""
    state = graph.initialize_state(1, key=KEY)
    xs = {"obs": jnp.asarray(values, jnp.float32).reshape(-1, 1, 1)}
    done = jnp.zeros((len(values), 1), bool)
    return graph.unroll(state, xs, done).output["out"].ravel().tolist()


# --- Delays -------------------------------------------------------------------------------

# The input is 1, 2, 3, 4, 5, 6; row r is the output if the episode ends after step r.
TRACES = {
    1: [
        [0, 0, 2, 3, 4, 5],
        [0, 1, 0, 3, 4, 5],
        [0, 1, 2, 0, 4, 5],
        [0, 1, 2, 3, 0, 5],
        [0, 1, 2, 3, 4, 0],
        [0, 1, 2, 3, 4, 5],
    ],
    2: [
        [0, 0, 0, 2, 3, 4],
        [0, 0, 0, 0, 3, 4],
        [0, 0, 1, 0, 0, 4],
        [0, 0, 1, 2, 0, 0],
        [0, 0, 1, 2, 3, 0],
        [0, 0, 1, 2, 3, 4],
    ],
    3: [
        [0, 0, 0, 0, 2, 3],
        [0, 0, 0, 0, 0, 3],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 2, 0],
        [0, 0, 0, 1, 2, 3],
    ],
}


@WAYS
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_delay_reads_exactly_that_many_steps_back(delay, recurrent, way):
    """One environment for each position of the reset, and one without."""
    graph = signal_graph(delay, recurrent=recurrent)
    assert graph.has_cycle == recurrent
    xs = {"obs": jnp.broadcast_to(jnp.arange(1.0, 7.0)[:, None, None], (6, 7, 1))}
    done = jnp.eye(6, 7, dtype=bool)
    out = way(graph, graph.initialize_state(7, key=KEY), xs, done)
    expected = [*TRACES[delay], TRACES[delay][-1]]  # a reset at the end shows in the state only
    np.testing.assert_array_equal(out.output["out"][:, :, 0].T, expected)
    # What the next sequence reads: nothing after the reset at the end, else the newest inputs.
    after = graph.unroll(
        out.next_state, {"obs": 9.0 * jnp.ones((3, 7, 1))}, jnp.zeros((3, 7), bool)
    )
    times = np.arange(6 - delay, 6)
    newest = [np.where(times > reset, times + 1, 0) for reset in [*range(6), -1]]
    np.testing.assert_array_equal(after.output["out"][:delay, :, 0].T, newest)


def test_no_delay_is_the_same_step():
    assert trace(signal_graph(0), [1, 2, 3]) == [1, 2, 3]


@WAYS
@pytest.mark.parametrize("recurrent", [False, True])
def test_delays_of_one_source_add_up(way, recurrent):
    """out[t] = in[t] + in[t-1] + in[t-3] + in[t-2], from one buffer."""
    graph = signal_graph(0, 1, 3, 2, recurrent=recurrent)
    xs = {
        "obs": jnp.broadcast_to((10.0 ** np.arange(6, dtype=np.float32))[:, None, None], (6, 2, 1))
    }
    done = jnp.zeros((6, 2), bool).at[2, 1].set(True)
    out = way(graph, graph.initialize_state(2, key=KEY), xs, done)
    expected = [[1, 11, 111, 1111, 11110, 111100], [1, 11, 111, 1000, 11000, 111000]]
    np.testing.assert_array_equal(out.output["out"][:, :, 0].T, expected)


def test_resets_in_a_row_leave_nothing_behind():
    graph = signal_graph(2)
    xs = {"obs": jnp.arange(1.0, 7.0)[:, None, None]}
    done = jnp.array([1, 1, 0, 0, 1, 0], bool)[:, None]
    out = graph.unroll(graph.initialize_state(1, key=KEY), xs, done)
    assert out.output["out"].ravel().tolist() == [0, 0, 0, 0, 3, 0]


def test_buffers_belong_to_sources_and_are_as_long_as_the_longest_delay():
    builder = nets.GraphBuilder()
    builder.add_input("in", 3, input_from="obs")
    builder.add_population("hidden", 2)
    builder.add_output("out", 1)
    for source, target, delay in [
        ("in", "hidden", 1),
        ("in", "hidden", 4),
        ("in", "out", 2),
        ("in", "out", 0),
        ("hidden", "hidden", 2),
        ("hidden", "out", 0),
    ]:
        builder.connect(source, target, delay=delay)
    state = builder.build(key=KEY).initialize_state(5, key=KEY)
    assert state["populations"]["in"].buffer.shape == (5, 4, 3)
    assert state["populations"]["hidden"].buffer.shape == (5, 2, 2)
    assert state["populations"]["out"] == ()
    assert list(state["connections"]) == [
        "in->hidden",
        "in->hidden#2",
        "in->out",
        "in->out#2",
        "hidden->hidden",
        "hidden->out",
    ]


def test_a_chain_of_delays_is_one_delay_of_their_sum():
    populations = [
        nets.Population("in", 1, input_from="obs"),
        nets.Population("middle", 1),
        nets.Population("out", 1, output_to="out"),
    ]
    connections = [
        nets.Connection("middle", "out", identity(), 1),
        nets.Connection("in", "middle", identity(), 2),
    ]
    graph = nets.PopulationGraph(populations, connections, key=KEY)
    assert trace(graph, [1, 2, 3, 4, 5]) == [0, 0, 0, 1, 2]


# --- Order --------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True])
def test_connections_without_delay_run_in_topological_order_whatever_the_listing(recurrent):
    """out = 100 b + 10 a + in, with a = 2 in and b = 3 a."""
    populations = [
        nets.Population("in", 1, input_from="obs"),
        nets.Population("a", 1),
        nets.Population("b", 1),
        nets.Population("out", 1, output_to="out"),
    ]
    edges = [
        nets.Connection("in", "a", nets.Scale(2.0)),
        nets.Connection("a", "b", nets.Scale(3.0)),
        nets.Connection("b", "out", nets.Scale(100.0)),
        nets.Connection("a", "out", nets.Scale(10.0)),
        nets.Connection("in", "out", nets.Scale(1.0)),
    ]
    loop = [nets.Connection("out", "in", nets.Scale(0.0), 1)] if recurrent else []
    x = {"obs": jnp.ones((1, 1))}
    for listing in itertools.permutations(populations):
        for listed in (edges, edges[::-1]):
            graph = nets.PopulationGraph(listing, [*listed, *loop], key=KEY)
            out = graph(graph.initialize_state(1, key=KEY), x)
            assert float(out.output["out"][0, 0]) == 621.0


@pytest.mark.parametrize(
    ("cycle", "message"),
    [
        (["a"], ["a <- a"]),
        (["a", "b"], ["a <- b <- a", "b <- a <- b"]),
        (["a", "b", "c"], ["a <- c <- b <- a", "b <- a <- c <- b", "c <- b <- a <- c"]),
    ],
)
def test_a_cycle_without_delay_is_refused_by_name(cycle, message):
    nodes = [nets.Population(name, 1, output_to=name) for name in ("x", "y", "a", "b", "c", "z")]
    around = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    outside = [("x", "y"), ("y", "a"), ("a", "z"), ("c", "z")]  # acyclic: not to be named
    edges = [nets.Connection(*edge) for edge in [*outside, *around]]
    for listing in (nodes, nodes[::-1]):
        with pytest.raises(ValueError, match="cycle of connections without delay") as caught:
            nets.PopulationGraph(listing, edges, key=KEY)
        named = str(caught.value).split(": ")[1].split(".")[0]
        assert named in message
    # One delay breaks it, wherever it is.
    for index in range(len(cycle)):
        broken = [
            edge._replace(delay=1) if number == len(outside) + index else edge
            for number, edge in enumerate(edges)
        ]
        assert nets.PopulationGraph(nodes, broken, key=KEY).has_cycle


def test_a_population_sums_and_applies_its_activation_once():
    populations = [
        nets.Population("in", 1, input_from="obs"),
        nets.Population("out", 1, jnp.square, input_from="obs", output_to="out"),
    ]
    connections = [nets.Connection("in", "out", nets.Scale(2.0))]
    graph = nets.PopulationGraph(populations, connections, key=KEY)
    assert trace(graph, [1, 2, 3]) == [9, 36, 81]  # (x + 2 x)^2


def test_a_population_that_nothing_reaches_is_the_activation_of_zero():
    populations = [
        nets.Population("idle", 2, jnp.cos),
        nets.Population("spare", 3, jnp.tanh, output_to="spare"),
        nets.Population("out", 1, input_from="obs", output_to="out"),
    ]
    ones = nets.Lift(lambda x: jnp.sum(x, keepdims=True))
    connections = [nets.Connection("idle", "out", ones), nets.Connection("idle", "out", ones, 1)]
    graph = nets.PopulationGraph(populations, connections, key=KEY)
    assert trace(graph, [1, 2, 3]) == [3, 6, 7]  # x + 2 cos 0, and 2 cos 0 from the last step
    out = graph(graph.initialize_state(4, key=KEY), {"obs": jnp.ones((4, 1))})
    np.testing.assert_array_equal(out.output["spare"], np.zeros((4, 3)))


def test_a_graph_needs_no_input():
    """A clock: it counts the steps of the episode."""
    populations = [nets.Population("clock", 1, lambda x: x + 1.0, output_to="out")]
    graph = nets.PopulationGraph(
        populations, [nets.Connection("clock", "clock", identity(), 1)], key=KEY
    )
    state = graph.initialize_state(2, key=KEY)
    done = jnp.zeros((4, 2), bool).at[1, 0].set(True)
    for way in (by_steps, by_unroll):
        out = way(graph, state, {}, done).output["out"][:, :, 0]
        np.testing.assert_array_equal(out.T, [[1, 2, 1, 2], [1, 2, 3, 4]])


# --- Against a recurrence written by hand -------------------------------------------------


class Hand(NamedTuple):
    """A graph, and the same as a loop over time and environments in NumPy."""

    graph: nets.PopulationGraph
    loop: object  # (weights, xs, done) -> output


def feed_forward_graph():
    """Delays, but no population that reaches itself."""
    builder = nets.GraphBuilder()
    builder.add_input("sensors", 3, input_from="obs")
    builder.add_population("hidden", 4, activation=jnp.tanh)
    builder.add_output("motor", 2, output_to="action", activation=jnp.tanh)
    builder.connect("sensors", "hidden")
    builder.connect("sensors", "hidden", delay=3)
    builder.connect("hidden", "motor", delay=2)
    builder.connect("sensors", "motor", delay=1)

    def step(layer, past, x):
        sensors, hidden = past("sensors"), past("hidden")
        now = np.tanh(layer("sensors->hidden", x) + layer("sensors->hidden#2", sensors[-3]))
        motor = layer("hidden->motor", hidden[-2]) + layer("sensors->motor", sensors[-1])
        return {"sensors": x, "hidden": now, "motor": np.tanh(motor)}

    return builder.build(key=KEY), step


def recurrent_graph():
    """A loop, a reciprocal pair with delays, and two connections between one pair."""
    builder = nets.GraphBuilder()
    builder.add_input("sensors", 3, input_from="obs")
    builder.add_population("left", 3, activation=jnp.tanh)
    builder.add_population("right", 2, activation=jnp.tanh)
    builder.add_output("motor", 2, output_to="action")
    builder.connect("sensors", "left")
    builder.connect("left", "left", delay=1)
    builder.connect("left", "right", delay=2, reciprocal=True)
    builder.connect("left", "right")
    builder.connect("right", "motor")
    builder.connect("right", "motor", delay=3)

    def step(layer, past, x):
        before_left, before_right = past("left"), past("right")
        left = np.tanh(
            layer("sensors->left", x)
            + layer("left->left", before_left[-1])
            + layer("right->left", before_right[-2])
        )
        right = np.tanh(layer("left->right", before_left[-2]) + layer("left->right#2", left))
        motor = layer("right->motor", right) + layer("right->motor#2", before_right[-3])
        return {"left": left, "right": right, "motor": motor}

    return builder.build(key=KEY), step


def by_hand(graph, step, weights, xs, done):
    """`motor` of every step, in float64."""
    sizes = {node.name: node.size for node in graph.populations}

    def layer(name, x):
        kernel, bias = weights[name]
        return x @ kernel + bias

    output = np.zeros((*done.shape, sizes["motor"]))
    for env in range(done.shape[1]):
        history = []
        for t in range(done.shape[0]):

            def past(name, history=history):
                return [np.zeros(sizes[name])] * 3 + [now[name] for now in history]

            history.append(step(layer, past, xs[t, env]))
            output[t, env] = history[-1]["motor"]
            if done[t, env]:
                history = []
    return output


@functools.cache
def hand_written(build):
    """A graph with its weights, inputs, and the expected output and gradients."""
    graph, step = build()
    rng = np.random.default_rng(0)
    n_steps, n_envs = 7, 2
    xs = rng.standard_normal((n_steps, n_envs, 3)).astype(np.float32)
    done = np.zeros((n_steps, n_envs), bool)
    done[3, 0] = done[0, 1] = done[n_steps - 1, 1] = True
    weights = {
        name: [
            rng.normal(0.0, 0.6, array.shape).astype(np.float32)
            for array in (graph.connections[name].kernel, graph.connections[name].bias)
        ]
        for name in graph.connections.names
    }
    scale = rng.standard_normal((n_steps, n_envs, 2))

    wide = {name: [array.astype(np.float64) for array in pair] for name, pair in weights.items()}
    output = by_hand(graph, step, wide, xs, done)
    gradients = {name: [np.zeros_like(array) for array in pair] for name, pair in wide.items()}
    for name, pair in wide.items():
        for array, gradient in zip(pair, gradients[name], strict=True):
            for index in np.ndindex(array.shape):
                sides = []
                for sign in (1.0, -1.0):
                    array[index] += sign * 1e-5
                    sides.append(np.sum(scale * by_hand(graph, step, wide, xs, done)))
                    array[index] -= sign * 1e-5
                gradient[index] = (sides[0] - sides[1]) / 2e-5
    return graph, weights, xs, done, scale, output, gradients


@pytest.mark.parametrize("way", [by_unroll, by_steps])
@pytest.mark.parametrize("build", [feed_forward_graph, recurrent_graph])
def test_a_graph_equals_a_recurrence_written_by_hand(build, way):
    graph, weights, xs, done, scale, output, gradients = hand_written(build)
    assert graph.has_cycle == (build is recurrent_graph)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_output(weights):
        def where(graph):
            return [
                array
                for name in weights
                for array in (graph.connections[name].kernel, graph.connections[name].bias)
            ]

        filled = eqx.tree_at(where, graph, jax.tree.leaves(weights))
        state = filled.initialize_state(done.shape[1], key=KEY)
        out = way(filled, state, {"obs": jnp.asarray(xs)}, jnp.asarray(done))
        action = out.output["action"]
        return jnp.sum(jnp.asarray(scale, jnp.float32) * action), action

    got, action = gradient_and_output(weights)
    np.testing.assert_allclose(action, output, rtol=0.0, atol=1e-6)
    for name, pair in gradients.items():
        for array, expected in zip(got[name], pair, strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6, err_msg=name)
            assert np.abs(expected).max() > 1e-2


# --- Transforms ---------------------------------------------------------------------------


def two_populations(transform, delay=0, extra=()):
    nodes = [
        nets.Population("in", 2, input_from="obs"),
        nets.Population("out", 2, output_to="out"),
    ]
    connections = [nets.Connection("in", "out", transform, delay), *extra]
    return nets.PopulationGraph(nodes, connections, key=KEY)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_stateful_transform_runs_as_it_does_alone(recurrent):
    cell = nets.GRU(2, 2, key=KEY)
    loop = [nets.Connection("out", "out", nets.Scale(0.0), 1)] if recurrent else []
    graph = two_populations(cell, 0, loop)
    xs = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 2)), jnp.float32)
    done = jnp.zeros((5, 3), bool).at[2, 1].set(True)
    out = graph.unroll(graph.initialize_state(3, key=KEY), {"obs": xs}, done)
    alone = cell.unroll(cell.initialize_state(3, key=KEY), xs, done)
    assert_close(out.output["out"], alone.output, rtol=1e-6, atol=1e-6)
    assert_close(out.next_state["connections"]["in->out"], alone.next_state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recurrent", [False, True])
def test_statistics_and_penalties_are_those_of_the_delayed_input(recurrent):
    """The penalty of a bottleneck is the divergence of its own mean and deviation, per env."""
    bottleneck = nets.VariationalBottleneck(2, kl_weight=2.0)
    transform = nets.Sequential(
        [nets.Normalizer(2), nets.Lift(lambda x: jnp.concatenate([x, x])), bottleneck]
    )
    loop = [nets.Connection("out", "out", nets.Scale(0.0), 1)] if recurrent else []
    graph = two_populations(transform, 1, loop)
    xs = np.random.default_rng(0).normal(5.0, 2.0, (8, 3, 2)).astype(np.float32)
    state = graph.initialize_state(3, key=KEY)
    out = graph.unroll(state, {"obs": jnp.asarray(xs)}, jnp.zeros((8, 3), bool))
    seen = np.concatenate([np.zeros((1, 3, 2)), xs[:-1]])
    mean = seen / 10.0  # the deviation before any data
    std = np.logaddexp(0.0, mean) + 1e-6
    divergence = 0.5 * np.sum(mean**2 + std**2 - 1.0 - 2.0 * np.log(std), axis=-1)
    np.testing.assert_allclose(out.regularization_loss, 2.0 * divergence, rtol=1e-5)
    updated = graph.update_statistics(out.rollout_extras)
    normalizer = updated.connections["in->out"][0]
    np.testing.assert_allclose(normalizer.mean, seen.mean(axis=(0, 1)), rtol=1e-5)
    assert int(normalizer.count) == 24
    assert int(graph.connections["in->out"][0].count) == 0


def test_penalties_of_connections_add_up_per_environment():
    def penalty(weight):
        @eqx.filter_jit
        def call(self, state, x, rollout_extras=None):
            metrics = {"weight": jnp.full(x.shape[0], weight, jnp.float32)}
            return nets.StatefulModuleOutput(x, state, None, weight * x[:, 0], metrics)

        return type("Penalized", (nets.StatelessModule,), {"__call__": call})()

    second = nets.Connection("in", "out", penalty(10.0), 1)
    plain = nets.Connection("in", "out", nets.Scale(1.0))
    graph = two_populations(penalty(1.0), 0, [second, plain])
    xs = jnp.asarray(np.arange(1, 9).reshape(2, 4, 1) * [1.0, 0.0], jnp.float32)
    out = graph.unroll(graph.initialize_state(4, key=KEY), {"obs": xs}, jnp.zeros((2, 4), bool))
    # Step 0 has no delayed input yet: x, then x + 10 * (x of the step before).
    np.testing.assert_allclose(out.regularization_loss, [[1, 2, 3, 4], [15, 26, 37, 48]])
    assert set(out.metrics) == {"in->out", "in->out#2"}
    np.testing.assert_array_equal(out.metrics["in->out#2"]["weight"], np.full((2, 4), 10.0))


def test_several_connections_of_one_pair_have_weights_of_their_own():
    graph = two_populations(None, 0, [nets.Connection("in", "out"), nets.Connection("in", "out")])
    kernels = [np.asarray(graph.connections[name].kernel) for name in graph.connections.names]
    assert graph.connections.names == ("in->out", "in->out#2", "in->out#3")
    assert len({kernel.tobytes() for kernel in kernels}) == 3
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2)), jnp.float32)
    out = graph(graph.initialize_state(4, key=KEY), {"obs": x}).output["out"]
    np.testing.assert_allclose(out, np.asarray(x) @ sum(kernels), rtol=1e-5, atol=1e-6)


def test_activations_are_float32_whatever_the_transforms_are():
    """Sums in half precision would lose what a long chain adds."""
    half = nets.Lift(lambda x: x.astype(jnp.bfloat16))
    spikes = nets.Population("out", 2, lambda x: x > 0.0, output_to="out")
    nodes = [nets.Population("in", 2, input_from="obs"), spikes]
    edges = [nets.Connection("in", "out", half), nets.Connection("out", "out", half, 1)]
    graph = nets.PopulationGraph(nodes, edges, key=KEY)
    state = graph.initialize_state(1, key=KEY)
    out = graph(state, {"obs": jnp.array([[-3, 2]], jnp.int32)})
    assert out.output["out"].dtype == jnp.float32
    assert out.output["out"].tolist() == [[0.0, 1.0]]
    assert signature(out.next_state) == signature(state)


# --- The builder --------------------------------------------------------------------------


def test_builder_and_records_give_the_same_graph():
    builder = nets.GraphBuilder()
    builder.add_input("sensors", 3, input_from="obs", activation=jnp.tanh)
    builder.add_population("hidden", 4, activation=jnp.tanh)
    builder.add_output("motor", 2, activation=jnp.sin)
    builder.add_output("readout", 4, output_to="value")
    builder.connect("sensors", "hidden", delay=2)
    builder.connect("hidden", "motor", reciprocal=True, delay=1)
    gru = nets.GRU(4, 4, key=KEY)
    builder.connect("hidden", "readout", gru)
    records = nets.PopulationGraph(
        [
            nets.Population("sensors", 3, jnp.tanh, input_from="obs"),
            nets.Population("hidden", 4, jnp.tanh),
            nets.Population("motor", 2, jnp.sin, output_to="motor"),
            nets.Population("readout", 4, None, output_to="value"),
        ],
        [
            nets.Connection("sensors", "hidden", None, 2),
            nets.Connection("hidden", "motor", None, 1),
            nets.Connection("motor", "hidden", None, 1),
            nets.Connection("hidden", "readout", gru),
        ],
        key=KEY,
    )
    built = builder.build(key=KEY)
    assert jax.tree.structure(built) == jax.tree.structure(records)
    assert_same(jax.tree.leaves(built), jax.tree.leaves(records))
    assert jax.tree.leaves(built)


def test_repr_reads_as_the_graph():
    builder = nets.GraphBuilder()
    builder.add_input("sensors", 3, input_from="obs")
    builder.add_population("hidden", 4)
    builder.add_output("motor", 2, output_to="action")
    builder.connect("sensors", "hidden", nets.Sequential([nets.GRU(3, 4, key=KEY)]))
    builder.connect("hidden", "motor", delay=2)
    builder.connect("hidden", "motor")
    assert repr(builder.build(key=KEY)).splitlines() == [
        "PopulationGraph(",
        "  sensors [3] <- input['obs']",
        "  hidden [4]",
        "  motor [2] -> output['action']",
        "  sensors->hidden: Sequential",
        "  hidden->motor: Dense, delay 2",
        "  hidden->motor#2: Dense",
        ")",
    ]


# --- What is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ("a", [("a", "b")], r"`a->b` names the population `b`, which is not there; .* \['a'\]"),
        ("a", [("b", "a")], r"`b->a` names the population `b`, which is not there"),
        ("aa", [], "two populations named `a`"),
        ("a", [("a", "a", None, -1)], "`a->a` needs a delay that is an int of at least 0, .* -1"),
        ("a", [("a", "a", None, 1.0)], r"delay that is an int of at least 0, but got 1\.0"),
        ("a", [("a", "a", None, True)], "delay that is an int of at least 0, but got True"),
        ("", [], "needs a population with `output_to`"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(nodes, edges, message):
    nodes = [nets.Population(name, 2, output_to=f"out{n}") for n, name in enumerate(nodes)]
    with pytest.raises(ValueError, match=message):
        nets.PopulationGraph(nodes, [nets.Connection(*edge) for edge in edges], key=KEY)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_sizes_are_ints_of_at_least_one(size):
    node = nets.Population("a", size, output_to="out")
    with pytest.raises(ValueError, match=f"`a` needs a size .* at least 1, but got {size}"):
        nets.PopulationGraph([node], [], key=KEY)


def test_two_populations_for_one_output_are_refused():
    nodes = [nets.Population(name, 1, output_to="out") for name in "ab"]
    with pytest.raises(ValueError, match="Two populations go to the output `out`"):
        nets.PopulationGraph(nodes, [], key=KEY)


def test_a_transform_that_is_no_module_is_refused_by_the_name_of_its_connection():
    linear = eqx.nn.Linear(2, 2, key=KEY)
    with pytest.raises(TypeError, match=r"`in->out` must be a `StatefulModule`.*`Linear`.*`Lift"):
        two_populations(linear)


def test_a_transform_for_two_directions_is_refused():
    with pytest.raises(ValueError, match="default transforms in both directions"):
        nets.GraphBuilder().connect("a", "b", nets.Scale(1.0), reciprocal=True)


def test_a_missing_entry_of_the_input_is_named_and_others_are_ignored():
    graph = two_populations(nets.Scale(2.0))
    state = graph.initialize_state(3, key=KEY)
    with pytest.raises(ValueError, match=r"`PopulationGraph` needs the keys \['obs'\].* missing"):
        graph(state, {"other": jnp.zeros((3, 2))})
    with pytest.raises(TypeError, match="`PopulationGraph` takes a dict with the keys"):
        graph(state, jnp.zeros((3, 2)))
    out = graph(state, {"obs": jnp.ones((3, 2)), "other": jnp.zeros((3, 7)), "goal": {"x": None}})
    np.testing.assert_array_equal(out.output["out"], np.full((3, 2), 2.0))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("transform", "brings"),
    [
        (nets.Lift(lambda x: x[:1]), "[{lead}, 1]"),
        (nets.Lift(lambda x: x[0]), "[{lead}]"),
        (nets.Splitter(a=1, b=1), "a `dict`"),
    ],
)
def test_a_transform_of_the_wrong_size_is_named_with_its_target(transform, brings, delay, sequence):
    graph = two_populations(transform, delay)
    state = graph.initialize_state(3, key=KEY)
    lead = "5, 3" if sequence else "3"
    run = functools.partial(graph.unroll, done=jnp.zeros((5, 3), bool)) if sequence else graph
    xs = {"obs": jnp.zeros((5, 3, 2) if sequence else (3, 2))}
    with pytest.raises(ValueError, match="The connection `in->out` must bring") as caught:
        run(state, xs)
    assert f"shape [{lead}, 2] to the population `out`" in str(caught.value)
    assert f"brings {brings.format(lead=lead)}." in str(caught.value)


def test_an_input_of_the_wrong_size_is_named_with_its_population():
    graph = two_populations(nets.Scale(1.0))
    state = graph.initialize_state(3, key=KEY)
    for wrong, brings in [(jnp.zeros((3, 5)), r"\[3, 5\]"), ({"x": jnp.zeros((3, 2))}, "a `dict`")]:
        with pytest.raises(ValueError, match=f"entry 'obs' must .* `in`.*brings {brings}"):
            graph(state, {"obs": wrong})


def test_an_activation_that_is_not_elementwise_is_refused():
    nodes = [nets.Population("in", 2, jnp.sum, input_from="obs", output_to="out")]
    graph = nets.PopulationGraph(nodes, [], key=KEY)
    with pytest.raises(ValueError, match=r"`in` must be elementwise, but made \[\] of \[3, 2\]"):
        graph(graph.initialize_state(3, key=KEY), {"obs": jnp.zeros((3, 2))})


def test_the_state_of_another_graph_is_refused():
    graph, other = signal_graph(2), signal_graph(3)
    x = {"obs": jnp.zeros((4, 1))}
    with pytest.raises(ValueError, match=r"\{'in': \(2, 1\), .* but got \{'in': \(3, 1\)"):
        graph(other.initialize_state(4, key=KEY), x)
    for wrong in ((), {}, graph.initialize_state(4, key=KEY)["populations"]):
        with pytest.raises(ValueError, match=r"another structure\. Make the state with"):
            graph(wrong, x)


def test_an_error_in_a_transform_carries_its_path():
    wrong = nets.Sequential([nets.Dense(3, 2, key=KEY)])
    graph = nets.Sequential([two_populations(wrong)])
    with pytest.raises(ValueError, match=r"\[B, 3\], but got \[4, 2\]") as caught:
        graph(graph.initialize_state(4, key=KEY), {"obs": jnp.zeros((4, 2))})
    assert "network.layers[0].connections['in->out'].layers[0]" in caught.value.__notes__[-1]


@pytest.mark.parametrize("hook", ["initialize_state", "reset_state", "update_statistics"])
def test_an_error_in_a_hook_of_a_transform_carries_its_path(hook):
    def fail(*args, **kwargs):
        raise RuntimeError(hook)

    def call(self, state, x, rollout_extras=None):
        return nets.StatefulModuleOutput(x, state)

    failing = type("Failing", (nets.StatefulModule,), {"__call__": call, hook: fail})()
    graph = two_populations(failing)
    state = two_populations(nets.Scale(1.0)).initialize_state(2, key=KEY)
    calls = {
        "initialize_state": lambda: graph.initialize_state(2, key=KEY),
        "reset_state": lambda: graph.reset_state(state),
        "update_statistics": lambda: graph.update_statistics(None),
    }
    with pytest.raises(RuntimeError, match=hook) as caught:
        calls[hook]()
    assert "network.connections['in->out']" in caught.value.__notes__[-1]
