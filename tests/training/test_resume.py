"""Runs that end before their time, and go on as if they had not."""

import dataclasses
import math
import operator
import os
import random
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.kills import kill_often
from eqx_ppo import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, train_ppo
from eqx_ppo.envs import EpisodeWrapper, Pendulum
from eqx_ppo.networks import (
    Delay,
    Dense,
    Filter,
    GraphBuilder,
    Lift,
    Normalizer,
    Sequential,
    make_mlp_actor_critic,
)
from eqx_ppo.training import (
    Checkpointer,
    CheckpointError,
    JSONLinesSink,
    RunRecord,
    Sink,
    StructureMismatchError,
    TrainingDivergedError,
    TrainingInterrupted,
    read_metrics,
)
from eqx_ppo.training._checkpoint import _store, describe_environment
from eqx_ppo.training._resume import warn_of_changes
from eqx_ppo.training._stops import InvalidWatch
from tests.helpers.networks import CASES, SCRIPTED, heads
from tests.helpers.trees import assert_same
from tests.training.saving import state_of

PER_ITERATION = 16  # 4 environments x 4 steps
CASE = CASES["normalizer_on_top"]


def config(n_iterations=7, *, seed=3, evaluates=False, save_every=1, **changes):
    """Saves after every iteration, and evaluates after every second if at all."""
    options = {"learning_rate": 1e-2, "n_envs": 4, "rollout_length": 4, "n_epochs": 1}
    options |= {"n_minibatches": 2, "total_steps": n_iterations * PER_ITERATION}
    options |= {"iterations_per_call": 2}
    return TrainConfig(
        ppo=PPOConfig(**options | changes),
        eval=EvalConfig(
            enabled=evaluates, every_steps=2 * PER_ITERATION, n_envs=2, max_episode_length=6
        ),
        seed=seed,
        checkpoint_every_steps=save_every * PER_ITERATION,
        console=False,
    )


FEATURES = operator.itemgetter("features")  # one object: two getters are not equal


def unchanged(obs):
    return obs


def graph_network(key):
    """Delays between populations and in front of them, with normalizers on both sides."""
    keys = jax.random.split(key)
    builder = GraphBuilder()
    builder.add_input("in", 2, input_from="senses")
    builder.add_population("state", 3, activation=jnp.tanh)
    builder.add_output("out", 3, output_to="features")
    builder.connect("in", "state", delay=2, transform=Sequential([Normalizer(2), dense(keys[0])]))
    builder.connect("state", "state", delay=1)
    builder.connect("state", "out")
    layers = [Normalizer(2), Delay(jnp.zeros(2, jnp.float32), 1)]
    layers += [Filter({"senses": unchanged}), builder.build(key=keys[1])]
    return Sequential([*layers, Lift(FEATURES), heads(3, 1, keys[0])])


def dense(key):
    return Dense(2, 3, key=key)


NETWORKS = {
    "mlp": CASE.build,
    "lstm": CASES["lstm_trained_start"].build,
    "graph": graph_network,
}


def network(name="mlp", seed=0):
    return NETWORKS[name](jax.random.key(seed))


class Log:
    """A `log_fn` that keeps what it is given, and does something at a step, once."""

    def __init__(self, at=None, action=None):
        self.rows, self._at, self._action = {}, at, action

    def __call__(self, metrics, steps):
        assert steps not in self.rows
        self.rows[steps] = metrics
        if steps == self._at:
            self._action()


class CrashError(Exception):
    """What ends a run in these tests."""


def crash():
    raise CrashError


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def measured(row):
    """A row without what depends on the clock; a NaN equals itself."""
    return {name: repr(value) for name, value in row.items() if "throughput" not in name}


