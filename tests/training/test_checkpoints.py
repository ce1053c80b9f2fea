"""What a checkpoint keeps, what it refuses, and which ones stay."""

import gc
import itertools
import json
import math
import os
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo.algorithms import split_network
from eqx_ppo.networks import (
    GRU,
    LSTM,
    Dense,
    GraphBuilder,
    Lift,
    Normalizer,
    NormalTanhSampler,
    Parallel,
    Sequential,
    trainable,
)
from eqx_ppo.training import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    RunRecord,
    StructureMismatchError,
    restore_network,
)
from tests.helpers.trees import assert_same
from tests.training.saving import bits, state_of


def keys(*shape, impl):
    return jax.random.split(jax.random.key(5, impl=impl), shape)


# A NaN with a payload, minus zero, infinity and the smallest number.
FLOATS = np.array([0x7FC00123, 0x80000000, 0x7F800000, 1], np.uint32).view(np.float32)

LEAVES = {
    "scalar": lambda: jnp.float32(0.1),
    "one by one": lambda: jnp.full((1, 1), 3.5, jnp.float32),
    "empty": lambda: jnp.zeros((0, 3), jnp.float32),
    "bool": lambda: jnp.array([True, False, True]),
    "uint8": lambda: jnp.arange(7, dtype=jnp.uint8),
    "int32": lambda: jnp.array([16_777_217, -(2**31), 2**31 - 1], jnp.int32),
    "uint32": lambda: jnp.array([2**32 - 1], jnp.uint32),
    "float16": lambda: jnp.array([65504.0, 6e-8], jnp.float16),
    "bfloat16": lambda: jnp.array([[1.5, -2.0], [3e38, 0.0]], jnp.bfloat16),
    "special floats": lambda: jnp.asarray(FLOATS),
    "complex": lambda: jnp.array([1 + 2j], jnp.complex64),
    "raw key": lambda: jax.random.PRNGKey(7),
    "key": lambda: jax.random.key(7),
    "keys": lambda: keys(2, 3, impl="threefry2x32"),
    "rbg keys": lambda: keys(2, impl="rbg"),
    "unsafe rbg keys": lambda: keys(2, impl="unsafe_rbg"),
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def saved(folder, *states, **options):
    """A checkpointer that has saved these states, at 1, 2, ... steps."""
    checkpointer = Checkpointer(folder, asynchronous=False, **options)
    for steps, state in enumerate(states, 1):
        checkpointer.save(state, steps)
    return checkpointer


# --- Round trips (cases H5, H12) ------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_kind_of_array_comes_back_bit_for_bit(folder, asynchronous):
    leaves = {name: make() for name, make in LEAVES.items()}
    state = state_of(optimizer_state=leaves, steps=2**40 + 3)
    with Checkpointer(folder, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(state, 2**40 + 3)
    blank = state_of(optimizer_state=jax.tree.map(lambda leaf: leaf[...], leaves), steps=0, seed=1)
    restored = checkpointer.restore(blank)
    assert checkpointer.steps() == [2**40 + 3]
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert int(restored.counts.steps) == 2**40 + 3
    for name, leaf in restored.optimizer_state.items():
        assert not leaf.weak_type if "key" not in name else True
    drawn = jax.random.normal(restored.optimizer_state["rbg keys"][1], (3,), jnp.float32)
    expected = jax.random.normal(leaves["rbg keys"][1], (3,), jnp.float32)
    np.testing.assert_array_equal(drawn, expected)


def test_a_linear_layer_of_one_by_one(folder):
    network = Lift(eqx.nn.Linear(1, 1, key=jax.random.key(0)))
    saved(folder, state_of(network))
    other = Lift(eqx.nn.Linear(1, 1, key=jax.random.key(1)))
    restored = restore_network(folder, other)
    assert restored.layer.weight.shape == (1, 1)
    assert_same(restored, network)


def test_the_optimizer_is_saved(folder):
    """Adam's count and moments after two updates."""
    network = Sequential([Dense(2, 3, key=jax.random.key(0))])
    optimizer = optax.adam(lambda count: 1e-2)
    params = eqx.filter(network, trainable(network))
    state = first = optimizer.init(params)
    for scale in (1.0, 2.0):
        grads = jax.tree.map(lambda p, scale=scale: jnp.full_like(p, scale), params)
        with jax.numpy_dtype_promotion("standard"):  # optax, outside of `jit`
            _, state = optimizer.update(grads, state, params)
    saved(folder, state_of(network, state))
    restored = Checkpointer(folder).restore(state_of(network, first)).optimizer_state
    assert int(restored[0].count) == int(restored[1].count) == 2
    np.testing.assert_allclose(restored[0].mu[0].bias, 0.1 * 0.9 + 0.1 * 2.0, rtol=1e-6)
    assert_same(restored, state)


def test_a_state_may_be_donated_once_it_is_saved(folder):
    state = state_of(optimizer_state={"a": jnp.arange(5.0)})
    expected = bits(state)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(state, 1)
        state.optimizer_state["a"].delete()
    restored = checkpointer.restore(state_of(optimizer_state={"a": jnp.zeros(5)}, seed=1))
    assert bits(restored) == expected


def test_nothing_is_held_back_of_a_state(folder):
    state = state_of(optimizer_state=[jnp.zeros(4)])
    held = [weakref.ref(leaf) for leaf in jax.tree.leaves((state.arrays, state.optimizer_state))]
    checkpointer = saved(folder, state, state)
    del state
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    assert checkpointer.latest() == 2


def test_what_is_restored_owns_its_buffers(folder):
    """Case I13: restored twice, the one donated and the other still usable."""
    template = state_of(optimizer_state=[jnp.zeros(4), jnp.zeros(4)])
    checkpointer = saved(folder, template)
    first, second = (checkpointer.restore(template) for _ in range(2))
    step = jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)
    step(step(first))
    assert bits(second) == bits(template)


# --- Restoring parts ------------------------------------------------------------------------


def test_parts(folder):
    """The policy with a fresh optimizer: only what is taken has to agree."""
    old = state_of(Dense(2, 3, key=jax.random.key(1)), {"momentum": jnp.ones(3)}, steps=7)
    checkpointer = saved(folder, old)
    new = state_of(Dense(2, 3, key=jax.random.key(2)), {"count": jnp.zeros((), jnp.int32)}, seed=9)
    with pytest.raises(StructureMismatchError, match=r"`optimizer_state\['momentum'\]`"):
        checkpointer.restore(new)
    restored = checkpointer.restore(new, parts={"network", "counts"})
    assert_same(restored.network, old.network)
    assert_same(restored.optimizer_state, new.optimizer_state)
    assert_same(restored.key, new.key)
    assert int(restored.counts.steps) == 7
    kept = checkpointer.restore(new, parts={"rollout_state"})
    assert_same(kept.network, new.network)
    with pytest.raises(ValueError, match=r"`parts` must be among .* but got \['policy'\]"):
        checkpointer.restore(new, parts={"policy"})


def test_a_network_with_its_statistics(folder):
    network = Sequential([Normalizer(2), Dense(2, 3, key=jax.random.key(0))])
    moved = network.update_statistics([jnp.ones((3, 2, 2), jnp.float32), None])
    saved(folder, state_of(moved))
    restored = restore_network(folder, network)
    assert_same(restored, moved)
    assert int(restored[0].count) == 6
    assert int(network[0].count) == 0


# --- Another structure (cases H1, H3) -------------------------------------------------------

KEY = jax.random.key(0)


def mlp(*sizes, activation=jnp.tanh):
    layers = [
        Dense(before, after, activation=activation, key=KEY)
        for before, after in itertools.pairwise(sizes)
    ]
    return Sequential(layers)


def heads(**children):
    return Sequential([Parallel({name: mlp(2, size) for name, size in children.items()})])


def graph(delay):
    builder = GraphBuilder()
    builder.add_input("in", 2, input_from="obs")
    builder.add_population("hidden", 3, activation=jnp.tanh)
    builder.add_output("out", 1, output_to="out")
    builder.connect("in", "hidden", delay=delay)
    builder.connect("hidden", "out")
    return builder.build(key=KEY)


def scaled(factor):
    return Lift(lambda x: factor * x)


OTHERS = {
    "depth": (mlp(2, 4, 4, 1), mlp(2, 4, 1), "network.layers[1].kernel", "float32[4, 4]"),
    "one layer more": (mlp(2, 4, 1), mlp(2, 4, 1, 1), "network.layers[2]", "Dense here"),
    "width": (mlp(2, 4, 1), mlp(2, 5, 1), "network.layers[0].kernel", "float32[2, 5] here"),
    "activation": (
        mlp(2, 4),
        mlp(2, 4, activation=jax.nn.relu),
        "network.layers[0].activation",
        "tanh in the checkpoint, relu here",
    ),
    "no bias": (
        Dense(2, 3, key=KEY),
        Dense(2, 3, use_bias=False, key=KEY),
        "network.bias",
        "float32[3] in the checkpoint, None here",
    ),
    "key order": (
        heads(a=2, b=2),
        heads(b=2, a=2),
        "network.layers[0].names",
        "('a', 'b') in the checkpoint, ('b', 'a') here",
    ),
    "other names": (
        heads(actor=2, critic=1),
        heads(policy=2, baseline=1),
        "network.layers[0].names",
        "('actor', 'critic') in the checkpoint",
    ),
    "extra child": (
        heads(a=2),
        heads(a=2, b=2),
        "network.layers[0]['b']",
        "nothing in the checkpoint, Sequential here",
    ),
    "cell": (
        LSTM(2, 8, key=KEY),
        GRU(2, 8, key=KEY),
        "network",
        "LSTM in the checkpoint, GRU here",
    ),
    "keys of a normalizer": (
        Normalizer({"a": 2, "b": 3}),
        Normalizer({"a": 3, "b": 2}),
        "network.statistics.moments['a'].mean",
        "float32[2] in the checkpoint, float32[3] here",
    ),
    "static number": (
        Normalizer(2),
        Normalizer(2, min_variance=1e-3),
        "network.min_variance",
        "1e-06 in the checkpoint, 0.001 here",
    ),
    "a number that is no array": (
        NormalTanhSampler(entropy_weight=1e-2),
        NormalTanhSampler(entropy_weight=1e-3),
        "network.entropy_weight",
        "0.01 in the checkpoint, 0.001 here",
    ),
    "flag": (
        NormalTanhSampler(entropy_weight=0.0),
        eqx.nn.inference_mode(NormalTanhSampler(entropy_weight=0.0)),
        "network.inference",
        "False in the checkpoint, True here",
    ),
    "function without a name": (
        Lift(lambda x: 2 * x),
        Lift(lambda x: 3 * x),
        "network.layer",
        "<lambda>",
    ),
    "what a function has captured": (scaled(2.0), scaled(3.0), "network.layer", "<lambda>"),
    "delay": (graph(1), graph(2), "network", "delay"),
    "shape of an array": (
        Lift(eqx.nn.Linear(2, "scalar", key=KEY)),
        Lift(eqx.nn.Linear(2, 1, key=KEY)),
        "network.layer.out_features",
        "'scalar' in the checkpoint, 1 here",
    ),
}


@pytest.mark.parametrize(("network", "other", "path", "what"), list(OTHERS.values()), ids=OTHERS)
def test_another_network_is_refused_with_the_place(folder, network, other, path, what):
    checkpointer = saved(folder, state_of(network))
    with pytest.raises(StructureMismatchError) as caught:
        restore_network(folder, other)
    message = str(caught.value)
    assert "was saved from another network" in message
    assert f"`{path}" in message
    assert what in message
    with pytest.raises(StructureMismatchError, match="was saved from another network"):
        checkpointer.restore(state_of(other))
    assert_same(restore_network(folder, network), network)


def test_a_network_built_anew_is_the_same(folder):
    """With other weights, and functions that were made again."""
    network, again = (
        Sequential([Dense(2, 3, activation=jnp.tanh, key=jax.random.key(seed)), scaled(2.0)])
        for seed in (0, 1)
    )
    saved(folder, state_of(network))
    assert_same(restore_network(folder, again)[0], network[0])


def test_only_the_first_differences_are_shown(folder):
    saved(folder, state_of(mlp(*range(2, 7))))
    with pytest.raises(StructureMismatchError) as caught:
        restore_network(folder, mlp(*range(3, 8)))
    lines = str(caught.value).splitlines()
    assert lines[1] == (
        "  `network.layers[0].kernel`: float32[2, 3] in the checkpoint, float32[3, 4] here"
    )
    assert len(lines) == 7
    assert lines[-1] == "  and 3 more"


@pytest.mark.parametrize(
    ("leaf", "other", "texts"),
    [
        (jnp.int32(16_777_217), jnp.float32(0), ("int32[]", "float32[]")),
        (jnp.ones(3), jnp.ones(3, jnp.bfloat16), ("float32[3]", "bfloat16[3]")),
        (jnp.ones((1, 1)), jnp.ones(1), ("float32[1, 1]", "float32[1]")),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), ("key<fry>[]", "key<rbg>[]")),
        (jax.random.PRNGKey(0), jax.random.key(0), ("uint32[2]", "key<fry>[]")),
    ],
    ids=str,
)
def test_nothing_is_cast(folder, leaf, other, texts):
    checkpointer = saved(folder, state_of(optimizer_state={"x": leaf}))
    with pytest.raises(StructureMismatchError) as caught:
        checkpointer.restore(state_of(optimizer_state={"x": other}))
    place = f"`optimizer_state['x']`: {texts[0]} in the checkpoint, {texts[1]} here"
    assert place in str(caught.value)


