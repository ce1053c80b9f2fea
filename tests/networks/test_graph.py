"""`PopulationGraph`: delays, order, cycles, and a recurrence written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import networks as nets

KEY = jax.random.key(0)


def identity(size):
    return nets.Lift(lambda x: x) if size else None


def signal_graph(delay, repeats=1):
    """One input unit that reaches one output unit after `delay` steps, unchanged."""
    builder = nets.GraphBuilder()
    builder.add_input("in", 1, input_from="obs")
    builder.add_output("out", 1)
    for _ in range(repeats):
        builder.connect("in", "out", identity(1), delay=delay)
    return builder.build(key=KEY)


def trace(graph, values, done_after=()):
    """The output of a one-unit graph for one environment, step by step."""
    state = graph.initialize_state(1, key=KEY)
    xs = {"obs": jnp.asarray(values, jnp.float32).reshape(-1, 1, 1)}
    done = jnp.zeros((len(values), 1), bool)
    for time in done_after:
        done = done.at[time].set(True)
    return graph.unroll(state, xs, done).output["out"].ravel().tolist()


@pytest.mark.parametrize(
    ("delay", "expected"),
    [(0, [1, 2, 3, 4, 5]), (1, [0, 1, 2, 3, 4]), (2, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 1, 2])],
)
def test_a_delay_reads_exactly_that_many_steps_back(delay, expected):
    assert trace(signal_graph(delay), [1, 2, 3, 4, 5]) == expected


@pytest.mark.parametrize(
    ("reset", "expected"),
    [
        (0, [0, 0, 0, 2, 3, 4]),
        (1, [0, 0, 0, 0, 3, 4]),
        (2, [0, 0, 1, 0, 0, 4]),
        (3, [0, 0, 1, 2, 0, 0]),
        (4, [0, 0, 1, 2, 3, 0]),
        (5, [0, 0, 1, 2, 3, 4]),
    ],
)
def test_a_reset_empties_the_buffers(reset, expected):
    assert trace(signal_graph(2), [1, 2, 3, 4, 5, 6], [reset]) == expected


def test_edges_of_one_source_share_a_buffer_as_long_as_the_longest():
    builder = nets.GraphBuilder()
    builder.add_input("in", 1, input_from="obs")
    builder.add_output("out", 1)
    for delay in (1, 3, 2):
        builder.connect("in", "out", identity(1), delay=delay)
    graph = builder.build(key=KEY)
    state = graph.initialize_state(4, key=KEY)
    assert state["populations"]["in"].buffer.shape == (4, 3, 1)
    assert state["populations"]["out"] == ()
    # out[t] = in[t-1] + in[t-2] + in[t-3]
    assert trace(graph, [1, 10, 100, 1000, 10000]) == [0, 1, 11, 111, 1110]
    assert list(state["connections"]) == ["in->out", "in->out#2", "in->out#3"]


def test_connections_without_delay_run_in_topological_order_whatever_the_listing():
    populations = [
        nets.Population("out", 1, output_to="out"),
        nets.Population("middle", 1),
        nets.Population("in", 1, input_from="obs"),
    ]
    connections = [
        nets.Connection("middle", "out", nets.Scale(10.0)),
        nets.Connection("in", "middle", nets.Scale(2.0)),
        nets.Connection("in", "out", nets.Scale(1.0)),
    ]
    graph = nets.PopulationGraph(populations, connections, key=KEY)
    assert trace(graph, [1, 2, 3]) == [21, 42, 63]


def test_a_population_sums_and_applies_its_activation_once():
    populations = [
        nets.Population("in", 1, input_from="obs"),
        nets.Population("out", 1, jnp.square, input_from="obs", output_to="out"),
    ]
    connections = [nets.Connection("in", "out", nets.Scale(2.0))]
    graph = nets.PopulationGraph(populations, connections, key=KEY)
    assert trace(graph, [1, 2, 3]) == [9, 36, 81]  # (x + 2 x)^2


def test_a_cycle_without_delay_is_refused_by_name():
    nodes = [nets.Population(name, 1, output_to=name) for name in ("a", "b", "c", "d")]
    edges = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]
    with pytest.raises(ValueError, match=r"(a <- c <- b <- a)|(b <- a <- c <- b)"):
        nets.PopulationGraph(nodes, [nets.Connection(*edge) for edge in edges], key=KEY)
    with pytest.raises(ValueError, match="a <- a"):
        nets.PopulationGraph(nodes, [nets.Connection("a", "a")], key=KEY)
    # One delay breaks it.
    delayed = [nets.Connection(*edge) for edge in edges[1:]]
    nets.PopulationGraph(nodes, [nets.Connection("a", "b", delay=1), *delayed], key=KEY)


def test_a_graph_equals_a_recurrence_written_by_hand():
    builder = nets.GraphBuilder()
    builder.add_input("sensors", 3, input_from="obs")
    builder.add_population("hidden", 4, activation=jnp.tanh)
    builder.add_output("motor", 2, output_to="action")
    builder.connect("sensors", "hidden")
    builder.connect("hidden", "hidden", delay=1)
    builder.connect("hidden", "motor", delay=2)
    builder.connect("sensors", "motor", delay=1, reciprocal=False)
    graph = builder.build(key=KEY)

    n_steps, n_envs = 9, 2
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((n_steps, n_envs, 3))
    done = np.zeros((n_steps, n_envs), bool)
    done[3, 0] = done[0, 1] = done[8, 1] = True

    def dense(name, x):
        layer = graph.connections[name]
        return x @ np.asarray(layer.kernel, np.float64) + np.asarray(layer.bias, np.float64)

    expected = np.zeros((n_steps, n_envs, 2))
    for env in range(n_envs):
        hidden, sensors = [np.zeros(4)] * 2, [np.zeros(3)]
        for t in range(n_steps):
            now = np.tanh(
                dense("sensors->hidden", xs[t, env]) + dense("hidden->hidden", hidden[-1])
            )
            expected[t, env] = dense("hidden->motor", hidden[-2]) + dense(
                "sensors->motor", sensors[-1]
            )
            hidden, sensors = [*hidden, now], [*sensors, xs[t, env]]
            if done[t, env]:
                hidden, sensors = [np.zeros(4)] * 2, [np.zeros(3)]
    state = graph.initialize_state(n_envs, key=KEY)
    out = graph.unroll(state, {"obs": jnp.asarray(xs, jnp.float32)}, jnp.asarray(done))
    np.testing.assert_allclose(out.output["action"], expected, atol=1e-6)


def test_stateful_transforms_are_routed():
    transform = nets.Sequential(
        [
            nets.Normalizer(1),
            nets.Delay(jnp.zeros(1), 1),
            nets.Lift(lambda x: jnp.concatenate([x, x])),
            nets.VariationalBottleneck(1, kl_weight=2.0),
        ]
    )
    nodes = [
        nets.Population("in", 1, input_from="obs"),
        nets.Population("out", 1, output_to="out"),
    ]
    graph = nets.PopulationGraph(nodes, [nets.Connection("in", "out", transform, 1)], key=KEY)
    state = graph.initialize_state(3, key=KEY)
    xs = {"obs": jnp.asarray(np.random.default_rng(0).normal(5.0, 2.0, (8, 3, 1)), jnp.float32)}
    out = graph.unroll(state, xs, jnp.zeros((8, 3), bool))
    # The penalty is one value per environment, and the statistics are those of the delayed input.
    assert out.regularization_loss.shape == (8, 3)
    updated = graph.update_statistics(out.rollout_extras)
    seen = np.concatenate([np.zeros((1, 3, 1)), np.asarray(xs["obs"])[:-1]])
    normalizer = updated.connections["in->out"][0]
    np.testing.assert_allclose(normalizer.mean, seen.mean(axis=(0, 1)), rtol=1e-5)
    assert int(normalizer.count) == 24
    assert int(graph.connections["in->out"][0].count) == 0


def test_errors_name_the_culprit():
    a = nets.Population("a", 2, input_from="obs", output_to="out")
    with pytest.raises(ValueError, match=r"`b`, which is not there; there are \['a'\]"):
        nets.PopulationGraph([a], [nets.Connection("a", "b")], key=KEY)
    with pytest.raises(ValueError, match="two populations named `a`"):
        nets.PopulationGraph([a, a], [], key=KEY)
    with pytest.raises(ValueError, match="delay that is an int of at least 0, but got -1"):
        nets.PopulationGraph([a], [nets.Connection("a", "a", delay=-1)], key=KEY)
    with pytest.raises(ValueError, match="needs a population with `output_to`"):
        nets.PopulationGraph([a._replace(output_to=None)], [], key=KEY)
    with pytest.raises(ValueError, match="output `out`"):
        nets.PopulationGraph([a, a._replace(name="b")], [], key=KEY)
    with pytest.raises(ValueError, match="default transforms in both directions"):
        nets.GraphBuilder().connect("a", "b", nets.Scale(1.0), reciprocal=True)

    graph = nets.PopulationGraph([a], [nets.Connection("a", "a", nets.Flattener(), 1)], key=KEY)
    state = graph.initialize_state(3, key=KEY)
    with pytest.raises(ValueError, match=r"\['obs'\] are missing"):
        graph(state, {"other": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match="to the population `a` to have shape"):
        graph(state, {"obs": jnp.zeros((3, 5))})


def test_an_error_in_a_transform_carries_its_path():
    nodes = [nets.Population("in", 2, input_from="obs"), nets.Population("out", 1, output_to="o")]
    wrong = nets.Sequential([nets.Dense(3, 1, key=KEY)])
    graph = nets.Sequential(
        [nets.PopulationGraph(nodes, [nets.Connection("in", "out", wrong)], key=KEY)]
    )
    with pytest.raises(ValueError, match=r"\[B, 3\], but got \[4, 2\]") as caught:
        graph(graph.initialize_state(4, key=KEY), {"obs": jnp.zeros((4, 2))})
    assert "network.layers[0].connections['in->out'].layers[0]" in caught.value.__notes__[-1]


def test_repr_reads_as_the_graph():
    assert repr(signal_graph(2)).splitlines() == [
        "PopulationGraph(",
        "  in [1] <- input['obs']",
        "  out [1] -> output['out']",
        "  in->out: Lift, delay 2",
        ")",
    ]
