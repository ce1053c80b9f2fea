"""The command line: a whole run through it, what its flags mean, and one line per mistake."""

import dataclasses
import json
import re
import runpy
import shutil
import sys
import types

import jax
import numpy as np
import pytest

from eqx_ppo import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, train_ppo
from eqx_ppo.algorithms import evaluate, split_network
from eqx_ppo.envs import CachedReset, FreshReset, PooledReset
from eqx_ppo.training import (
    EnvConfig,
    LearningCurves,
    NetworkConfig,
    RunFolder,
    RunInfo,
    TrainingDivergedError,
    TrainingInterrupted,
    VideoConfig,
    default_run_config,
    load_preset,
    read_metrics,
)
from eqx_ppo.training._cli import _commands, main
from eqx_ppo.training._cli._arguments import EVAL, read_train
from eqx_ppo.training._cli._beginning import FolderNotes
from eqx_ppo.training._cli._errors import CommandError
from eqx_ppo.training._cli._flags import _argument_help, apply, fill, form_of, parse
from tests.algorithms.common import assert_same

SMALL = {
    "max-len": 10,
    "seed": 3,
    "actor-hidden-sizes": 4,
    "critic-hidden-sizes": 4,
    "ppo.n-envs": 4,
    "ppo.rollout-length": 5,
    "ppo.n-epochs": 1,
    "ppo.n-minibatches": 2,
    "ppo.iterations-per-call": 2,
    "eval.n-envs": 3,
    "eval.every-steps": 40,
    "checkpoint-every-steps": 40,
    "video.width": 32,
    "video.height": 32,
}


def train(out, *more, n_iterations=4):
    flags = {**SMALL, "ppo.total-steps": 20 * n_iterations, "out": out}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return main(["train", "Pendulum", *words, *more])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of 80 steps. What a test adds to it is its own."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert train(folder) == 0
    return RunFolder.open(folder)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failed(capsys):
    """The one line that was said on stderr, and nothing else."""
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("eqx-ppo: error: ")
    return lines[0].removeprefix("eqx-ppo: error: ")


# --- A whole run ----------------------------------------------------------------------------


def test_what_a_run_leaves(run):
    config = run.read_config()
    assert config.env == EnvConfig(name="Pendulum", max_len=10, reward_scale=0.1)
    assert config.network == NetworkConfig(actor_hidden_sizes=(4,), critic_hidden_sizes=(4,))
    assert (config.train.seed, config.train.ppo.total_steps) == (3, 80)
    assert config.train.ppo.learning_rate == default_run_config("Pendulum").train.ppo.learning_rate
    metrics = read_metrics(run.path)
    np.testing.assert_array_equal(metrics["total_steps"], [0, 20, 40, 60, 80])
    evaluated = ~np.isnan(metrics["eval/episode_reward/mean"])
    np.testing.assert_array_equal(metrics["total_steps"][evaluated], [0, 40, 80])
    (start,) = json.loads(run.versions_file.read_text())
    assert start["steps"] == 0


def test_it_is_the_run_of_the_library(run):
    """The same settings in Python give the same weights, bit for bit."""
    config = run.read_config()
    train_config = dataclasses.replace(config.train, console=False)
    env, eval_env = config.env.make_env(), config.env.make_eval_env()
    result = train_ppo(env, config.make_network(env), train_config, eval_env=eval_env)
    loaded = run.load_policy()
    assert loaded.steps == 80
    assert_same(split_network(loaded.network)[0], result.training_state.arrays)