# --- Bit for bit (case H8) ------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    """Interrupted at a random iteration: states, rows, evaluations, counts and saves."""
    stop = PER_ITERATION * random.Random(name).randint(2, 5)
    schedule = optax.linear_schedule(1e-2, 1e-3, 12)
    options = config(learning_rate=schedule, evaluates=True, logging_level=LoggingLevel.ALL)
    whole_log, whole_saves = Log(), []
    whole = train_ppo(
        SCRIPTED,
        network(name),
        options,
        log_fn=whole_log,
        checkpoint_fn=lambda state, steps: whole_saves.append(steps),
    )
    with Checkpointer(tmp_path) as checkpointer:
        first_log = Log(at=stop, action=crash)
        with pytest.raises(CrashError):
            train_ppo(SCRIPTED, network(name), options, log_fn=first_log, checkpointer=checkpointer)
    saved = Checkpointer(tmp_path).latest()
    assert saved == stop - PER_ITERATION
    log, saves = Log(), []
    resumed = train_ppo(
        SCRIPTED,
        network(name, seed=1),
        options,
        log_fn=log,
        checkpoint_fn=lambda state, steps: saves.append(steps),
        resume_from=tmp_path,
    )
    assert_same(resumed.training_state, whole.training_state)
    expected = {steps: row for steps, row in whole_log.rows.items() if steps > saved}
    assert list(map(measured, log.rows.values())) == list(map(measured, expected.values()))
    assert list(log.rows) == list(expected)
    assert list(map(measured, resumed.eval_history)) == list(map(measured, whole.eval_history))
    assert measured(resumed.final_metrics) == measured(whole.final_metrics)
    assert saves == [steps for steps in whole_saves if steps > saved]
    assert resumed.total_steps == whole.total_steps == 7 * PER_ITERATION
    assert resumed.total_iterations == whole.total_iterations == 7


@pytest.mark.slow
@pytest.mark.playground
def test_a_resumed_run_in_playground(tmp_path):
    from eqx_ppo import load_playground

    env = EpisodeWrapper(load_playground("CartpoleBalance"), 7)
    actor_critic = make_mlp_actor_critic(5, 1, [8], [8], key=jax.random.key(0))
    ppo = PPOConfig(
        n_envs=4,
        rollout_length=5,
        n_minibatches=2,
        n_epochs=1,
        total_steps=80,
        iterations_per_call=2,
        logging_level=LoggingLevel.ALL,
    )
    options = TrainConfig(
        ppo=ppo,
        eval=EvalConfig(n_envs=2, max_episode_length=10, every_steps=40),
        checkpoint_every_steps=20,
        console=False,
    )
    whole = train_ppo(env, actor_critic, options).training_state
    with Checkpointer(tmp_path) as checkpointer:
        log = Log(at=60, action=crash)
        with pytest.raises(CrashError):
            train_ppo(env, actor_critic, options, log_fn=log, checkpointer=checkpointer)
        assert checkpointer.latest() == 40
        assert checkpointer.metadata().run.environment == {
            "classes": ["EpisodeWrapper", "Balance"],
            "settings": {"EpisodeWrapper": {"max_len": 7}},
            "backend": "jax",
        }
        resumed = train_ppo(
            env, actor_critic, options, checkpointer=checkpointer, resume_from=checkpointer
        )
    assert_same(resumed.training_state, whole)


@pytest.mark.slow
def test_a_run_that_is_killed(tmp_path):
    """Three times by SIGKILL, mostly in the middle of a save; see `benchmarks/kills.py`."""
    found = kill_often(tmp_path, kills=3, iterations=150, seed=1, longest_wait=0.15)
    assert found.failures == []
    assert found.kills == 3


# --- What is saved, and where ---------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three iterations that saved after each, and its result."""
    folder = tmp_path_factory.mktemp("finished") / "checkpoints"
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        with Checkpointer(folder) as checkpointer:
            result = train_ppo(SCRIPTED, network(), config(3), checkpointer=checkpointer)
        return folder, result


def test_the_last_checkpoint_is_the_result(finished):
    folder, result = finished
    checkpointer = Checkpointer(folder)
    assert checkpointer.steps() == [16, 32, 48]
    assert_same(checkpointer.restore(result.training_state), result.training_state)
    assert_same(checkpointer.restore_network(network(seed=1)), result.training_state.network)
    run = checkpointer.metadata().run
    assert run.environment == describe_environment(SCRIPTED)
    assert run.environment == {
        "classes": ["ScriptedEnv"],
        "settings": {"ScriptedEnv": {"truncation_key": "truncation"}},
        "backend": None,
    }
    assert run.config["ppo"]["learning_rate"] == 1e-2
    assert measured(run.metrics) == measured(result.final_metrics)


