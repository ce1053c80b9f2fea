"""Run folders: what is written, what is refused, and what is never touched."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from eqx_ppo import TrainConfig, __version__
from eqx_ppo.algorithms import new_training_state, split_network
from eqx_ppo.training import (
    Checkpointer,
    CheckpointError,
    EnvConfig,
    NetworkConfig,
    RunConfig,
    RunFolder,
)
from tests.algorithms.common import assert_same

CONFIG = RunConfig(
    env=EnvConfig(name="Pendulum", max_len=5, reward_scale=0.1),
    network=NetworkConfig(actor_hidden_sizes=(3,), critic_hidden_sizes=(3,)),
    train=TrainConfig(seed=4),
)
OTHER = dataclasses.replace(CONFIG, train=TrainConfig(seed=5))


def changed(part, **values):
    """`config.json` with other values."""
    data = CONFIG.to_json()
    data[part].update(values)
    return json.dumps(data)


def test_a_new_folder(tmp_path):
    folder = RunFolder.create(tmp_path / "runs" / "a", CONFIG)
    assert [path.name for path in folder.path.iterdir()] == ["config.json"]
    again = RunFolder.open(str(folder.path))
    assert again == folder
    assert again.read_config() == CONFIG
    assert "\n  " in folder.config_file.read_text()  # for people


def test_an_empty_folder_will_do(tmp_path):
    RunFolder.create(tmp_path, CONFIG)


def fill(folder):
    """A run that has been going on, and something of the user's."""
    for path in (folder.checkpoints / "7", folder.plots, folder.videos):
        path.mkdir(parents=True)
        (path / "file").write_text("x")
    folder.metrics_file.write_text("{}\n")
    (folder.path / "notes.txt").write_text("mine")


def test_a_run_is_not_started_over(tmp_path):
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    fill(folder)
    with pytest.raises(FileExistsError, match=r"holds a run already. Continue it \(`--resume`\)"):
        RunFolder.create(folder.path, OTHER)
    assert folder.read_config() == CONFIG
    assert (folder.checkpoints / "7" / "file").exists()


def test_a_run_is_replaced_on_demand(tmp_path):
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    fill(folder)
    RunFolder.create(folder.path, OTHER, overwrite=True)
    assert folder.read_config() == OTHER
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "notes.txt"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_folders_and_files_are_never_touched(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match="exists and is not the folder of a run"):
        RunFolder.create(tmp_path, CONFIG, overwrite=overwrite)
    with pytest.raises(FileExistsError, match="exists and is not the folder of a run"):
        RunFolder.create(tmp_path / "thesis.tex", CONFIG, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_what_cannot_be_opened_says_what_could(tmp_path):
    for name in ("b", "a"):
        RunFolder.create(tmp_path / "runs" / name, CONFIG)
    with pytest.raises(FileNotFoundError, match=r"no folder `.*c`. There are runs in `.*a`, `.*b`"):
        RunFolder.open(tmp_path / "runs" / "c")
    with pytest.raises(FileNotFoundError, match=r"has no `config.json`. There are runs in `.*a`"):
        RunFolder.open(tmp_path / "runs")
    with pytest.raises(FileNotFoundError, match=r"There is no folder `\S+nowhere`\.$"):
        RunFolder.open(tmp_path / "else" / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ("{}", "must have the parts"),
        ("[" * 100_000, "recursion"),
        (changed("env", name=5), "`EnvConfig.name` must be a string, but got 5"),
        (changed("env", overrides=[1]), r"`EnvConfig.overrides` must be settings by name, but"),
        (changed("env", reward_scale="1"), "`EnvConfig.reward_scale` must be a number"),
        (changed("network", actor_hidden_sizes=[4.5]), "`NetworkConfig.actor_hidden_sizes` must"),
        (changed("video", camera=5), "`VideoConfig.camera` must be a name"),
        (changed("train", ppo=None), "`TrainConfig.ppo` must be"),
        (changed("train", eval={"logging_percentiles": 5}), "not iterable"),
    ],
)
def test_a_damaged_configuration(tmp_path, text, message):
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    folder.config_file.write_text(text)
    with pytest.raises(ValueError, match=rf"config.json` cannot be read: .*{message}"):
        folder.read_config()


def test_each_start_is_noted(tmp_path):
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    env = CONFIG.env.make_env()
    folder.note_start(env, 0)
    folder.note_start(env, 640)
    first, second = json.loads(folder.versions_file.read_text())
    assert (first["steps"], second["steps"]) == (0, 640)
    assert first["versions"]["eqx-ppo"] == __version__
    assert first["versions"]["jax"] == jax.__version__
    assert first["device"]["platform"] == jax.default_backend()
    classes = ["RewardScalingWrapper", "EpisodeWrapper", "Pendulum"]
    assert first["environment"]["classes"] == classes


@pytest.mark.parametrize("text", ["", "[{", "{}", "[" * 100_000])
def test_damaged_versions_do_not_stop_a_run(tmp_path, text):
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    folder.versions_file.write_text(text)
    with pytest.warns(UserWarning, match=r"versions\.json` could not be understood"):
        folder.note_start(CONFIG.env.make_env(), 640)
    (start,) = json.loads(folder.versions_file.read_text())
    assert start["steps"] == 640
    (kept,) = folder.path.glob("versions.damaged-*.json")
    assert kept.read_text() == text


def test_a_replaced_run_can_be_put_back(tmp_path):
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    fill(folder)
    before = sorted(folder.path.rglob("*"))
    again, old = RunFolder.replace(folder.path, OTHER)
    assert again.read_config() == OTHER
    assert old.read_config() == CONFIG
    fill(again)
    old.put_back()
    assert sorted(folder.path.rglob("*")) == before
    assert folder.read_config() == CONFIG


def test_the_policy_comes_back_from_the_folder_alone(tmp_path):
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    env = CONFIG.env.make_env()
    with pytest.raises(CheckpointError, match="checkpoints"):
        folder.load_policy()
    network, ppo, states = CONFIG.make_network(env), CONFIG.train.ppo, {}
    start = jax.jit(lambda key: new_training_state(env, network, ppo, key))(jax.random.key(0))
    with Checkpointer(folder.checkpoints) as checkpointer:
        for steps in (10, 20):
            arrays = [None if a is None else a + a.dtype.type(steps) for a in start.arrays]
            states[steps] = dataclasses.replace(start, arrays=arrays)
            checkpointer.save(states[steps], steps)
    policy = RunFolder.open(folder.path).load_policy()
    assert policy.steps == 20
    assert policy.config == CONFIG
    assert_same(split_network(policy.network)[0], states[20].arrays)
    reset = policy.env.reset(jax.random.key(0))
    np.testing.assert_array_equal(reset.obs, env.reset(jax.random.key(0)).obs)
    assert policy.env.max_len == 5  # not the one with scaled rewards
    earlier = folder.load_policy(step=10)
    assert earlier.steps == 10
    assert_same(split_network(earlier.network)[0], states[10].arrays)

    arrays = folder.checkpoints / "20" / "checkpoint" / "network.bin"
    arrays.write_bytes(bytes(arrays.stat().st_size))
    with pytest.warns(UserWarning, match="is damaged"):
        sound = folder.load_policy()
    assert sound.steps == 10  # of the weights, whatever the newest one says
    assert_same(split_network(sound.network)[0], states[10].arrays)