def test_eval(run, capsys):
    assert main(["eval", str(run.path), "--n-envs", "2", "--seed", "5", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    policy = run.load_policy()
    options = dataclasses.replace(policy.config.train.eval, n_envs=2)
    expected = jax.jit(
        lambda key: evaluate(policy.env, policy.network, options, key),
    )(jax.random.key(5))
    assert said.pop("steps") == 80
    assert said.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(said[name], value, rtol=1e-5)
    assert said["eval/lifespan/mean"] == 10

    assert main(["eval", str(run.path), "--step", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 episodes after 40 steps of training"
    assert any(re.fullmatch(r"  eval/lifespan/mean +10", line) for line in lines)
    order = [line.split()[0] for line in lines[1:] if "/lifespan/p" in line]
    assert order == [f"eval/lifespan/p{p}" for p in (0, 25, 50, 75, 100)]


def test_plot(run, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(run.path)]) == 0
    picture = run.plots / "learning_curves.png"
    assert capsys.readouterr().out.split() == [str(picture)]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_video(run, capsys):
    image = pytest.importorskip("PIL.Image")
    assert main(["video", str(run.path), "--format", "gif", "--n-episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1] for line in lines[:2]] == [" 10 steps", " 10 steps"]
    path = run.videos / "80.gif"
    assert lines[2] == f"{path} (20 pictures, 20 per second)"
    with image.open(path) as opened:
        durations = []
        for frame in range(opened.n_frames):
            opened.seek(frame)
            durations.append(opened.info["duration"])
        assert sum(durations) == 20 * 50  # pictures that are alike become one
        assert opened.size == (32, 32)  # as the run was set up


def test_resume(tmp_path):
    """In two parts as in one: every row, and the weights."""
    assert train(tmp_path / "whole", n_iterations=6) == 0
    assert train(tmp_path / "parts", n_iterations=3) == 0
    assert train(tmp_path / "parts", "--resume", n_iterations=6) == 0
    whole, parts = RunFolder.open(tmp_path / "whole"), RunFolder.open(tmp_path / "parts")
    expected, actual = read_metrics(whole.path), read_metrics(parts.path)
    np.testing.assert_array_equal(actual["total_steps"], [0, 20, 40, 60, 80, 100, 120])
    for name in ("losses/total", "losses/ratio_error"):
        np.testing.assert_array_equal(actual[name], expected[name])
    networks = [split_network(folder.load_policy().network)[0] for folder in (whole, parts)]
    assert_same(*networks)
    assert parts.read_config() == whole.read_config()
    starts = json.loads(parts.versions_file.read_text())
    assert [start["steps"] for start in starts] == [0, 60]


def test_a_continuation_that_does_not_fit_leaves_the_run_as_it_was(run, capsys):
    before = contents(run.path)
    assert train(run.path, "--resume", "--ppo.n-envs", "2", n_iterations=9) == 2
    assert "float32[4, 3] in the checkpoint, float32[2, 3] here" in failed(capsys)
    assert train(run.path, "--resume", "--actor-hidden-sizes", "4", "4", n_iterations=9) == 2
    assert "from another network" in failed(capsys)
    assert train(run.path, "--resume", n_iterations=3) == 2
    assert "has 80 steps already: `--ppo.total-steps` cannot be 60" in failed(capsys)
    after = contents(run.path)
    assert after.keys() == before.keys()
    assert after == before


def test_metrics_that_cannot_be_continued_leave_the_run_as_it_was(run, tmp_path, capsys):
    folder = RunFolder(shutil.copytree(run.path, tmp_path / "a"))
    rows = folder.metrics_file.read_text().splitlines(keepends=True)
    folder.metrics_file.write_text("".join([*rows[:2], "garbage\n", *rows[2:]]))
    before = contents(folder.path)
    assert train(folder.path, "--resume", n_iterations=9) == 2
    assert "Line 3 of" in failed(capsys)
    assert contents(folder.path) == before


def test_another_environment_or_network_is_a_warning(tmp_path):
    config = default_run_config("Pendulum")
    folder = RunFolder.create(tmp_path / "a", config)
    changed = dataclasses.replace(
        config,
        env=dataclasses.replace(config.env, reward_scale=0.2),
        network=dataclasses.replace(config.network, entropy_weight=0.5),
    )
    notes = FolderNotes(folder, changed, config.env.make_env(), None)
    expected = r"`env.reward_scale` was 0.1 and is 0.2; `network.entropy_weight` was 0.01 and is"
    with pytest.warns(UserWarning, match=expected):
        notes.start(RunInfo(total_steps=9, resumed_at=3))
    assert folder.read_config() == changed


def test_a_run_without_a_checkpoint_begins_anew(tmp_path, capsys):
    folder = RunFolder.create(tmp_path / "a", default_run_config("Pendulum"))
    folder.metrics_file.write_text('{"total_steps": 1}\n')
    assert train(folder.path, "--resume", "--eval.no-enabled", n_iterations=1) == 0
    assert "There is no checkpoint yet: the run begins anew." in capsys.readouterr().out
    np.testing.assert_array_equal(read_metrics(folder.path)["total_steps"], [20])


@pytest.mark.parametrize("sign", ["rows", "set aside"])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path, capsys, sign):
    config = default_run_config("Pendulum")
    folder = RunFolder.create(tmp_path / "a", config)
    steps = config.train.checkpoint_every_steps if sign == "rows" else 1
    folder.metrics_file.write_text(f'{{"total_steps": {steps}}}\n')
    if sign == "set aside":
        (folder.checkpoints / "set_aside").mkdir(parents=True)
    before = contents(folder.path)
    assert train(folder.path, "--resume") == 2
    assert f"has {steps:,} steps, but" in failed(capsys)
    assert contents(folder.path) == before


def test_videos_in_training(tmp_path):
    pytest.importorskip("PIL")
    more = ("--video.every-steps", "40", "--video.format", "gif", "--eval.no-enabled")
    assert train(tmp_path / "a", *more) == 0
    names = sorted(path.name for path in (tmp_path / "a" / "videos").iterdir())
    assert names == ["40.gif", "80.gif"]


def test_an_existing_run_is_replaced_on_demand_only(tmp_path, capsys):
    folder = RunFolder.create(tmp_path / "a", default_run_config("Recall"))
    assert train(folder.path) == 2
    assert "holds a run already. Continue it (`--resume`)" in failed(capsys)
    assert folder.read_config().env.name == "Recall"
    assert train(folder.path, "--resume") == 2
    assert "is one on `Recall`, not on `Pendulum`" in failed(capsys)
    assert train(folder.path, "--resume", "--overwrite") == 2
    assert "exclude each other" in failed(capsys)
    assert train(folder.path, "--overwrite", "--eval.no-enabled", n_iterations=1) == 0
    assert folder.read_config().env.name == "Pendulum"
    assert not list(folder.path.glob("replaced-*"))


def test_a_run_is_not_lost_to_one_that_does_not_begin(tmp_path, capsys):
    folder = RunFolder.create(tmp_path / "a", default_run_config("Recall"))
    (folder.checkpoints / "7").mkdir(parents=True)
    for path in (folder.checkpoints / "7" / "file", folder.metrics_file):
        path.write_text("years")
    before = contents(folder.path)
    assert train(folder.path, "--overwrite", "--ppo.reset-strategy", "pooled:3") == 2
    assert "`PooledReset.size` must be at least the number of environments" in failed(capsys)
    assert contents(folder.path) == before
    assert not list(folder.path.glob("replaced-*"))


# --- How a run can end ----------------------------------------------------------------------

RESULT = types.SimpleNamespace(total_steps=1234)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (TrainingInterrupted("", RESULT), 130, "Interrupted after 1,234 steps, which are saved"),
        (KeyboardInterrupt(), 130, "eqx-ppo: error: interrupted"),
        (TrainingDivergedError("All is lost.", RESULT), 1, "eqx-ppo: error: All is lost."),
    ],
    ids=["ctrl-c", "ctrl-c twice", "diverged"],
)
def test_ends_before_the_time(tmp_path, monkeypatch, capsys, error, status, said):
    def stopped(*args, **options):
        raise error

    monkeypatch.setattr(_commands, "train_ppo", stopped)
    assert train(tmp_path / "a") == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_a_fault_in_the_middle_of_a_run_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(*args, sinks, **options):
        for sink in sinks:
            sink.start(RunInfo(total_steps=80))
            sink.write({"total_steps": 20}, 20)
            sink.close()
        raise ValueError("a bug")

    monkeypatch.setattr(_commands, "train_ppo", broken)
    with pytest.raises(ValueError, match="a bug"):
        train(tmp_path / "a")
    assert read_metrics(tmp_path / "a")["total_steps"] == [20]


def test_what_cannot_be_written_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    def refused(*args, **options):
        raise PermissionError("Permission denied: metrics.jsonl")

    monkeypatch.setattr(_commands, "train_ppo", refused)
    assert train(tmp_path / "a") == 2
    assert failed(capsys) == "Permission denied: metrics.jsonl"
    (tmp_path / "file").touch()
    assert train(tmp_path / "file" / "a") == 2
    assert "Not a directory" in failed(capsys)


def test_settings_that_do_not_fit_the_environment_leave_no_folder(tmp_path, capsys):
    assert train(tmp_path / "a", "--ppo.reset-strategy", "pooled:3") == 2
    assert "`PooledReset.size` must be at least the number of environments" in failed(capsys)
    assert list(tmp_path.iterdir()) == []


# --- Mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fly", r"`fly` is no command\. There are train, eval, plot, video, list"),
        ("train", r"Missing from eqx-ppo train: ENV .*See `eqx-ppo train --help`\."),
        ("train Pendulum --ppo.n-envz 3", r"Unrecognized options: --ppo\.n-envz.* --ppo\.n-envs"),
        ("train Pendulum Recall", "Unrecognized options: Recall"),
        ("train Pendulum --ppo.n-envs many", r"--ppo\.n-envs.*'many'"),
        ("train Pendulum --ppo.n-envs", r"Missing value for argument '--ppo\.n-envs'"),
        ("train Pendulum --ppo.n-envs 0", r"`PPOConfig\.n_envs` must be an int of at least 1"),
        ("train Pendulum --ppo.n-envs 3", "`n_minibatches` must divide"),
        ("train Pendulum --ppo.clip-range x", r"--ppo\.clip-range.*'x'"),
        ("train Pendulum --ppo.learning-rate x", "could not convert string to float: 'x'"),
        ("train Pendulum --ppo.truncation cut", "Expected one of .*bootstrap"),
        ("train Pendulum --ppo.logging-level LOSES", "`LOSES` is not one of LOSSES"),
        ("train Pendulum --ppo.reset-strategy cached:3", "`cached:3` is not one of fresh, cached"),
        ("train Pendulum --network cnn", "Expected one of .*lstm"),
        ("train Pendulum --overrides x", "`x` is not of the form NAME=VALUE"),
        ("train Pendulum --overrides x=1", "unexpected keyword argument 'x'"),
        ("train Pendulum --preset", "There is no preset `Pendulum`"),
        ("train Pendulum --seed -1", r"`TrainConfig\.seed` must be at least 0"),
        ("train Pendulum --seed 4294967296", r"`TrainConfig\.seed` must be below"),
        ("train Pendulum --video.width 100000", r"`VideoConfig\.width` must be at most 8192"),
        ("train gym:Ant", "`gym:` is no source of environments"),
        ("train Pendulum --resume", "There is no folder `runs/Pendulum-mlp-17`"),
        ("eval", "Missing from eqx-ppo eval: RUN"),
        ("eval nowhere", "There is no folder `nowhere`"),
        ("eval .", r"`\.` is not the folder of a run"),
        ("video nowhere", "There is no folder `nowhere`"),
        ("plot nowhere", "There is no folder `nowhere`"),
        ("plot", r"Name a run folder: `eqx-ppo plot RUN`"),
        ("plot --band wide", "Expected one of .*confidence"),
        ("list all", "Unrecognized options: all"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    assert re.search(message, failed(capsys))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval --step 7", "7"),
        ("eval --seed -1", r"`--seed` must be at least 0 and below 2\*\*32, but got -1"),
        ("eval --seed 4294967296", "but got 4294967296"),
        ("video --seed 4294967296", r"`VideoConfig\.seed` must be at most 4294967295"),
        ("eval --n-envs 0", r"`EvalConfig\.n_envs` must be"),
        ("video --width 33", r"`VideoConfig\.width` must be even"),
        ("video --out film.avi", r"must end with one of .*film\.avi"),
        ("plot --metrics eval/lifes", "has no metric `eval/lifes`"),
        ("plot --out curves.txt", r"must end in one of .*curves\.txt"),
    ],
)
def test_mistakes_on_a_run(run, arguments, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    command, *flags = arguments.split()
    assert main([command, str(run.path), *flags]) == 2
    assert re.search(message, failed(capsys))
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_cannot_be_drawn(tmp_path, monkeypatch, capsys):
    config = default_run_config("Recall")
    folder = RunFolder.create(tmp_path / "a", config)
    env = config.env.make_env()
    policy = types.SimpleNamespace(steps=1, env=env, network=config.make_network(env))
    monkeypatch.setattr(RunFolder, "load_policy", lambda self, step: policy)
    assert main(["video", str(folder.path)]) == 2
    assert "`Recall` cannot be drawn" in failed(capsys)
    assert not folder.videos.exists()


@pytest.mark.playground
def test_an_environment_that_is_unknown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartpoleBallance"]) == 2
    assert "Close matches: CartpoleBalance" in capsys.readouterr().err
    assert main(["train", "CartpoleBalance", "--overrides", "mass=3"]) == 2
    assert 'Key "mass" does not exist' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- Flags ----------------------------------------------------------------------------------

RECORDS = [
    PPOConfig(),
    PPOConfig(
        learning_rate=1e-3,
        value_clip_range=0.3,
        gradient_clipping=None,
        normalize_advantages="batch",
        combine_advantages=True,
        segment_length=5,
        reset_strategy=PooledReset(refill=4),
        logging_level=LoggingLevel.ALL,
        logging_percentiles=(5, 95),
    ),
    EvalConfig(logging_level=LoggingLevel.ENV_METRICS, logging_percentiles=None),
    VideoConfig(every_steps=3, camera="side"),
    NetworkConfig(kind="lstm", actor_hidden_sizes=()),
    EnvConfig(name="Recall", overrides={"delay": 3, "name": "x"}),
    LearningCurves(metrics=("a", "b"), title="t"),
    *(load_preset(name).ppo for name in ("CartpoleBalance", "Go1JoystickFlatTerrain")),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_filled_form_gives_the_record_back(record):
    form = form_of(type(record))
    assert apply(parse(form, "test", [], fill(form, record)), record) == record


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--reset-strategy fresh", "reset_strategy", FreshReset()),
        ("--reset-strategy cached", "reset_strategy", CachedReset()),
        ("--reset-strategy pooled", "reset_strategy", PooledReset()),
        ("--reset-strategy pooled:512", "reset_strategy", PooledReset(512)),
        ("--reset-strategy pooled:none:8", "reset_strategy", PooledReset(None, 8)),
        ("--logging-level all", "logging_level", LoggingLevel.ALL),
        (
            "--logging-level losses,GRAD_NORM",
            "logging_level",
            LoggingLevel.LOSSES | LoggingLevel.GRAD_NORM,
        ),
        ("--learning-rate 1e-3", "learning_rate", 1e-3),
        ("--learning-rate none", "learning_rate", None),
        ("--segment-length none", "segment_length", None),
        ("--segment-length 10", "segment_length", 10),
        ("--logging-percentiles 5 95", "logging_percentiles", (5, 95)),
        ("--combine-advantages", "combine_advantages", True),
        ("--no-combine-advantages", "combine_advantages", False),
        ("--clip-range 0.3", "clip_range", 0.3),
    ],
)
def test_values(arguments, field, value):
    other = PPOConfig(learning_rate=0.5, segment_length=5, combine_advantages="no" in arguments)
    form = form_of(PPOConfig)
    record = apply(parse(form, "test", arguments.split(), fill(form, other)), other)
    assert vars(record)[field] == value
    assert record == dataclasses.replace(other, **{field: value})


def test_none_stands_for_none():
    for record, name in (
        (VideoConfig(camera="side"), "camera"),
        (LearningCurves(title="t"), "title"),
    ):
        form = form_of(type(record))
        words = [f"--{name}", "none"]
        assert vars(apply(parse(form, "test", words, fill(form, record)), record))[name] is None
    assert parse(EVAL, "eval", ["run", "--step", "none"]).step is None
    assert parse(EVAL, "eval", ["run", "--step", "7"]).step == 7


def test_settings_of_an_environment():
    form = form_of(EnvConfig, leave_out=("name",))
    filled = parse(form, "test", ["--overrides", "delay=3", "dt=0.5", "on=true", "name=x=y"])
    assert filled.overrides == {"delay": 3, "dt": 0.5, "on": True, "name": "x=y"}


def test_every_flag_has_its_documentation():
    for record in (PPOConfig, EvalConfig, TrainConfig, EnvConfig, NetworkConfig, VideoConfig):
        names = {field.name for field in dataclasses.fields(record)}
        assert _argument_help(record).keys() >= names, record


def test_what_is_said_decides_what_is_not(tmp_path, monkeypatch):
    """Preset and network give the other defaults, whatever the order of the flags."""
    monkeypatch.chdir(tmp_path)
    preset = load_preset("CartpoleBalance")
    request = read_train("eqx-ppo train", ["--ppo.n-envs", "64", "CartpoleBalance", "--preset"])
    assert request.config.train.ppo == dataclasses.replace(preset.ppo, n_envs=64)
    assert request.config.network.kind == "preset"
    assert str(request.out) == "runs/CartpoleBalance-preset-17"
    request = read_train("eqx-ppo train", ["brax:ant", "--network", "lstm", "--seed", "2"])
    assert request.config.network == NetworkConfig(
        kind="lstm", actor_hidden_sizes=(), critic_hidden_sizes=()
    )
    assert str(request.out) == "runs/brax-ant-lstm-2"
    request = read_train("eqx-ppo train", ["CartpoleBalance", "--preset", "--network=gru"])
    assert request.config.network.kind == "gru"
    assert request.config.train == preset.config
    assert (request.resume, request.overwrite) == (False, False)


def test_values_that_only_fit_together():
    """A rollout that the preset's segments divide, and no other."""
    request = read_train(
        "eqx-ppo train", ["CartpoleBalance", "--preset", "--ppo.segment-length", "48"]
    )
    assert request.config.train.ppo.n_segments == 10
    with pytest.raises(CommandError, match="`segment_length` must divide"):
        read_train("eqx-ppo train", ["CartpoleBalance", "--ppo.segment-length", "48"])


# --- Help and list --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], "eqx-ppo train ENV [flags]"),
        (["train", "--help"], "--ppo.n-envs"),
        (["train", "--help"], "environments stepped in parallel"),
        (["eval", "-h"], "--max-episode-length"),
        (["plot", "--help"], "--against"),
        (["video", "--help"], "--max-fps"),
        (["list", "--help"], "Lists the environments"),
    ],
)
def test_help(arguments, expected, capsys):
    assert main(arguments) == 0
    assert expected in capsys.readouterr().out


