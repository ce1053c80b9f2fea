"""What a run logs is what docs/logging.md says, and every sink gets it."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from eqx_ppo import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, train_ppo
from eqx_ppo.algorithms import evaluate, new_training_state, ppo_step
from eqx_ppo.training import CSVSink, JSONLinesSink, Sink, read_metrics
from tests.helpers.networks import CASES

PAGE = (Path(__file__).parents[2] / "docs" / "logging.md").read_text()
LEVEL = LoggingLevel.LOSSES | LoggingLevel.GRAD_NORM
EVERYTHING = LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS
KEY = jax.random.key(0)
CASE = CASES["dict_normalizer"]
ENV = CASE.env
KEYS = {"arm", "leg", "proprio", "goal"}  # of the dicts of this environment
PPO = PPOConfig(
    n_envs=2,
    rollout_length=4,
    n_minibatches=1,
    n_epochs=1,
    total_steps=16,
    logging_level=EVERYTHING,
)
EVAL = EvalConfig(
    every_steps=8,
    n_envs=2,
    max_episode_length=5,
    logging_level=LoggingLevel.ALL,
    logging_percentiles=None,
)


def network():
    return CASE.build(KEY)


class Broken(Sink):
    """Fails at every row."""

    def start(self, run):
        pass

    def write(self, metrics, steps):
        raise OSError("no connection")

    def close(self):
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Rows of a run as `log_fn` got them, and the folder where the sinks wrote them."""
    folder, rows = tmp_path_factory.mktemp("run"), []
    config = TrainConfig(ppo=PPO, eval=EVAL, console=False)
    sinks = [
        JSONLinesSink(folder / "metrics.jsonl"),
        Broken(),
        CSVSink(folder / "metrics.csv"),
    ]
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        pytest.warns(RuntimeWarning, match="no connection|failed at 3 of 3 rows"),
    ):
        train_ppo(ENV, network(), config, log_fn=lambda row, _: rows.append(row), sinks=sinks)
    return folder, rows


# --- The table ------------------------------------------------------------------------------


def documented():
    """The names in the table, each with its family."""
    table = PAGE[PAGE.index("<!-- metrics -->") :].split("\n\n")[1]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    return {row[0].strip("| `"): row[1].strip("`") for row in rows}


def pattern(name):
    """`<name>` and `<path>` stand for one part or more."""
    parts = re.split(r"<\w+>", name)
    return re.compile(".+".join(map(re.escape, parts)))


def without_keys(name):
    """Without the parts that say of which reward, sampler or observation."""
    if name.startswith(("net/", "env/", "eval/net/", "eval/env/")):
        return name
    return "/".join(part for part in name.split("/") if part not in KEYS)


def test_every_metric_is_documented_and_every_documented_one_is_logged(run):
    _, rows = run
    logged = {without_keys(name) for row in rows for name in row}
    patterns = {name: pattern(name) for name in documented()}
    matched = {name: [d for d, p in patterns.items() if p.fullmatch(name)] for name in logged}
    assert [name for name, found in matched.items() if not found] == []
    assert patterns.keys() - {name for found in matched.values() for name in found} == set()
    # Each key of a dict has its own.
    names = {name for row in rows for name in row}
    for key in ("arm", "leg"):
        assert {f"losses/actor/{key}", f"rollout_batch/reward/{key}/mean"} <= names


@pytest.mark.parametrize("family", LoggingLevel)
def test_families_are_those_of_the_table(family):
    """Without compiling: what `ppo_step` and `evaluate` would return at this level."""
    ppo = dataclasses.replace(PPO, logging_level=family)
    evaluation = dataclasses.replace(EVAL, logging_level=family)

    def metrics(key):
        state = new_training_state(ENV, network(), ppo, key)
        trained = ppo_step(ENV, state, ppo)[1]
        return trained | evaluate(ENV, state.network, evaluation, key)

    names = {without_keys(name) for name in jax.eval_shape(metrics, KEY)}
    families = {name: f for name, f in documented().items() if not name.startswith("throughput/")}
    chosen = {name: pattern(name) for name, f in families.items() if f == family.name}
    always = {name for name, f in families.items() if f == "evaluation"}
    assert {name for name in names if not any(p.fullmatch(name) for p in chosen.values())} == always
    assert all(any(p.fullmatch(name) for name in names) for p in chosen.values())