def test_a_finished_run_does_not_go_on_unless_it_is_to_be_longer(finished):
    folder, result = finished
    log = Log()
    again = train_ppo(SCRIPTED, network(), config(3), resume_from=folder, log_fn=log)
    assert log.rows == {}
    assert_same(again.training_state, result.training_state)
    assert list(map(measured, again.eval_history)) == list(map(measured, result.eval_history))
    longer = train_ppo(SCRIPTED, network(), config(5), resume_from=folder, log_fn=log)
    assert list(log.rows) == [64, 80]
    assert longer.total_iterations == 5
    # Twice from the same files.
    other = train_ppo(SCRIPTED, network(), config(5), resume_from=folder)
    assert_same(longer.training_state, other.training_state)


def test_a_new_run_sets_the_checkpoints_of_an_old_one_aside(tmp_path):
    """Case H10: it neither crashes nor loses them; a later resumption finds the new ones."""
    checkpointer = Checkpointer(tmp_path, keep=None)
    train_ppo(SCRIPTED, network(), config(3), checkpointer=checkpointer)
    with pytest.warns(UserWarning, match=r"at 16, 32, 48 steps\. They were moved to `.*set_aside`"):
        train_ppo(SCRIPTED, network(), config(1, seed=4), checkpointer=checkpointer)
    assert checkpointer.steps() == [16]
    assert Checkpointer(tmp_path / "set_aside").steps() == [16, 32, 48]
    assert checkpointer.metadata().run.config["seed"] == 4


def test_a_resumed_run_sets_later_checkpoints_aside(tmp_path):
    """They are damaged here, or it would go on from them."""
    checkpointer = Checkpointer(tmp_path, keep=None)
    whole = train_ppo(SCRIPTED, network(), config(4), checkpointer=checkpointer)
    for step in (48, 64):
        (tmp_path / str(step) / "checkpoint" / "metadata.json").write_text("")
    with (
        pytest.warns(UserWarning, match="is damaged, or is none.* of 32 steps"),
        pytest.warns(UserWarning, match="at 48, 64 steps. They were moved"),
    ):
        again = train_ppo(
            SCRIPTED, network(), config(4), checkpointer=checkpointer, resume_from=checkpointer
        )
    assert checkpointer.steps() == [16, 32, 48, 64]
    assert_same(again.training_state, whole.training_state)
    # In another place nothing is continued from.
    other = Checkpointer(tmp_path / "other")
    train_ppo(SCRIPTED, network(), config(5), checkpointer=other, resume_from=tmp_path)
    assert other.steps() == [80]


@pytest.mark.slow
def test_episodes_on_the_host_begin_anew(tmp_path):
    """Weights, statistics, the optimizer and the counts continue."""
    pytest.importorskip("gymnasium")
    from eqx_ppo.envs import HostReset
    from tests.envs import test_gymnasium as host

    def run(n_iterations, **options):
        env, _ = host.lines(4)
        settings = config(n_iterations, reset_strategy=HostReset(), save_every=2)
        return train_ppo(env, host.network(env), settings, **options)

    half = run(2, checkpointer=Checkpointer(tmp_path)).training_state
    with pytest.warns(UserWarning, match=r"`GymnasiumEnv` runs on the host.* all begin anew"):
        stopped = run(2, resume_from=tmp_path).training_state
    assert_same(stopped.arrays, half.arrays)
    assert_same(stopped.optimizer_state, half.optimizer_state)
    assert stopped.rollout_state.fresh.all()
    assert int(stopped.counts.iterations) == 2


def test_sinks_and_checkpoints_agree_on_where_a_run_begins(finished):
    folder, _ = finished

    class Noting(Sink):
        def __init__(self):
            self.calls = []

        def start(self, run):
            self.calls.append(("start", run.total_steps, run.resumed_at))
            self.config = run.config

        def write(self, metrics, steps):
            self.calls.append(steps)

        def close(self):
            self.calls.append("close")

    new, resumed = Noting(), Noting()
    train_ppo(SCRIPTED, network(), config(1, evaluates=True), sinks=[new])
    options = config(4, evaluates=True)
    train_ppo(SCRIPTED, network(), options, sinks=[resumed], resume_from=folder)
    assert new.calls == [("start", 16, None), 0, 16, "close"]
    assert resumed.calls == [("start", 64, 48), 64, "close"]
    assert resumed.config["seed"] == 3
    failing = Noting()
    with pytest.raises(CrashError):
        train_ppo(SCRIPTED, network(), config(1), sinks=[failing], log_fn=Log(at=16, action=crash))
    assert failing.calls[-1] == "close"