def test_a_network_of_another_dtype_is_refused(folder):
    network = mlp(2, 3)
    saved(folder, state_of(network))
    half = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_array(leaf) else leaf, network
    )
    with pytest.raises(StructureMismatchError, match=r"bfloat16\[2, 3\] here"):
        restore_network(folder, half)


# --- Which ones stay ------------------------------------------------------------------------

SCORES = {1: 3.0, 2: 9.0, 3: math.nan, 4: 5.0, 5: None, 6: 1.0, 7: 2.0}


@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({"keep": 2}, [6, 7], 7),
        ({"keep": None}, [1, 2, 3, 4, 5, 6, 7], 2),
        ({"keep": 1, "keep_best": 2}, [2, 4, 7], 2),
        ({"keep": 1, "keep_best": 2, "best_mode": "min"}, [6, 7], 6),
        ({"keep": 1, "keep_best": 2, "best_metric": "absent"}, [7], None),
    ],
    ids=str,
)
def test_retention(folder, options, kept, best):
    """After 4 saves a new process takes over; NaN is never the best."""
    names = {"x": 0.0, "eval/episode_reward/mean": 0.0}
    for steps_of_process in ([1, 2, 3, 4], [5, 6, 7]):
        with Checkpointer(folder, asynchronous=False, **options) as checkpointer:
            for step in steps_of_process:
                score = SCORES[step]
                metrics = None if score is None else names | {"eval/episode_reward/mean": score}
                checkpointer.save(state_of(steps=step), step, metrics=metrics)
    assert checkpointer.steps() == kept
    assert checkpointer.latest() == 7
    assert checkpointer.best() == best
    restored = checkpointer.restore(state_of(), step=kept[0])
    assert int(restored.counts.steps) == kept[0]


