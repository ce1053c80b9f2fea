"""What a policy is exported to acts without this library as the policy did within it."""

import functools
import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from eqx_ppo.algorithms import make_policy, unroll_env
from eqx_ppo.envs import EpisodeWrapper, Pendulum
from eqx_ppo.networks import (
    LSTM,
    Delay,
    Dense,
    Filter,
    GraphBuilder,
    Lift,
    Normalizer,
    Parallel,
    PPOAdapter,
    PPONetworkOutput,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
    StatelessModule,
    make_recurrent_actor_critic,
)
from eqx_ppo.training import export_policy
from tests.helpers.networks import DICT, dict_heads, heads, policy as actor
from tests.helpers.trees import assert_close

ROOT = Path(__file__).parents[2]
OBS = jax.ShapeDtypeStruct((3,), jnp.float32)
N_ENVS, LENGTH = 4, 250  # 1000 observations
KEY = np.array([0, 7], np.uint32)  # the words of `jax.random.key(7)`


def graph(key):
    """A delayed, normalized observation into populations with delays and recurrence."""
    keys = jax.random.split(key)
    builder = GraphBuilder()
    builder.add_input("sensors", 3, input_from="obs")
    builder.add_population("hidden", 8, activation=jnp.tanh)
    builder.add_output("motor", 4, output_to="motor")
    builder.connect("sensors", "hidden")
    builder.connect("hidden", "hidden", delay=1)
    builder.connect("hidden", "motor", delay=2)
    named, picked = Filter({"obs": lambda x: x}), Lift(operator.itemgetter("motor"))
    return [Delay(OBS, 2), Normalizer(3), named, builder.build(key=keys[0]), picked]


LAYERS = {
    "mlp": (lambda key: [Normalizer(3), Dense(3, 8, activation=jnp.tanh, key=key)], 8),
    "lstm": (lambda key: [Normalizer(3), LSTM(3, 8, trainable_initial_state=True, key=key)], 8),
    "graph": (graph, 4),
}
RUNS = [(name, deterministic) for name in LAYERS for deterministic in (True, False)]