def test_the_best_are_kept_by_the_evaluation_of_their_step(tmp_path):
    """Evaluations after every second iteration: only those checkpoints have a score."""
    checkpointer = Checkpointer(tmp_path, keep=1, keep_best=1)
    result = train_ppo(SCRIPTED, network(), config(5, evaluates=True), checkpointer=checkpointer)
    returns = {row["step"]: row["eval/episode_reward/mean"] for row in result.eval_history[1:]}
    assert list(returns) == [32, 64, 80]
    best = max(returns, key=lambda step: (returns[step], step))
    assert checkpointer.steps() == sorted({best, 80})
    assert checkpointer.best() == best
    assert checkpointer.metadata(best).score == returns[best]


# --- What is refused, and what is said ------------------------------------------------------


def test_what_cannot_be_resumed(finished, tmp_path):
    folder, result = finished
    with pytest.raises(CheckpointError, match="There is no complete checkpoint in"):
        train_ppo(SCRIPTED, network(), config(3), resume_from=tmp_path)
    with pytest.raises(ValueError, match="`initial_state` and `resume_from` both say"):
        train_ppo(
            SCRIPTED,
            network(),
            config(3),
            initial_state=result.training_state,
            resume_from=folder,
        )
    with pytest.raises(StructureMismatchError, match=r"LSTM here"):
        train_ppo(SCRIPTED, network("lstm"), config(3), resume_from=folder)
    with pytest.raises(StructureMismatchError, match=r"`rollout_state.*\[4.* here|\[8"):
        train_ppo(SCRIPTED, network(), config(3, n_envs=8), resume_from=folder)
    with pytest.raises(StructureMismatchError, match=r"`optimizer_state"):
        train_ppo(
            SCRIPTED,
            network(),
            config(3, learning_rate=None),
            optimizer=optax.sgd(0.1),
            resume_from=folder,
        )


def test_other_settings_are_said(finished, recwarn):
    folder, _ = finished
    train_ppo(
        SCRIPTED,
        network(),
        config(3, evaluates=True, save_every=5, logging_level=LoggingLevel.ALL),
        resume_from=folder,
    )
    assert len(recwarn) == 0
    with pytest.warns(UserWarning, match="with other settings than it began with") as caught:
        train_ppo(SCRIPTED, network(), config(3, seed=5, clip_range=0.1), resume_from=folder)
    message = str(caught[0].message)
    assert "`seed` was 3 and is 5" in message
    assert "`ppo.clip_range` was 0.2 and is 0.1" in message
    assert message.count(" was ") == 2


def test_another_environment_is_said(tmp_path, recwarn):
    """Numbers and strings among the fields, of several of one class each; also what JSON lacks."""

    @dataclasses.dataclass(frozen=True)
    class Bounded(Exploding):
        env: EpisodeWrapper
        bound: float
        table: np.ndarray

    def record(inner, outer, bound):
        env = EpisodeWrapper(EpisodeWrapper(Pendulum(), inner), outer)
        env = Bounded(env, np.float32(bound), np.zeros(3))
        return RunRecord(config={"seed": 1}, environment=describe_environment(env))

    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(state_of(), 1, run=record(200, 100, math.inf))
    saved = checkpointer.metadata()
    warn_of_changes(saved, record(200, 100, math.inf))
    assert len(recwarn) == 0
    with pytest.warns(UserWarning, match="with other settings") as caught:
        warn_of_changes(saved, record(300, 100, 2.0))
    message = str(caught[0].message)
    assert "`environment.settings.EpisodeWrapper.2.max_len` was 200 and is 300" in message
    assert "`environment.settings.Bounded.bound` was 'inf' and is 2.0" in message
    assert message.count(" was ") == 2


def test_a_run_says_where_it_continues(finished, tmp_path, capsys):
    """And that a save was not finished."""
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    (folder / "64.orbax-checkpoint-tmp").mkdir()
    options = dataclasses.replace(config(3), console=True)
    train_ppo(SCRIPTED, network(), options, resume_from=folder)
    assert (
        f"Continuing from 48 steps in `{folder}`. "
        "Saves that were not finished: ['64.orbax-checkpoint-tmp']."
    ) in capsys.readouterr().out


