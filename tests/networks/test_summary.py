"""`summarize`: numbers counted by hand, places as in error messages, and nothing computed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ppo as ep
from eqx_ppo import networks as nets
from tests.helpers.modules import MODULE_CASES, CountUp, Observation, Unused

KEY = jax.random.key(0)
CASES = {case.name: case for case in MODULE_CASES}


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def numbers(summary):
    """For each module its parameters, frozen numbers, and state with its bytes."""
    return {
        row.path: (row.parameters, row.frozen, row.state, row.state_bytes) for row in summary.rows
    }


def test_an_actor_critic_counted_by_hand():
    """Size 3 to 2 actions, one hidden layer of 5 in the actor, none in the critic."""
    network = nets.make_mlp_actor_critic(3, 2, [5], [], key=KEY)
    summary = nets.summarize(network, jnp.zeros(3))
    random = (0, 0, 3, 12)  # a key of two words, and the number of draws
    assert numbers(summary) == {
        "network": (0, 0, 0, 0),
        "network.layers[0]": (0, 3 + 3 + 2, 0, 0),  # mean, variance, count in two words
        "network.layers[1]": (0, 0, 0, 0),
        "network.layers[1].action": (0, 0, 0, 0),
        "network.layers[1].action.layers[0]": (3 * 5 + 5, 0, 0, 0),
        "network.layers[1].action.layers[1]": (5 * 4 + 4, 0, 0, 0),
        "network.layers[1].action.layers[2]": random,
        "network.layers[1].value": (0, 0, 0, 0),
        "network.layers[1].value.layers[0]": (3 + 1, 0, 0, 0),
    }
    assert (summary.parameters, summary.frozen) == (20 + 24 + 4, 8)
    assert (summary.state, summary.state_bytes) == (3, 12)
    assert [row.type for row in summary.rows] == [
        "Sequential",
        "Normalizer",
        "PPOAdapter",
        "Sequential",
        "Dense",
        "Dense",
        "NormalTanhSampler",
        "Sequential",
        "Dense",
    ]
    assert summary["network"].output == nets.PPONetworkOutput(float32(2), float32(), float32())
    assert summary["network.layers[1].action.layers[1]"].output == float32(4)
    assert summary["network.layers[1].action"].output == nets.Sample(float32(2), float32())
    assert summary["network.layers[1].value"].output == float32(1)


def test_the_table_of_an_actor_critic():
    network = nets.Sequential(
        [
            nets.Normalizer(Observation(3, 2)),
            nets.Flattener(),
            nets.Dense(5, 300, key=KEY),
            nets.PPOAdapter(
                action=nets.Sequential(
                    [nets.Dense(300, 4, key=KEY), nets.NormalTanhSampler(entropy_weight=0.0)]
                ),
                value=nets.Dense(300, 1, key=KEY),
            ),
        ]
    )
    text = str(nets.summarize(network, Observation(jnp.zeros(3), jnp.zeros(2))))
    assert text == repr(nets.summarize(network, Observation(jnp.zeros(3), jnp.zeros(2))))
    assert text == TABLE.strip("\n")


TABLE = """
Module                         Type               Output               Parameters  State/env  Frozen
----------------------------------------------------------------------------------------------------
network                        Sequential         actions: [2]
                                                  log_likelihoods: []
                                                  value_estimates: []
network.layers[0]              Normalizer         proprio: [3]                                    14
                                                  goal: [2]
network.layers[1]              Flattener          [5]
network.layers[2]              Dense              [300]                     1,800
network.layers[3]              PPOAdapter         actions: [2]
                                                  log_likelihoods: []
                                                  value_estimates: []
network.layers[3].action       Sequential         action: [2]
                                                  log_likelihood: []
network.layers[3].action       Dense              [4]                       1,204
  .layers[0]
network.layers[3].action       NormalTanhSampler  action: [2]                       3 (12 B)
  .layers[1]                                      log_likelihood: []