def test_wrong_numbers_are_refused(folder):
    for options in ({"keep": 0}, {"keep_best": -1}):
        with pytest.raises(ValueError, match="`Checkpointer` needs `keep` of at least 1"):
            Checkpointer(folder, **options)
    with pytest.raises(ValueError, match='`best_mode` must be "max" or "min", but got \'most\''):
        Checkpointer(folder, best_mode="most")
    with pytest.raises(ValueError, match="`steps` must be at least 0, but got -5"):
        Checkpointer(folder).save(state_of(), -5)
    assert not folder.exists()


def test_a_step_that_is_saved_again_is_set_aside(folder):
    """Case H10: nothing crashes, and nothing is lost."""
    with Checkpointer(folder) as checkpointer:
        for seed in (1, 2, 3):
            checkpointer.save(state_of(seed=seed), 64)
    assert checkpointer.steps() == [64]
    for place, seed in ((folder / "64", 3), (folder / "set_aside" / "64", 1)):
        restored = Checkpointer(place.parent).restore(state_of(), step=64)
        assert_same(restored.key, jax.random.key(seed))
    assert (folder / "set_aside" / "64.1").is_dir()


# --- What else is stored --------------------------------------------------------------------


def test_metadata_is_readable_json(folder):
    record = RunRecord(
        config={"seed": 3, "ppo": {"clip_range": 0.2}},
        environment={"classes": ["Pendulum"], "backend": None},
        metrics={"a": math.nan, "b": 1.5, "total_steps": 64},
        eval_history=[{"step": 0, "x": math.inf}, {"step": 64, "x": -math.inf}],
        invalid=[0, 2],
    )
    checkpointer = Checkpointer(folder, asynchronous=False)
    checkpointer.save(state_of(mlp(2, 3)), 64, run=record)

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    text = (folder / "64" / "checkpoint" / "metadata.json").read_text()
    data = json.loads(text, parse_constant=refuse)["checkpoint"]
    assert data["steps"] == 64
    assert data["versions"]["jax"] == jax.__version__
    assert data["run"]["config"] == record.config
    assert data["fingerprint"]["network.layers[0].kernel"] == "float32[2, 3]"
    assert data["fingerprint"]["network.layers[0].activation"] == "tanh"
    metadata = checkpointer.metadata()
    assert metadata.run.environment == record.environment
    assert metadata.run.invalid == [0, 2]
    assert repr(metadata.run.metrics) == repr(record.metrics)
    assert metadata.run.eval_history == record.eval_history
    assert metadata.score is None