def test_a_run_that_is_refused_moves_no_checkpoints(tmp_path):
    """By a sink, over an old run's metrics, or for its network; resuming finds everything."""
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    sinks = [JSONLinesSink(tmp_path / "metrics.jsonl")]
    train_ppo(SCRIPTED, network(), config(2), checkpointer=checkpointer, sinks=sinks)
    with pytest.raises(FileExistsError, match="Resume that run"):
        train_ppo(SCRIPTED, network(), config(3), checkpointer=checkpointer, sinks=sinks)
    with pytest.raises(TypeError, match="PPONetworkOutput"):
        train_ppo(SCRIPTED, Lift(unchanged), config(3), checkpointer=checkpointer)
    assert checkpointer.steps() == [16, 32]
    options = {"checkpointer": checkpointer, "resume_from": checkpointer, "sinks": sinks}
    train_ppo(SCRIPTED, network(), config(3), **options)
    assert read_metrics(tmp_path)["total_steps"].tolist() == [16, 32, 48]


def test_sinks_are_closed_when_checkpoints_cannot_be_moved(tmp_path, monkeypatch):
    calls = []

    class Noting(Sink):
        def start(self, run):
            calls.append("start")

        def write(self, metrics, steps):
            calls.append("write")

        def close(self):
            calls.append("close")

    monkeypatch.setattr(Checkpointer, "begin", lambda self, continues_at: crash())
    with pytest.raises(CrashError):
        train_ppo(
            SCRIPTED, network(), config(1), checkpointer=Checkpointer(tmp_path), sinks=[Noting()]
        )
    assert calls == ["start", "close"]


def test_a_state_is_saved_before_it_is_handed_out(tmp_path):
    """`checkpoint_fn` may take long, or fail: the checkpoint is not lost for it."""
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CrashError):
        train_ppo(
            SCRIPTED,
            network(),
            config(2),
            checkpointer=checkpointer,
            checkpoint_fn=lambda state, steps: crash(),
        )
    assert checkpointer.steps() == [16]


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    log = Log()
    with pytest.raises(CheckpointError, match="Checkpoints cannot be written to"):
        train_ppo(
            SCRIPTED,
            network(),
            config(1),
            checkpointer=Checkpointer(tmp_path / "file" / "below"),
            log_fn=log,
        )
    assert log.rows == {}


def test_a_save_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    original, calls = _store.Writer.save, []

    def save(self, step, checkpoint):
        calls.append(step)
        if step == 32:
            raise CheckpointError("No space left on device.")
        original(self, step, checkpoint)

    monkeypatch.setattr(_store.Writer, "save", save)
    checkpointer = Checkpointer(tmp_path)
    with pytest.warns(RuntimeWarning, match="No space left on device. Training goes on"):
        result = train_ppo(SCRIPTED, network(), config(3), checkpointer=checkpointer)
    assert result.total_iterations == 3
    assert calls == [16, 32, 48]
    assert checkpointer.steps() == [16, 48]


# --- Ctrl-C ---------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT, which a job in the background of a shell ignores."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals need the main thread")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_and_ends(tmp_path, capfd):
    """The iterations that run are finished; what follows is the uninterrupted run."""
    whole = train_ppo(SCRIPTED, network(), config()).training_state
    options = config(save_every=100)
    checkpointer = Checkpointer(tmp_path)
    log = Log(at=48, action=interrupt)
    with pytest.raises(TrainingInterrupted, match=r"after \d+ steps.* go on with `resume_from`"):
        train_ppo(SCRIPTED, network(), options, log_fn=log, checkpointer=checkpointer)
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (saved,) = checkpointer.steps()
    assert saved == max(log.rows) < 7 * PER_ITERATION
    resumed = train_ppo(SCRIPTED, network(), options, resume_from=tmp_path)
    assert_same(resumed.training_state, whole)


