"""`check_module` finds what is wrong, says where, and leaves right modules alone."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import ContractError, check_module, networks as nets
from eqx_ppo.networks import StatefulModuleOutput
from eqx_ppo.networks._conformance._rules import RULES
from eqx_ppo.networks._conformance._trial import random_inputs
from tests.helpers import broken
from tests.helpers.broken import BROKEN, FLAT
from tests.helpers.modules import MODULE_CASES
from tests.helpers.trees import assert_same

CASES = {case.name: case for case in MODULE_CASES}


def findings(module, sample, **options):
    with pytest.raises(ContractError) as caught:
        check_module(module, sample, **options)
    return caught.value.findings


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_right_module_is_flagged(name):
    check_module(CASES[name].build(jax.random.key(7)), CASES[name].sample)


# --- Right modules that look unusual ------------------------------------------------------


def noises(keys):
    return jax.vmap(lambda key: jax.random.normal(key, (3,), jnp.float32))(keys)


class Colored(nets.StatefulModule):
    """Noise that starts from zero in every episode, so that the first step shows none."""

    def __call__(self, state, x, rollout_extras=None):
        stream, level = state
        after = 0.9 * level + noises(nets.draw_keys(stream))
        return StatefulModuleOutput(x + level, (nets.advance(stream), after))

    def initialize_state(self, batch_size, *, key):
        keys = jax.random.split(key, batch_size)
        stream = nets.RandomState(keys, jnp.zeros(batch_size, jnp.uint32))
        return stream, jnp.zeros((batch_size, 3), jnp.float32)

    def reset_state(self, prev_state):
        return prev_state[0], jnp.zeros_like(prev_state[1])


class PerEpisode(Colored):
    """One draw per episode: `level` holds it, and the count moves at the first step."""

    def __call__(self, state, x, rollout_extras=None):
        stream, started = state
        draws = stream.draws + jnp.where(started[:, 0] > 0.0, 0, 1).astype(jnp.uint32)
        stream = stream._replace(draws=draws)
        y = x + noises(nets.draw_keys(stream))
        return StatefulModuleOutput(y, (stream, jnp.ones_like(started)))


class Sticky(Colored):
    """Repeats its last output now and then, which equal inputs do not show."""

    def __call__(self, state, x, rollout_extras=None):
        stream, last = state
        repeats = jax.vmap(jax.random.bernoulli)(nets.draw_keys(stream))
        y = jnp.where(repeats[:, None], last, x)
        return StatefulModuleOutput(y, (nets.advance(stream), y))


class Seldom(nets.RandomModule):
    """Noise at one step in fifty."""

    def __call__(self, state, x, rollout_extras=None):
        keys = nets.draw_keys(state)
        acts = jax.vmap(lambda key: jax.random.bernoulli(key, 0.02))(keys)
        return StatefulModuleOutput(jnp.where(acts[:, None], -x, x), nets.advance(state))


class Half(nets.StatelessModule):
    """Two layers in bfloat16, whose rounding differs under `jit`."""

    weights: jax.Array

    def __call__(self, state, x, rollout_extras=None):
        weights = self.weights.astype(jnp.bfloat16)
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ weights)
        return StatefulModuleOutput((hidden @ weights.T).astype(jnp.float32), state)


class Rotates(nets.StatefulModule):
    """Complex state."""

    angle: jax.Array

    def __call__(self, state, x, rollout_extras=None):
        turn = jax.lax.complex(jnp.cos(self.angle), jnp.sin(self.angle))
        after = 0.9 * turn[None] * state + x.astype(jnp.complex64)
        return StatefulModuleOutput(jnp.real(after) + jnp.imag(after), after)

    def initialize_state(self, batch_size, *, key):
        return jnp.zeros((batch_size, 3), jnp.complex64)

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)


class Largest(broken.Centered):
    """Its statistics are the largest value so far, which few rollouts exceed."""

    def __init__(self):
        super().__init__()
        self.mean = broken.Mean(jnp.full(3, 100.0, jnp.float32))

    def update_statistics(self, rollout_extras):
        largest = jnp.maximum(self.mean.value, jnp.max(rollout_extras, axis=(0, 1)))
        return eqx.tree_at(lambda module: module.mean.value, self, largest)


UNUSUAL = {
    "colored noise": Colored,
    "noise per episode": PerEpisode,
    "sticky": Sticky,
    "noise at few steps": Seldom,
    "half precision": lambda: Half(jax.random.normal(jax.random.key(0), (3, 16), jnp.float32)),
    "complex state": lambda: Rotates(jnp.linspace(0.5, 1.5, 3, dtype=jnp.float32)),
    "largest so far": Largest,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_module_is_not_flagged(name):
    check_module(UNUSUAL[name](), FLAT)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_is_caught_by_the_right_rule(name):
    case = BROKEN[name]
    found = findings(case.build(), case.sample)
    assert {finding.rule for finding in found} == {case.rule}
    assert all(finding.path == "network" for finding in found)
    assert re.search(case.says, "\n".join(map(str, found)))


def test_every_rule_has_a_module_that_breaks_it():
    assert {case.rule for case in BROKEN.values()} == set(RULES)
    assert len(BROKEN) >= 20


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("StopsGradient", "network.layers[1]['right'].layers[1]"),
        ("BatchNorm", "network.layers[1]['right'].layers[1]"),
        ("ScalarPenalty", "network.layers[1]['right'].layers[1]"),
        ("NeverLearns", "network.layers[1]['right'].layers[1]"),
        ("Raises", "network.layers[1]['right'].layers[1]"),
        ("StateOfReplayDiffers", "network.layers[1]['right'].layers[1]"),
    ],
)
def test_the_culprit_is_found_inside_a_network(name, place):
    found = findings(broken.within(vars(broken)[name])(), FLAT)
    assert {finding.path for finding in found} == {place}


def test_two_culprits_are_both_named():
    network = nets.Parallel(
        fine=nets.Scale(2.0), mixes=broken.BatchNorm(), stops=broken.StopsGradient()
    )
    found = findings(network, FLAT)
    assert [(finding.rule, finding.path) for finding in found] == [
        ("per sample", "network['mixes']"),
        ("gradients", "network['stops']"),
    ]


def test_a_child_is_tested_on_what_it_gets():
    """A logarithm is right on the positive numbers before it, with a fault behind it."""
    log = nets.Lift(jnp.log)
    positive = nets.Dense(3, 3, activation=jax.nn.softplus, key=jax.random.key(0))
    dense = nets.Dense(3, 3, key=jax.random.key(1))
    found = findings(nets.Sequential([positive, log, dense, broken.BatchNorm()]), FLAT)
    assert [(finding.rule, finding.path) for finding in found] == [
        ("per sample", "network.layers[3]")
    ]


def test_noise_that_never_moves_is_found_beside_noise_that_does():
    layers = [nets.Parallel(a=broken.KeyNeverMoves(), b=broken.average()()), nets.Flattener()]
    network = nets.Sequential([*layers, nets.Dense(6, 6, key=jax.random.key(0)), Seldom()])
    found = findings(network, FLAT)
    assert [(finding.rule, finding.path) for finding in found] == [
        ("keys", "network.layers[0]['a']")
    ]


def test_a_fault_of_the_container_itself_is_told_of_the_container():
    class Halves(nets.Container):
        """Mixes the samples in its own wiring."""

        def __init__(self):
            super().__init__({"inner": nets.Scale(2.0)})

        def wire(self, call, x):
            return call.local(lambda y: y - jnp.mean(y, axis=0, keepdims=True), call("inner", x))

    found = findings(Halves(), FLAT)
    assert {(finding.rule, finding.path) for finding in found} == {("per sample", "network")}


def test_the_report_lists_everything_in_prose():
    class Both(nets.StatelessModule):
        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(x, state, None, jnp.mean(x), {"size": jnp.mean(x)})

    with pytest.raises(ContractError) as caught:
        check_module(Both(), FLAT)
    lines = str(caught.value).split("\n")
    assert lines[0] == "`Both` breaks 2 rules of its contract:"
    assert lines[1].startswith("1. [batch axis] network, metrics['size']: must lead with")
    assert lines[2].startswith("2. [batch axis] network, regularization_loss: must be one value")


def test_the_same_key_gives_the_same_test():
    first, second = (findings(broken.BatchNorm(), FLAT, key=jax.random.key(3)) for _ in range(2))
    assert first == second
    assert findings(broken.BatchNorm(), FLAT, key=jax.random.key(4)) != first


def test_the_module_that_is_tested_stays_as_it_is():
    module = CASES["normalizer_behind_delay"].build(jax.random.key(7))
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(eqx.filter(module, eqx.is_array))]
    check_module(module, FLAT)
    assert_same(jax.tree.leaves(eqx.filter(module, eqx.is_array)), before)


def test_a_shape_stands_for_a_sample():
    check_module(nets.Normalizer(3), jax.ShapeDtypeStruct((3,), jnp.float32))


@pytest.mark.parametrize("size", [{"n_envs": 2}, {"n_steps": 2}])
def test_a_test_that_is_too_small_is_refused(size):
    with pytest.raises(ValueError, match="at least 3"):
        check_module(nets.Scale(1.0), FLAT, **size)


def test_inputs_are_of_the_kind_of_the_sample():
    sample = {
        "speed": jnp.full(2, 100.0, jnp.float32),
        "half": jnp.zeros((), jnp.bfloat16),
        "index": jnp.array([3, 7], jnp.int32),
        "image": jnp.zeros((2, 2), jnp.uint8),
        "contact": jnp.zeros((), jnp.bool_),
        "sentinel": jnp.full((), 2**32 - 1, jnp.uint32),
    }
    drawn = random_inputs(sample, (200, 5), jax.random.key(0))
    for name, leaf in sample.items():
        assert drawn[name].shape == (200, 5, *leaf.shape)
        assert drawn[name].dtype == leaf.dtype
    np.testing.assert_allclose(np.mean(drawn["speed"]), 100.0, atol=5 / np.sqrt(2000))
    np.testing.assert_allclose(np.std(drawn["speed"]), 1.0, atol=0.1)
    assert set(np.unique(drawn["index"])) == set(range(8))
    assert set(np.unique(drawn["contact"])) == {False, True}


def test_the_documentation_lists_every_rule():
    page = Path(__file__).parents[2] / "docs" / "checks.md"
    (section,) = re.findall(r"^## The rules\n(.*?)^#", page.read_text(), re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| `([a-zA-Z ]+)` \|", section, re.MULTILINE)
    assert listed == list(RULES)