network.layers[3].value        Dense              [1]                         301
----------------------------------------------------------------------------------------------------
Total                                                                       3,305   3 (12 B)      14
"""


def test_what_is_not_trained_is_counted_apart():
    class Table(nets.StatelessModule):
        gain: jax.Array
        mask: nets.Constant
        order: jax.Array
        name: str
        rate: float

        def __init__(self):
            self.gain = jnp.ones((2, 3))
            self.mask = nets.Constant({"a": jnp.ones(5), "b": jnp.ones((), jnp.bfloat16)})
            self.order = jnp.arange(7)
            self.name, self.rate = "table", 0.5

        def __call__(self, state, x, rollout_extras=None):
            return nets.StatefulModuleOutput(x, state)

    summary = nets.summarize(Table(), jnp.zeros(2))
    assert numbers(summary) == {"network": (6, 5 + 1 + 7, 0, 0)}


def test_a_module_below_a_constant_is_frozen():
    class Pretrained(nets.StatefulModule):
        encoder: nets.Constant
        head: nets.Dense

        def __call__(self, state, x, rollout_extras=None):
            encoded = self.encoder.value((), x).output
            return self.head(state, encoded)

    network = Pretrained(nets.Constant(nets.Dense(3, 4, key=KEY)), nets.Dense(4, 2, key=KEY))
    summary = nets.summarize(network, jnp.zeros(3))
    assert numbers(summary) == {
        "network": (0, 0, 0, 0),
        "network.encoder.value": (0, 16, 0, 0),
        "network.head": (10, 0, 0, 0),
    }
    assert summary["network.encoder.value"].output == float32(4)


class Ensemble(nets.StatefulModule):
    """Holds modules in a list, a dict and a field, and calls them as it likes."""

    cells: list
    heads: dict
    count: CountUp
    shift: jax.Array

    def __init__(self):
        self.cells = [nets.GRU(3, 4, key=KEY), nets.Sequential([nets.GRU(4, 2, key=KEY)])]
        self.heads = {"b": nets.Dense(2, 5, key=KEY), "a": nets.Dense(2, 1, key=KEY)}
        self.count = CountUp()
        self.shift = jnp.zeros(5)

    def __call__(self, state, x, rollout_extras=None):
        assert isinstance(self.cells[1], nets.Sequential)
        assert type(self.count).__name__ == "CountUp"
        first = self.cells[0](state["first"], x)
        second = self.cells[1](state["second"], first.output)
        head = eqx.filter_jit(lambda head, x: head((), x))(self.heads["b"], second.output)
        assert self.cells[1][0].hidden_features == 2
        next_state = {**state, "first": first.next_state, "second": second.next_state}
        return nets.StatefulModuleOutput(head.output + self.shift[None], next_state)

    def initialize_state(self, batch_size, *, key):
        return {
            "first": self.cells[0].initialize_state(batch_size, key=key),
            "second": self.cells[1].initialize_state(batch_size, key=key),
            "own": jnp.zeros((batch_size, 2, 3), jnp.bool_),
        }


def test_modules_in_the_fields_of_a_users_own():
    summary = nets.summarize(nets.Sequential([Ensemble()]), jnp.zeros(3))
    within = "network.layers[0]"
    assert numbers(summary) == {
        "network": (0, 0, 0, 0),
        within: (5, 0, 6, 6),
        f"{within}.cells[0]": (3 * 4 * (3 + 4 + 1) + 4, 0, 4, 16),
        f"{within}.cells[1]": (0, 0, 0, 0),
        f"{within}.cells[1].layers[0]": (3 * 2 * (4 + 2 + 1) + 2, 0, 2, 8),
        f"{within}.heads['a']": (3, 0, 0, 0),
        f"{within}.heads['b']": (15, 0, 0, 0),
        f"{within}.count": (0, 0, 0, 0),  # neither called nor part of the state
    }
    assert summary[f"{within}.heads['b']"].output == float32(5)
    assert summary[f"{within}.heads['a']"].output is None
    assert summary[f"{within}.count"].output is None
    assert (summary.state, summary.state_bytes) == (12, 30)


def test_modules_under_transformations():
    """Four layers in one, mapped over; and a module that works on a copy of itself."""

    class Stacked(nets.StatelessModule):
        members: nets.Dense
        copies: bool

        def __call__(self, state, x, rollout_extras=None):
            if self.copies:
                return type(self)(self.members, copies=False)(state, x)
            run = eqx.filter_vmap(lambda member: member((), x).output)
            return nets.StatefulModuleOutput(jnp.sum(run(self.members), axis=0), state)

    members = eqx.filter_vmap(lambda key: nets.Dense(3, 2, key=key))(jax.random.split(KEY, 4))
    for copies in (False, True):
        summary = nets.summarize(Stacked(members, copies), jnp.zeros(3))
        assert numbers(summary) == {
            "network": (0, 0, 0, 0),
            "network.members": (4 * (3 * 2 + 2), 0, 0, 0),
        }
        assert summary["network"].output == float32(2)
        assert summary["network.members"].output == float32(2)


def test_connections_of_a_graph():
    builder = nets.GraphBuilder()
    builder.add_input("sensors", 3, input_from="obs")
    builder.add_population("hidden", 4)
    builder.add_output("motor", 2, output_to="action")
    memory = nets.Sequential([nets.Normalizer(3), nets.GRU(3, 4, key=KEY)])
    builder.connect("sensors", "hidden", memory)
    builder.connect("hidden", "hidden", delay=1)
    builder.connect("hidden", "motor", delay=3)
    builder.connect("sensors", "motor")
    network = nets.Sequential([builder.build(key=KEY)])
    summary = nets.summarize(network, {"obs": jnp.zeros(3)})
    graph = "network.layers[0]"
    assert numbers(summary) == {
        "network": (0, 0, 0, 0),
        graph: (0, 0, 3 * 4 + 1, 52),  # the last three activations of `hidden`, and a position
        f"{graph}.connections['sensors->hidden']": (0, 0, 0, 0),
        f"{graph}.connections['sensors->hidden'].layers[0]": (0, 8, 0, 0),
        f"{graph}.connections['sensors->hidden'].layers[1]": (3 * 4 * (3 + 4 + 1) + 4, 0, 4, 16),
        f"{graph}.connections['hidden->hidden']": (20, 0, 0, 0),
        f"{graph}.connections['hidden->motor']": (10, 0, 0, 0),
        f"{graph}.connections['sensors->motor']": (8, 0, 0, 0),
    }
    assert summary[graph].output == {"action": float32(2)}
    assert summary[f"{graph}.connections['hidden->motor']"].output == float32(2)


def test_a_child_that_is_not_called_says_so():
    network = Unused(used=nets.Scale(2.0), spare=nets.Sequential([CountUp()]))
    summary = nets.summarize(network, jnp.zeros(3))
    assert summary["network['spare'].layers[0]"].output is None
    assert summary["network['spare'].layers[0]"].state == 1
    lines = str(summary).splitlines()
    assert next(line for line in lines if "spare" in line).endswith("not called")


def test_an_array_in_two_places_is_trained_twice_and_counted_twice():
    layer = nets.Dense(3, 3, key=KEY)
    summary = nets.summarize(nets.Sequential([layer, layer]), jnp.zeros(3))
    assert summary.parameters == 24


def words(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.mark.parametrize("name", CASES)
def test_totals_are_those_of_the_tree_for_every_module(name):
    network, sample = CASES[name].build(KEY), CASES[name].sample
    summary = nets.summarize(network, sample)
    mask = nets.trainable(network)
    arrays = [leaf for leaf in jax.tree.leaves(network) if eqx.is_array(leaf)]
    trained = jax.tree.leaves(eqx.filter(network, mask))
    assert summary.parameters == sum(leaf.size for leaf in trained)
    assert summary.parameters + summary.frozen == sum(leaf.size for leaf in arrays)
    one = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), sample)

    def run():
        state = network.initialize_state(1, key=KEY)
        return jax.tree.map(words, state), network(state, one).output

    state, output = jax.eval_shape(run)
    assert summary.state == sum(leaf.size for leaf in jax.tree.leaves(state))
    nbytes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    assert summary.state_bytes == sum(nbytes)
    assert summary["network"].type == type(network).__name__
    assert summary["network"].output == jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), output
    )
    assert max(len(line) for line in str(summary).splitlines()) <= 100


def test_paths_are_those_of_error_messages():
    def network(size):
        action = nets.Sequential(
            [nets.Dense(size, 4, key=KEY), nets.NormalTanhSampler(entropy_weight=0.0)]
        )
        value = nets.Parallel(a=nets.Dense(3, 1, key=KEY))
        return nets.Sequential([nets.PPOAdapter(nets.Parallel(arm=action), value)])

    with pytest.raises(ValueError, match=r"\[B, 4\], but got \[2, 3\]") as caught:
        nets.summarize(network(4), jnp.zeros(3))
    place = "network.layers[0].action['arm'].layers[0]"
    assert f"In module `{place}` (`Dense`)" in " ".join(caught.value.__notes__)
    assert nets.summarize(network(3), jnp.zeros(3))[place].parameters == 3 * 4 + 4


def test_a_place_that_is_not_there_is_refused():
    summary = nets.summarize(nets.Scale(1.0), jnp.zeros(3))
    with pytest.raises(ValueError, match=r"no module at `network\.x`; there are \['network'\]"):
        summary["network.x"]


def test_nothing_is_computed():
    """Terabytes of output, state and input."""
    wide = nets.Lift(lambda x: jnp.broadcast_to(x[:1, None], (10**6, 10**6)))
    network = nets.Sequential([nets.Delay(float32(10**5), 10**8), wide])
    summary = nets.summarize(network, float32(10**5))
    assert summary["network"].output == float32(10**6, 10**6)
    assert summary.state == 10**13 + 1
    assert "10,000,000,000,001 (40,000,000,000,004 B)" in str(summary)


def test_the_network_stays_as_it_is():
    network, sample = CASES["nested"].build(KEY), CASES["nested"].sample
    leaves, structure = jax.tree.flatten(network)
    first = str(nets.summarize(network, sample))
    with pytest.raises(ValueError, match="structure"):
        nets.summarize(network, jnp.zeros(3))
    assert jax.tree.structure(network) == structure
    assert all(a is b for a, b in zip(jax.tree.leaves(network), leaves, strict=True))
    assert str(nets.summarize(network, sample)) == first


@pytest.mark.parametrize(
    "sample",
    [
        {"a": jnp.zeros((2, 3)), "b": jnp.zeros((), jnp.uint8)},
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.uint8)},
        {"a": float32(2, 3), "b": jax.ShapeDtypeStruct((), jnp.uint8)},
    ],
)
def test_any_kind_of_sample_will_do(sample):
    summary = ep.summarize(nets.Sequential([CountUp(), nets.Filter({"x": "input"})]), sample)
    assert summary["network"].output == {
        "x": {"a": float32(2, 3), "b": jax.ShapeDtypeStruct((), jnp.uint8)}
    }
    text = str(summary)
    assert "['x']['a']: [2, 3]" in text
    assert "['x']['b']: uint8[]" in text


def test_long_paths_and_outputs_are_broken_to_fit():
    network = nets.Sequential([nets.Scale(1.0)])
    for depth in range(8):
        network = nets.Parallel({f"population_{depth}": network})
    lines = str(nets.summarize(network, jnp.zeros(3))).splitlines()
    assert max(len(line) for line in lines) <= 100
    assert lines[-1].split() == ["Total", "0", "0", "(0", "B)", "0"]
    # Joined again, the last path is whole.
    starts = [index for index, line in enumerate(lines) if line.startswith("network")]
    column = [line[: lines[0].index("Type")].strip() for line in lines[starts[-1] : -2]]
    expected = "".join(f"['population_{depth}']" for depth in reversed(range(8)))
    assert "".join(column) == f"network{expected}.layers[0]"