@pytest.mark.usefixtures("ctrl_c")
def test_what_ctrl_c_raises_has_the_result():
    with pytest.raises(KeyboardInterrupt) as caught:
        train_ppo(SCRIPTED, network(), config(), log_fn=Log(at=32, action=interrupt))
    assert isinstance(caught.value, TrainingInterrupted)
    result = caught.value.result
    assert result.total_steps == int(result.training_state.counts.steps) < 7 * PER_ITERATION
    whole = train_ppo(SCRIPTED, network(), config()).training_state
    rest = train_ppo(SCRIPTED, network(), config(), initial_state=result.training_state)
    assert_same(rest.training_state, whole)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_heard_at_the_very_end_too(tmp_path):
    """What follows `train_ppo` in a script is not to go on."""
    checkpointer = Checkpointer(tmp_path, keep=None)
    with pytest.raises(TrainingInterrupted) as caught:
        train_ppo(
            SCRIPTED,
            network(),
            config(2),
            log_fn=Log(at=32, action=interrupt),
            checkpointer=checkpointer,
        )
    assert caught.value.result.total_iterations == 2
    assert checkpointer.steps() == [16, 32]
    assert not (tmp_path / "set_aside").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_twice_ends_at_once(tmp_path):
    def twice():
        interrupt()
        interrupt()

    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught:
        train_ppo(
            SCRIPTED,
            network(),
            config(),
            log_fn=Log(at=48, action=twice),
            checkpointer=checkpointer,
        )
    assert type(caught.value) is KeyboardInterrupt
    assert checkpointer.latest() == 32
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_a_handler_of_the_program_stays():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    result = train_ppo(SCRIPTED, network(), config(), log_fn=Log(at=96, action=interrupt))
    assert seen
    assert result.total_iterations == 7


# --- Environments that do not stay finite ---------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Exploding:
    """A pendulum whose reward is no number from the second step of an episode on."""

    observation_size = 3

    def reset(self, key):
        return Pendulum().reset(key)

    def step(self, state, action):
        stepped = Pendulum().step(state, action)
        return stepped.replace(reward=jnp.full((), jnp.nan, jnp.float32))


def exploding_run(n_iterations=8, **changes):
    env = EpisodeWrapper(Exploding(), 5)
    actor_critic = Sequential([heads(3, 1, jax.random.key(0))])
    options = config(n_iterations, iterations_per_call=1, logging_level=LoggingLevel.NONE)
    return env, actor_critic, dataclasses.replace(options, **changes)


def test_a_run_whose_environments_break_stops_after_saving(tmp_path):
    env, actor_critic, options = exploding_run(invalid_window=3, checkpoint_every_steps=10_000)
    checkpointer = Checkpointer(tmp_path)
    log = Log()
    with pytest.raises(TrainingDivergedError) as caught:
        train_ppo(env, actor_critic, options, checkpointer=checkpointer, log_fn=log)
    message = str(caught.value)
    assert "48 of the 48 environment steps of the last 3 iterations were invalid" in message
    assert "`check_env`" in message
    assert "`TrainConfig.max_invalid_share`" in message
    assert "go on with `resume_from`" in message
    result = caught.value.result
    assert result.total_steps == checkpointer.latest() == max(log.rows) < 8 * PER_ITERATION
    assert int(result.training_state.counts.invalid_steps) == result.total_steps
    assert np.isfinite(result.training_state.network[0].value.kernel).all()
    # What was saved remembers the iterations before, so it does not start to count anew.
    with pytest.raises(TrainingDivergedError):
        train_ppo(env, actor_critic, options, resume_from=tmp_path)


def test_a_share_of_one_never_stops():
    env, actor_critic, options = exploding_run(4, invalid_window=1, max_invalid_share=1.0)
    assert train_ppo(env, actor_critic, options).total_iterations == 4


def test_how_many_are_too_many():
    """16 steps per iteration, 3 iterations: more than 24 of 48."""
    options = dataclasses.replace(config(), invalid_window=3)
    watch = InvalidWatch(options)
    assert [watch.add(count) for count in (16, 16, 0, 0, 9, 15, 0, 16)] == [
        False,  # the window is not full
        False,
        True,  # 32
        False,  # 16
        False,  # 9
        False,  # 24
        False,  # 24
        True,  # 31
    ]
    assert watch.recent == [15, 0, 16]
    assert "31 of the 48" in watch.describe(128)
    assert "It began after 80 steps or earlier (now 128)" in watch.describe(128)
    resumed = InvalidWatch(options, [15, 0])
    assert resumed.add(16)