def test_arrays_can_be_read_by_hand(folder):
    """One after the other, as the JSON lists them."""
    network = mlp(2, 3, 1)
    saved(folder, state_of(network))
    place = folder / "1" / "checkpoint"
    leaves = json.loads((place / "metadata.json").read_text())["checkpoint"]["arrays"]["network"]
    content = (place / "network.bin").read_bytes()
    found = {}
    for leaf in leaves:
        found[leaf["path"]], content = content[: leaf["size"]], content[leaf["size"] :]
    assert content == b""
    assert found["network.layers[1].kernel"] == np.asarray(network[1].kernel).tobytes()
    assert list(found) == [f"network.layers[{i}].{k}" for i in (0, 1) for k in ("kernel", "bias")]


# --- Nothing there, or not writable ---------------------------------------------------------


def test_reading_creates_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path / "none")
    assert checkpointer.latest() is checkpointer.best() is None
    with pytest.raises(CheckpointError, match="There is no folder"):
        checkpointer.restore(state_of())
    with pytest.raises(CheckpointError, match="There is no complete checkpoint in"):
        restore_network(tmp_path, mlp(2, 3))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "64.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"not finished: \['64\.orbax-checkpoint-tmp'\]"):
        restore_network(tmp_path, mlp(2, 3))


def test_a_step_that_is_not_there(folder):
    checkpointer = saved(folder, state_of(), state_of())
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of 3 steps, but of 1, 2\."):
        checkpointer.restore(state_of(), step=3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_place_that_cannot_be_written_to(tmp_path, asynchronous):
    """Root may write to read-only folders, but not below a file."""
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "below", asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match="Checkpoints cannot be written to"):
        checkpointer.save(state_of(), 1)