def test_percentiles_add_to_the_documented_names():
    """Nothing but `/p0` and `/p50`, of everything but what is counted and of shares."""

    def names(percentiles):
        ppo = dataclasses.replace(PPO, logging_percentiles=percentiles)
        evaluation = dataclasses.replace(EVAL, logging_percentiles=percentiles)

        def metrics(key):
            state = new_training_state(ENV, network(), ppo, key)
            return ppo_step(ENV, state, ppo)[1] | evaluate(ENV, state.network, evaluation, key)

        return jax.eval_shape(metrics, KEY).keys()

    without, added = names(None), names((0, 50)) - names(None)
    bases = {re.sub(r"/p(0|50)$", "", name) for name in added}
    assert added == {f"{base}/p{level}" for base in bases for level in (0, 50)}
    alone = {"skipped_updates", "invalid_steps", "losses/ratio_error", "eval/finished"}
    alone |= {"eval/invalid", "rollout_batch/done_rate", "rollout_batch/truncation_rate"}
    assert {name for name in without if not name.endswith(("/mean", "/std"))} - bases == alone
    per_step = {name for name in without if name.startswith("losses/advantages/")}
    summarized = {name for name in without - per_step if name.endswith("/mean")}
    assert {name.removesuffix("/mean") for name in summarized} | per_step <= bases


# --- The sinks ------------------------------------------------------------------------------


def test_every_sink_gets_every_row(run):
    """Also beside one that fails, and with the evaluations before, during and after training."""
    folder, rows = run
    assert [row["total_steps"] for row in rows] == [0, 8, 16]
    assert all("eval/lifespan/mean" in row for row in rows)
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for row, line, cells in zip(rows, written, table, strict=True):
        seconds = line.pop("seconds")
        assert line == row
        assert float(cells.pop("seconds")) == pytest.approx(seconds, abs=1.0)
        assert {name: float(cell) for name, cell in cells.items() if cell} == row


def test_a_continued_run_has_every_step_once(tmp_path):
    """Three iterations, then again from the state after the second, up to the fourth."""
    case, saved, path = CASES["mlp"], {}, tmp_path / "metrics.jsonl"

    def train(n_iterations, sinks, **options):
        ppo = dataclasses.replace(PPO, total_steps=8 * n_iterations, logging_level=LEVEL)
        config = TrainConfig(
            ppo=ppo, eval=EvalConfig(enabled=False), checkpoint_every_steps=16, console=False
        )
        train_ppo(case.env, case.build(KEY), config, sinks=sinks, **options)

    train(4, [JSONLinesSink(tmp_path / "whole.jsonl")])
    train(3, [JSONLinesSink(path)], checkpoint_fn=lambda state, steps: saved.update({steps: state}))
    train(4, [JSONLinesSink(path)], initial_state=saved[16])
    whole, parts = read_metrics(tmp_path / "whole.jsonl"), read_metrics(path)
    assert len(path.read_text().splitlines()) == 4
    assert parts["total_steps"].tolist() == [8, 16, 24, 32]
    for name in whole.keys() - {"seconds"}:
        np.testing.assert_array_equal(parts[name], whole[name])


def test_a_sink_that_cannot_start_is_told_before_anything_runs(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"total_steps": 8}\n')

    class Untouched:
        def reset(self, key):
            raise AssertionError("too late")

        def step(self, state, action):
            raise AssertionError("too late")

    config = TrainConfig(ppo=PPO, console=False)
    with pytest.raises(FileExistsError, match="holds the metrics of another run"):
        train_ppo(Untouched(), network(), config, sinks=[JSONLinesSink(path)])