def build(name, seed=0):
    """A network whose every parameter has moved from where it began."""
    layers, n_features = LAYERS[name]
    keys = jax.random.split(jax.random.key(seed), 3)
    network = Sequential([*layers(keys[0]), heads(n_features, 1, keys[1])])
    arrays, others = eqx.partition(network, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(arrays)
    noise = jax.random.split(keys[2], len(leaves))
    moved = [
        leaf + 0.15 * jax.random.normal(key, leaf.shape) if leaf.ndim else leaf
        for leaf, key in zip(leaves, noise, strict=True)
    ]
    return eqx.combine(jax.tree.unflatten(treedef, moved), others)


def run_name(name, deterministic):
    return f"{name}_{'mode' if deterministic else 'sample'}"


@pytest.fixture(scope="module")
def recorded():
    """Observations of staggered episodes, and where these ended."""
    env = EpisodeWrapper(Pendulum(), 40)
    network = build("mlp")

    @jax.jit
    def record():
        keys = jax.random.split(jax.random.key(1), N_ENVS)
        env_state = jax.vmap(env.stagger)(jax.vmap(env.reset)(keys), keys)
        state = network.initialize_state(N_ENVS, key=jax.random.key(2))
        key = jax.random.key(3)
        transitions = unroll_env(env, env_state, network, state, LENGTH, key)[2]
        return transitions.obs, transitions.done

    obs, done = jax.tree.map(np.asarray, record())
    assert done.sum() >= 4 * N_ENVS
    assert not np.array_equal(done[:, 0], done[:, 1])
    return obs, done


@eqx.filter_jit
def with_statistics(network, obs, done):
    state = network.initialize_state(N_ENVS, key=jax.random.key(4))
    return network.update_statistics(network.unroll(state, obs, done).rollout_extras)


@eqx.filter_jit
def actions_of(network, obs, done):
    state = network.initialize_state(N_ENVS, key=jax.random.key(7))
    return network.unroll(state, obs, done).output.actions


@pytest.fixture(scope="module")
def saved(recorded, tmp_path_factory):
    """A folder with every policy exported, its network saved, and what it was shown."""
    folder = tmp_path_factory.mktemp("policies")
    np.savez(folder / "recorded.npz", obs=recorded[0], done=recorded[1], key=KEY)
    expected = {}
    for name in LAYERS:
        network = with_statistics(build(name), *recorded)
        eqx.tree_serialise_leaves(folder / f"{name}.eqx", network)
        for deterministic in (True, False):
            run = run_name(name, deterministic)
            acting = eqx.nn.inference_mode(network) if deterministic else network
            expected[run] = np.asarray(actions_of(acting, *recorded))
            policy = make_policy(network, deterministic=deterministic)
            export_policy(policy, folder / "exported" / run, OBS, batch_size=N_ENVS)
    return folder, expected


def run_python(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def assert_acts_as_in_training(actions, expected):
    assert actions.shape == (LENGTH, N_ENVS, 1)
    assert np.std(actions) > 0.05
    np.testing.assert_allclose(actions, expected, rtol=0.0, atol=1e-6)


# --- In another process ---------------------------------------------------------------------

WITHOUT_THE_LIBRARY = """
import contextlib
import importlib.abc
import json
import pathlib
import sys


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        known = {"beartype", "eqx_ppo", "equinox", "jaxtyping", "optax", "orbax", "pickle5"}
        if name.split(".")[0] in known:
            raise ImportError(name)


sys.meta_path.insert(0, Refuse())

import jax
import numpy as np
from jax import export

root = pathlib.Path(sys.argv[1])
recorded = np.load(root / "recorded.npz")
for folder in sorted((root / "exported").iterdir()):
    load = lambda name: jax.jit(export.deserialize((folder / name).read_bytes()).call)
    init, act, reset = load("init.jax"), load("act.jax"), load("reset.jax")
    carry, actions = init(recorded["key"]), []
    for obs, done in zip(recorded["obs"], recorded["done"]):
        action, carry = act(carry, obs)
        carry = reset(carry, done)
        actions.append(np.asarray(action))
    np.save(root / f"{folder.name}.npy", np.stack(actions))
assert "eqx_ppo" not in sys.modules and "equinox" not in sys.modules

with contextlib.chdir(root / "exported"):
    for name in ("mlp_mode", "lstm_sample"):
        description = json.loads(pathlib.Path(name, "policy.json").read_text())
        names = {}
        exec("\\n".join(description["usage"]), names)
        assert list(names["action"].shape) == description["action"]["shape"]
        assert len(names["carry"]) == len(description["carry"])
"""

WITH_THE_LIBRARY = """
import pathlib
import sys

import equinox as eqx
import jax
import numpy as np

from eqx_ppo.algorithms import make_policy
from tests.training.test_export import RUNS, build, run_name

root = pathlib.Path(sys.argv[1])
recorded = np.load(root / "recorded.npz")


@eqx.filter_jit
def replay(policy, obs, done):
    def step(carry, inputs):
        action, carry = policy.act(carry, inputs[0])
        return policy.reset(carry, inputs[1]), action

    return jax.lax.scan(step, policy.init(jax.random.key(7), obs.shape[1]), (obs, done))[1]


for name, deterministic in RUNS:
    network = eqx.tree_deserialise_leaves(root / f"{name}.eqx", build(name, seed=1))
    policy = make_policy(network, deterministic=deterministic)
    actions = replay(policy, recorded["obs"], recorded["done"])
    np.save(root / f"reloaded_{run_name(name, deterministic)}.npy", actions)
"""


def test_the_artifacts_act_as_in_training_without_the_library(saved):
    folder, expected = saved
    run_python(WITHOUT_THE_LIBRARY, folder)
    for run, actions in expected.items():
        assert_acts_as_in_training(np.load(folder / f"{run}.npy"), actions)
    assert not np.allclose(expected["mlp_mode"], expected["mlp_sample"], atol=0.1)


def test_a_reloaded_policy_acts_as_in_training(saved):
    folder, expected = saved
    run_python(WITH_THE_LIBRARY, folder)
    for run, actions in expected.items():
        assert_acts_as_in_training(np.load(folder / f"reloaded_{run}.npy"), actions)


# --- The functions --------------------------------------------------------------------------


class Loaded(NamedTuple):
    init: object
    act: object
    reset: object
    description: dict


def load(folder):
    functions = [
        export.deserialize((folder / f"{name}.jax").read_bytes())
        for name in ("init", "act", "reset")
    ]
    assert all(function.platforms == ("cpu", "cuda") for function in functions)
    return Loaded(
        *(jax.jit(function.call) for function in functions),
        json.loads((folder / "policy.json").read_text()),
    )


def exported(policy, path, obs=OBS, **options):
    export_policy(policy, path, obs, **options)
    return load(path)


def entries(loaded):
    return [entry["name"] for entry in loaded.description["carry"]]


def follow(policy, key, obs, done):
    """The actions of a policy for a single environment."""

    def step(carry, inputs):
        action, carry = policy.act(carry, inputs[0])
        return policy.reset(carry, inputs[1]), action

    return jax.lax.scan(step, policy.init(key), (obs, done))[1]


@pytest.mark.parametrize("batch_size", ["any", None])
def test_every_row_of_any_batch_is_a_policy_for_a_single_environment(
    batch_size, recorded, tmp_path
):
    policy = make_policy(build("graph"), deterministic=False)
    loaded = exported(policy, tmp_path / "policy", batch_size=batch_size)
    obs, done = (leaf[-30:] for leaf in recorded)
    keys = np.stack([np.array([0, seed], np.uint32) for seed in range(N_ENVS)])
    single = jax.jit(functools.partial(follow, policy))
    rows = slice(None) if batch_size == "any" else 1
    carry, actions = loaded.init(keys[rows]), []
    for obs_now, done_now in zip(obs, done, strict=True):
        action, carry = loaded.act(carry, obs_now[rows])
        carry = loaded.reset(carry, done_now[rows])
        actions.append(np.asarray(action))
    assert [list(leaf.shape) for leaf in carry] == [
        [N_ENVS if size == "b" else size for size in entry["shape"]]
        for entry in loaded.description["carry"]
    ]
    for row in range(N_ENVS) if batch_size == "any" else [1]:
        expected = single(jax.random.key(row), obs[:, row], done[:, row])
        got = np.stack(actions)[:, row] if batch_size == "any" else np.stack(actions)
        np.testing.assert_allclose(got, expected, rtol=0.0, atol=1e-6)


class Observed(NamedTuple):
    proprio: object
    goal: object


def test_structured_observations_and_actions(getkey, tmp_path):
    """Dicts stay; a NamedTuple, whose class a reader does not have, becomes a dict."""
    network = Sequential([Lift(lambda x: x.proprio), dict_heads(3, DICT.action_size, getkey())])
    policy = make_policy(network)
    sample = Observed(jnp.zeros(3, jnp.float32), {"x": jnp.zeros((), jnp.int32)})
    loaded = exported(policy, tmp_path / "policy", sample, batch_size=2)
    assert loaded.description["obs"] == {
        "proprio": {"shape": [2, 3], "dtype": "float32"},
        "goal/x": {"shape": [2], "dtype": "int32"},
    }
    assert loaded.description["action"] == {
        "arm": {"shape": [2, 2], "dtype": "float32"},
        "leg": {"shape": [2, 1], "dtype": "float32"},
    }
    proprio, x = jax.random.normal(getkey(), (2, 3), jnp.float32), jnp.zeros(2, jnp.int32)
    got, _ = loaded.act(loaded.init(KEY), {"proprio": proprio, "goal/x": x})
    expected, _ = policy.act(policy.init(getkey(), 2), Observed(proprio, {"x": x}))
    assert_close(got, expected, atol=1e-6)


# --- What the carry holds -------------------------------------------------------------------


def test_a_deterministic_feed_forward_policy_has_no_carry(tmp_path):
    assert entries(exported(make_policy(build("mlp")), tmp_path / "mode")) == []
    sample = make_policy(build("mlp"), deterministic=False)
    loaded = exported(sample, tmp_path / "sample")
    assert entries(loaded) == ["state[2]['action'][1].keys", "state[2]['action'][1].draws"]
    assert [entry.get("generator") for entry in loaded.description["carry"]] == [
        "threefry2x32",
        None,
    ]


def test_a_recurrent_critic_is_left_behind(getkey, tmp_path):
    """In the value port, and before the ports too."""
    in_port = make_policy(make_recurrent_actor_critic(3, 1, 4, key=getkey()))
    assert entries(exported(in_port, tmp_path / "in_port")) == [
        "state[1]['action'][0].hidden",
        "state[1]['action'][0].cell",
    ]
    trunk = Parallel(actor=Dense(3, 4, key=getkey()), critic=LSTM(3, 4, key=getkey()))
    adapter = PPOAdapter(
        action=Sequential([Lift(operator.itemgetter("actor")), actor(4, 1, getkey())]),
        value=Sequential([Lift(operator.itemgetter("critic")), Dense(4, 1, key=getkey())]),
    )
    before = make_policy(Sequential([trunk, adapter]))
    assert jax.tree.leaves(before.init(getkey()).network_state[0]["critic"]) != []
    assert entries(exported(before, tmp_path / "before")) == []


class Relay(StatefulModule):
    """Acts by what it saw two steps ago, and resets to a number that resets double."""

    def __call__(self, state, x, rollout_extras=None):
        output = PPONetworkOutput(state["second"], x[:, 0], x[:, 0])
        moved = {"first": x, "second": state["first"], "unseen": state["unseen"] + x}
        return StatefulModuleOutput(output, state | moved)

    def initialize_state(self, batch_size, *, key):
        ones = jnp.ones((batch_size, 3), jnp.float32)
        return {"first": ones, "second": ones, "start": ones, "unseen": ones}

    def reset_state(self, prev_state):
        start = 2.0 * prev_state["start"]
        return prev_state | {"first": start, "second": start, "start": start}


def test_what_only_later_actions_depend_on_is_kept(tmp_path):
    policy = make_policy(Relay())
    loaded = exported(policy, tmp_path / "policy")
    assert entries(loaded) == ["state['first']", "state['second']", "state['start']"]
    obs = np.arange(18, dtype=np.float32).reshape(6, 3)
    ends = [False, False, True, False, True, False]
    carry, ours, actions = loaded.init(KEY), policy.init(jax.random.key(0)), []
    for x, done in zip(obs, ends, strict=True):
        action, carry = loaded.act(carry, x)
        carry = loaded.reset(carry, np.array(done))
        expected, ours = policy.act(ours, x)
        ours = policy.reset(ours, done)
        np.testing.assert_array_equal(action, expected)
        actions.append(float(action[0]))
    # The first carry is that of a reset: 2. Each end of an episode doubles it.
    assert actions == [2.0, 2.0, 0.0, 4.0, 4.0, 8.0]


# --- The folder -----------------------------------------------------------------------------


def test_the_description_is_that_of_the_functions(saved):
    folder = saved[0] / "exported" / "lstm_sample"
    description = json.loads((folder / "policy.json").read_text())
    act = export.deserialize((folder / "act.jax").read_bytes())
    carry, obs = jax.tree.unflatten(act.in_tree, act.in_avals)[0]
    action, _ = jax.tree.unflatten(act.out_tree, act.out_avals)

    def shape(leaf):
        return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}

    assert [shape(leaf) for leaf in carry] == [
        {"shape": entry["shape"], "dtype": entry["dtype"]} for entry in description["carry"]
    ]
    assert (shape(obs), shape(action)) == (description["obs"], description["action"])
    assert description["done"] == {"shape": [N_ENVS], "dtype": "bool"}
    assert description["key"] == {"shape": [2], "dtype": "uint32"}
    assert description["batch_size"] == N_ENVS
    assert description["deterministic"] is False
    assert description["versions"]["jax"] == jax.__version__
    assert '"shape": [4, 8]' in (folder / "policy.json").read_text()  # readable
    assert {path.name for path in folder.iterdir()} == {
        "policy.json",
        "init.jax",
        "act.jax",
        "reset.jax",
    }


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        export_policy(make_policy(build("mlp")), tmp_path, OBS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


class CallsBack(StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return StatefulModuleOutput(jax.pure_callback(np.asarray, shape, x), state)


def test_a_failed_export_leaves_nothing(getkey, tmp_path):
    calling_back = make_policy(Sequential([CallsBack(), heads(3, 1, getkey())]))
    with pytest.raises(ValueError, match=r"`act` of this policy cannot be exported.*callback"):
        export_policy(calling_back, tmp_path / "policy", OBS)
    with pytest.raises(ValueError, match=r"`Normalizer` expected.*got \[1, 5\]"):
        export_policy(make_policy(build("mlp")), tmp_path / "policy", jnp.zeros(5, jnp.float32))
    for platforms in ("cpu", (), ("cpu", "foo")):
        with pytest.raises(ValueError, match=r"`platforms` must be a sequence of some of \['cpu"):
            export_policy(make_policy(build("mlp")), tmp_path / "policy", OBS, platforms=platforms)
    with pytest.raises(TypeError, match="`batch_size` must be an int or `None`, but got True"):
        export_policy(make_policy(build("mlp")), tmp_path / "policy", OBS, batch_size=True)
    assert list(tmp_path.iterdir()) == []