# Orbax leaves coroutines behind when a write fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(os.name != "posix", reason="limits files as POSIX does")
def test_a_full_disk(folder):
    """No file may grow beyond 4 kB: the save fails, and what was there stays."""
    import resource

    state = state_of(steps=1)
    checkpointer = saved(folder, state)
    large = state_of(optimizer_state={"x": jax.random.bits(KEY, (50_000,))})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            checkpointer.save(large, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpointer.steps() == [1]
    assert_same(checkpointer.restore(state_of()), state)
    checkpointer.save(state_of(steps=3), 3)
    assert checkpointer.steps() == [1, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["1", "3"]


def test_a_failed_save_does_not_prevent_the_next(folder, monkeypatch):
    """In the background: it is a warning of the next save, and that one is written."""
    from eqx_ppo.training._checkpoint._handler import FilesHandler

    original, failures = FilesHandler.save, iter([OSError("no space left on device")])

    def save(self, directory, args):
        for failure in failures:
            raise failure
        original(self, directory, args)

    monkeypatch.setattr(FilesHandler, "save", save)
    checkpointer = Checkpointer(folder)
    checkpointer.save(state_of(steps=1), 1)
    with pytest.warns(RuntimeWarning, match=r"step 1 could not be written .*no space left"):
        checkpointer.save(state_of(steps=2), 2)
    checkpointer.close()
    assert checkpointer.steps() == [2]
    assert [path.name for path in folder.iterdir()] == ["2"]
    failures = iter([OSError("no space left on device")])
    checkpointer.save(state_of(steps=3), 3)
    with pytest.raises(CheckpointError, match="step 3 could not be written"):
        checkpointer.wait()
    checkpointer.wait()  # said once
    assert checkpointer.steps() == [2]


def test_damage_is_told_apart_from_absence(folder):
    checkpointer = saved(folder, state_of())
    (folder / "1" / "checkpoint" / "metadata.json").write_text("{}")
    with pytest.raises(DamagedCheckpointError, match="holds no sound checkpoint"):
        checkpointer.restore(state_of())


def test_split_network_finds_the_arrays_in_the_order_of_their_paths():
    """The paths of the arrays are those of `jax.tree.leaves`, however a network is nested."""
    from eqx_ppo.training._checkpoint._fingerprint import array_paths, fingerprint

    for network in (heads(b=2, a=1), graph(2), Normalizer({"b": 2, "a": 3}), mlp(2, 3, 1)):
        texts = fingerprint(network)
        arrays = [leaf for leaf in split_network(network)[0] if leaf is not None]
        found = [texts[path] for path in array_paths(network)]
        assert found == [f"{leaf.dtype}{list(leaf.shape)}" for leaf in arrays]