def test_help_has_the_numbers_that_hold(capsys):
    assert main(["train", "CartpoleBalance", "--preset", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert re.search(
        r"--ppo\.n-envs INT environments stepped in parallel\. \(default: 2048\)", said
    )


def test_nothing_asked_for(capsys):
    assert main([]) == 2
    assert "usage: eqx-ppo COMMAND" in capsys.readouterr().out


def absent():
    raise ImportError("not there")


def test_list(capsys, monkeypatch):
    sources = dict(_commands.SOURCES)
    sources["playground"] = sources["playground"]._replace(names=lambda: ("CartpoleBalance",))
    sources["brax"] = sources["brax"]._replace(names=lambda: ("ant",))
    sources["gymnax"] = sources["gymnax"]._replace(names=absent)
    monkeypatch.setattr(_commands, "SOURCES", sources)
    assert main(["list"]) == 0
    rows = [re.split(r"  +| (?=yes$)", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["environment", "from", "preset"]
    for row in (
        ["Pendulum", "eqx-ppo"],
        ["TwoArms", "eqx-ppo"],
        ["CartpoleBalance", "MuJoCo Playground", "yes"],
        ["brax:ant", "brax"],
        ["(not installed)", "gymnax"],
        ["CheetahRun", "not to be loaded here", "yes"],
    ):
        assert rows.count(row) == 1, row


def test_runs_that_differ_in_their_seed_are_one_curve(tmp_path, monkeypatch, capsys):
    def folder(name, seed, **changes):
        config = default_run_config("Pendulum")
        train = dataclasses.replace(config.train, seed=seed, **changes)
        return RunFolder.create(tmp_path / name, dataclasses.replace(config, train=train)).path

    first, second = folder("Pendulum-mlp-1", 1), folder("Pendulum-mlp-2", 2)
    other = folder("longer", 1, checkpoint_every_steps=7)
    again = folder("again", 1)
    drawn = {}

    def plot(runs, path, options):
        drawn.update(runs=runs, path=path, options=options)
        return path

    monkeypatch.setattr(_commands, "plot_learning_curves", plot)
    runs = [str(path) for path in (first, other, second)]
    assert main(["plot", *runs, "--metrics", "losses/actor", "--out", "x.svg"]) == 0
    assert drawn["runs"] == {"Pendulum-mlp": [first, second], "longer": [other]}
    assert drawn["options"] == LearningCurves(metrics=("losses/actor",))
    assert str(drawn["path"]) == "x.svg"

    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(first), "Pendulum-mlp-1", str(other / ".." / first.name)]) == 0
    assert drawn["runs"] == {"Pendulum-mlp-1": [first]}  # one run, and not a band of three
    assert drawn["path"] == first / "plots" / "learning_curves.png"
    assert main(["plot", *map(str, (first, again, second))]) == 0
    assert drawn["runs"] == {path.name: [path] for path in (first, again, second)}
    assert str(drawn["path"]) == "plots/learning_curves.png"
    drawn["path"].parent.mkdir()
    drawn["path"].touch()
    assert main(["plot", str(first), str(second)]) == 2
    assert "`plots/learning_curves.png` exists. Say by `--out`" in failed(capsys)


def test_python_m(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eqx-ppo", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("eqx_ppo", run_name="__main__")
    assert stopped.value.code == 0
