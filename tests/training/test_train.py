"""The host loop: what it calls when, and that how it is cut up changes nothing."""

import dataclasses
import itertools
import json
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, train_ppo
from eqx_ppo.algorithms import evaluate, new_training_state, ppo_step, split_network
from eqx_ppo.envs import EpisodeWrapper, Pendulum, TimeLimitWarning
from eqx_ppo.networks import Dense, Normalizer, Sequential
from eqx_ppo.training import _loop
from tests.algorithms.common import assert_close, assert_same, differ
from tests.envs.test_five_ways import StrictState, Walk
from tests.helpers.networks import CASES, SCRIPTED, heads

PER_ITERATION = 16  # 4 environments x 4 steps
CASE = CASES["normalizer_on_top"]


def config(n_iterations=4, *, evaluate=False, every=1, seed=3, checkpoint_every=1, **changes):
    options = {"learning_rate": 1e-2, "n_envs": 4, "rollout_length": 4, "n_epochs": 1}
    options |= {"n_minibatches": 2, "total_steps": n_iterations * PER_ITERATION}
    return TrainConfig(
        ppo=PPOConfig(**options | changes),
        eval=EvalConfig(
            enabled=evaluate,
            every_steps=every * PER_ITERATION,
            n_envs=3,
            max_episode_length=6,
            logging_percentiles=None,
        ),
        seed=seed,
        checkpoint_every_steps=checkpoint_every * PER_ITERATION,
        console=False,
    )


def network():
    return CASE.build(jax.random.key(0))


class Log:
    """A `log_fn` that keeps what it is given."""

    def __init__(self):
        self.steps, self.rows = [], []

    def __call__(self, metrics, steps):
        self.steps.append(steps)
        self.rows.append(metrics)


# --- Logging (case K5) ----------------------------------------------------------------------


def test_every_iteration_is_logged():
    log = Log()
    train_ppo(CASE.env, network(), config(5, iterations_per_call=2), log_fn=log)
    assert log.steps == [16, 32, 48, 64, 80]
    for steps, row in zip(log.steps, log.rows, strict=True):
        assert row["total_steps"] == steps
        assert json.loads(json.dumps(row)) == row
        assert all(type(value) in {float, int} for value in row.values())
        assert row.keys() > {"losses/actor", "losses/critic", "losses/ratio_error"}
        assert row["losses/ratio_error"] <= 1e-5
    assert len({row["losses/total"] for row in log.rows}) == 5


def test_what_is_logged_is_what_ppo_step_returns():
    log = Log()
    options = config(3, iterations_per_call=2, logging_level=LoggingLevel.ALL)
    train_ppo(CASE.env, network(), options, log_fn=log)
    ppo = options.ppo
    run_key, _ = jax.random.split(jax.random.key(options.seed))
    state = jax.jit(lambda key: new_training_state(CASE.env, network(), ppo, key))(run_key)
    step = jax.jit(lambda state: ppo_step(CASE.env, state, ppo))
    for row in log.rows:
        state, metrics = step(state)
        assert row.keys() == metrics.keys() | {"total_steps", "throughput/train_sps"}
        for name, value in metrics.items():
            np.testing.assert_allclose(row[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ready", [[None], [True], [False, True], [True, False]])
def test_throughput(ready, monkeypatch):
    if ready != [None]:  # when a call turns out to be finished is a matter of luck
        answers = itertools.cycle(ready)
        monkeypatch.setattr(_loop, "_is_ready", lambda array: next(answers))
    log = Log()
    started = time.perf_counter()
    train_ppo(
        CASE.env,
        network(),
        config(4, iterations_per_call=1, logging_level=LoggingLevel.THROUGHPUT),
        log_fn=log,
    )
    elapsed = time.perf_counter() - started
    seconds = [PER_ITERATION / row["throughput/train_sps"] for row in log.rows]
    assert all(second > 0 for second in seconds)
    assert sum(seconds) < elapsed


@dataclasses.dataclass(frozen=True, eq=False)
class Unmeasured:
    """A pendulum with a metric that is never there."""

    observation_size = 3

    def reset(self, key):
        return Pendulum().reset(key).replace(metrics={"contact": jnp.float32(jnp.nan)})

    def step(self, state, action):
        return Pendulum().step(state.replace(metrics={}), action).replace(metrics=state.metrics)


def test_nan_is_a_float():
    log = Log()
    actor_critic = Sequential([heads(3, 1, jax.random.key(0))])
    options = config(1, logging_level=LoggingLevel.ALL)
    train_ppo(Unmeasured(), actor_critic, options, log_fn=log)
    assert np.isnan(log.rows[0]["env/contact/mean"])
    assert type(log.rows[0]["env/contact/mean"]) is float
    assert "NaN" in json.dumps(log.rows[0])
    assert log.rows[0]["invalid_steps"] == 0


def test_a_failing_log_function_is_heard():
    def broken(metrics, steps):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        train_ppo(CASE.env, network(), config(2), log_fn=broken)


# --- Evaluation -----------------------------------------------------------------------------


def test_evaluations_join_the_iteration_they_follow():
    """Before training, whenever another multiple of 2 iterations has passed, and at the end."""
    log = Log()
    result = train_ppo(
        CASE.env, network(), config(7, evaluate=True, every=2, iterations_per_call=3), log_fn=log
    )
    assert log.steps == [0, 16, 32, 48, 64, 80, 96, 112]
    evaluated = [
        s for s, row in zip(log.steps, log.rows, strict=True) if "eval/lifespan/mean" in row
    ]
    assert evaluated == [0, 32, 64, 96, 112]
    assert [row["step"] for row in result.eval_history] == evaluated
    assert not any("losses/total" in row for row in log.rows[:1])
    by_step = dict(zip(log.steps, log.rows, strict=True))
    for row in result.eval_history:
        assert row.items() <= {**by_step[row["step"]], "step": row["step"]}.items()
    assert result.final_metrics.items() >= log.rows[-1].items()
    assert result.total_steps == 112
    assert result.total_iterations == 7


def test_multiples_that_no_iteration_hits():
    """Every 24 steps with 16 per iteration: after 32 (past 24), 48, 80 (past 72), 96."""
    options = config(6, evaluate=True)
    options = dataclasses.replace(options, eval=dataclasses.replace(options.eval, every_steps=24))
    result = train_ppo(CASE.env, network(), options)
    assert [row["step"] for row in result.eval_history] == [0, 32, 48, 80, 96]


def test_evaluation_keys_vary_by_step_and_repeat_by_seed():
    """With a rate of 0 the network stays, so that only the keys can tell evaluations apart."""
    env = EpisodeWrapper(Pendulum(), 5)
    actor_critic = Sequential([heads(3, 1, jax.random.key(0))])

    def returns(seed):
        options = config(3, evaluate=True, seed=seed, learning_rate=0.0)
        history = train_ppo(env, actor_critic, options).eval_history
        return [row["eval/episode_reward/mean"] for row in history]

    first, again, other = returns(1), returns(1), returns(2)
    assert first == again
    assert len({*first, *other}) == 8


def test_evaluations_may_share_a_key():
    """Then a network that stays as it is has the same return every time; seeds still differ."""
    env = EpisodeWrapper(Pendulum(), 5)
    actor_critic = Sequential([heads(3, 1, jax.random.key(0))])

    def returns(seed):
        options = config(2, evaluate=True, seed=seed, learning_rate=0.0)
        fixed = dataclasses.replace(options.eval, vary_key=False)
        options = dataclasses.replace(options, eval=fixed)
        history = train_ppo(env, actor_critic, options).eval_history
        return [row["eval/episode_reward/mean"] for row in history]

    first, other = returns(1), returns(2)
    assert len(set(first)) == len(set(other)) == 1
    assert first != other


def test_evaluations_are_those_of_the_current_network():
    options = config(2, evaluate=True)
    result = train_ppo(CASE.env, network(), options)
    _, eval_key = jax.random.split(jax.random.key(options.seed))
    expected = jax.jit(lambda state, key: evaluate(CASE.env, state.network, options.eval, key))(
        result.training_state, jax.random.fold_in(eval_key, 2)
    )
    for name, value in expected.items():
        np.testing.assert_allclose(result.eval_history[-1][name], value, rtol=1e-5)


def test_another_environment_to_evaluate_in():
    """Where it is 3 steps long at most, and training never ends an episode."""
    result = train_ppo(
        Pendulum(),
        Sequential([heads(3, 1, jax.random.key(0))]),
        config(1, evaluate=True),
        eval_env=EpisodeWrapper(Pendulum(), 3),
    )
    assert [row["eval/lifespan/mean"] for row in result.eval_history] == [3.0, 3.0]


def test_evaluation_changes_nothing():
    results = [
        train_ppo(CASE.env, network(), config(3, evaluate=choice)).training_state
        for choice in (False, True)
    ]
    assert_same(*results)


def test_no_steps():
    log = Log()
    result = train_ppo(CASE.env, network(), config(0, evaluate=True), log_fn=log)
    assert log.steps == [0]
    assert result.total_steps == result.total_iterations == 0
    assert_same(result.training_state.network[1].kernel, network()[1].kernel)


def test_training_ends_with_the_iteration_that_reaches_the_total():
    result = train_ppo(CASE.env, network(), config(total_steps=33))
    assert result.total_steps == 48
    assert result.total_iterations == 3


# --- Seeds, chunks and continuation ---------------------------------------------------------


@pytest.fixture(scope="module")
def four():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return train_ppo(CASE.env, network(), config(4)).training_state


def test_seeds(four):
    assert_same(train_ppo(CASE.env, network(), config(4)).training_state, four)
    other = train_ppo(CASE.env, network(), config(4, seed=4)).training_state
    assert differ(other.arrays, four.arrays)


@pytest.mark.exact
@pytest.mark.parametrize("size", [1, 3, 4])
def test_chunks_change_nothing(size, four):
    """1, 3 or 8 iterations per compiled call (8 is the default): bit for bit the same."""
    state = train_ppo(CASE.env, network(), config(4, iterations_per_call=size)).training_state
    assert_same(state, four)


def test_stops_change_nothing(four):
    """Nor do evaluations and checkpoints that cut the chunks short."""
    saved = []
    state = train_ppo(
        CASE.env,
        network(),
        config(4, evaluate=True, every=3, checkpoint_every=2),
        checkpoint_fn=lambda state, steps: saved.append(steps),
    ).training_state
    assert saved == [32, 64]
    assert_same(state, four)


@pytest.mark.parametrize("name", ["normalizer_on_top", "everything"])
def test_continuing_is_as_if_never_stopped(name):
    """2 + 2 iterations equal 4, every leaf; and the state that was handed in stays usable."""
    case = CASES[name]
    actor_critic = case.build(jax.random.key(0))
    whole = train_ppo(case.env, actor_critic, config(4)).training_state
    half = train_ppo(case.env, actor_critic, config(2)).training_state
    log = Log()
    for _ in range(2):  # twice from one state
        result = train_ppo(case.env, actor_critic, config(4), initial_state=half, log_fn=log)
        assert_same(result.training_state, whole)
        assert result.total_iterations == 4
    assert log.steps == [48, 64] * 2
    assert int(half.counts.steps) == 32
    assert np.isfinite(half.rollout_state.env_state.obs).all()


def test_continuing_keeps_the_evaluation_cadence():
    env = EpisodeWrapper(Pendulum(), 5)
    actor_critic = Sequential([heads(3, 1, jax.random.key(0))])
    whole = train_ppo(env, actor_critic, config(4, evaluate=True, every=2))
    half = train_ppo(env, actor_critic, config(2, evaluate=True, every=2))
    rest = train_ppo(
        env,
        actor_critic,
        config(4, evaluate=True, every=2),
        initial_state=half.training_state,
    )
    assert whole.eval_history == half.eval_history + rest.eval_history[1:]
    assert half.eval_history[-1] == rest.eval_history[0]


def test_a_finished_run_does_not_go_on(four):
    log = Log()
    result = train_ppo(CASE.env, network(), config(4), initial_state=four, log_fn=log)
    assert log.steps == []
    assert_same(result.training_state, four)


# --- Ownership (case I13) -------------------------------------------------------------------


def test_the_network_stays_usable():
    mine = network()
    before = jax.tree.map(np.array, eqx.filter(mine, eqx.is_array))
    result = train_ppo(CASE.env, mine, config(2))
    after = eqx.filter(mine, eqx.is_array)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
    assert_same(jax.tree.map(np.asarray, after), before)
    assert differ(eqx.filter(result.training_state.network, eqx.is_array), before)
    out = mine(mine.initialize_state(2, key=jax.random.key(0)), jnp.ones((2, 2)))
    assert np.isfinite(out.output.value_estimates).all()


def test_an_optimizer_that_keeps_the_first_weights():
    keeps = optax.GradientTransformation(
        init=lambda params: params,
        update=lambda grads, state, params: (jax.tree.map(lambda g: -0.1 * g, grads), state),
    )
    mine = network()
    result = train_ppo(
        CASE.env, mine, config(2, learning_rate=None, iterations_per_call=1), optimizer=keeps
    )
    kept = jax.tree.leaves(result.training_state.optimizer_state)
    weights = [mine[1].kernel, mine[1].bias]
    for left, right in zip(kept[:2], weights, strict=True):
        np.testing.assert_array_equal(left, right)
    assert not np.array_equal(result.training_state.network[1].kernel, mine[1].kernel)


def test_checkpoints_are_copies_that_stay_usable():
    """After 2, 4 and 5 iterations; each continues to the same end."""
    saved = {}
    result = train_ppo(
        CASE.env,
        network(),
        config(5, checkpoint_every=2),
        checkpoint_fn=lambda state, steps: saved.update({steps: state}),
    )
    assert list(saved) == [32, 64, 80]
    assert [int(state.counts.iterations) for state in saved.values()] == [2, 4, 5]
    assert differ(saved[32].arrays, saved[64].arrays)
    for state in saved.values():
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        again = train_ppo(CASE.env, network(), config(5), initial_state=state)
        assert_same(again.training_state, result.training_state)


# --- Optimizers -----------------------------------------------------------------------------


def test_custom_optimizer():
    """SGD moves the weights by what `ppo_step` with it does; and the default does not."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    options = config(2, learning_rate=None)
    state = train_ppo(CASE.env, network(), options, optimizer=optimizer).training_state
    run_key, _ = jax.random.split(jax.random.key(options.seed))
    expected = jax.jit(
        lambda key: new_training_state(CASE.env, network(), options.ppo, key, optimizer=optimizer)
    )(run_key)
    step = jax.jit(lambda state: ppo_step(CASE.env, state, options.ppo, optimizer))
    for _ in range(2):
        expected, _ = step(expected)
    assert_close(state.arrays, expected.arrays, rtol=1e-5, atol=1e-6)
    default = train_ppo(CASE.env, network(), options).training_state
    assert differ(state.arrays, default.arrays)


def test_an_optimizer_and_a_learning_rate_are_an_error():
    with pytest.raises(ValueError, match=r"sets \['learning_rate'\], but an optimizer was given"):
        train_ppo(CASE.env, network(), config(1), optimizer=optax.sgd(0.1))


def test_schedules():
    """A rate that drops to 0 after one iteration (2 updates) leaves the weights where they are."""
    schedule = optax.piecewise_constant_schedule(1e-2, {2: 0.0})
    one, three = (
        train_ppo(
            SCRIPTED,
            Sequential([Dense(2, 5, key=jax.random.key(1)), heads(5, 1, jax.random.key(0))]),
            config(n_iterations, learning_rate=schedule),
        ).training_state
        for n_iterations in (1, 3)
    )
    assert_same(one.arrays, three.arrays)
    assert differ(one.optimizer_state, three.optimizer_state)


# --- Compilation ----------------------------------------------------------------------------


class Traced:
    """Counts how often JAX traces `step`."""

    def __init__(self, env):
        self.env = env
        self.traces = 0

    def reset(self, key):
        return self.env.reset(key)

    def step(self, state, action):
        self.traces += 1
        return self.env.step(state, action)


class Compilations:
    """Counts what JAX compiles."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event, duration, **details):
        self.count += event == self.EVENT


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


def test_a_run_compiles_once(compilations):
    """However many calls of whatever length: one compilation of each function."""
    traces, compiled = [], []
    for n_iterations, checkpoint_every in ((1, 9), (1, 9), (7, 2)):
        env = Traced(EpisodeWrapper(Pendulum(), 5))
        before = compilations.count
        train_ppo(
            env,
            Sequential([Normalizer(3), heads(3, 1, jax.random.key(0))]),
            config(n_iterations, evaluate=True, every=3, checkpoint_every=checkpoint_every),
            checkpoint_fn=lambda state, steps: None,
        )
        traces.append(env.traces)
        compiled.append(compilations.count - before)
    assert traces[0] == traces[1] == traces[2]
    # The first run also compiles what all runs share, such as the copy of a state.
    assert compiled[1] == compiled[2] == 3  # the start, the iteration, the evaluation


class Scaled(Traced):
    """Its rewards have a size that can be changed."""

    scale = 1.0

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(reward=state.reward * self.scale)


def test_a_run_traces_its_environment_once():
    """For layout, training and evaluation; the next run traces it anew, as it is by then."""
    env = Scaled(EpisodeWrapper(Pendulum(), 5))
    net = Sequential([Normalizer(3), heads(3, 1, jax.random.key(0))])

    def returned():
        result = train_ppo(env, net, config(1, evaluate=True))
        return result.final_metrics["eval/episode_reward/mean"]

    first = returned()
    assert env.traces == 1
    env.scale = 0.0
    assert first != returned() == 0.0
    assert env.traces == 2


class Named(Traced):
    """Keeps a string in its state."""

    def reset(self, key):
        state = self.env.reset(key)
        return state.replace(info={**state.info, "name": "pendulum"})


def test_what_is_wrong_with_an_environment_is_said_of_itself():
    """Not of what a run wraps it in."""
    net = Sequential([Normalizer(3), heads(3, 1, jax.random.key(0))])
    with pytest.warns(TimeLimitWarning, match="environment `Pendulum` reports no time limit"):
        train_ppo(Pendulum(), net, config(1))
    with pytest.raises(TypeError, match=r"leaf `\.info\['name'\]` of the environment's state"):
        train_ppo(Named(EpisodeWrapper(Pendulum(), 5)), net, config(1))


def test_a_continued_run_compiles_once(compilations, four):
    """The state of an earlier run has the same types as a new one."""
    compiled = []
    for n_iterations in (5, 5, 7):
        before = compilations.count
        train_ppo(
            CASE.env, network(), config(n_iterations, iterations_per_call=2), initial_state=four
        )
        compiled.append(compilations.count - before)
    assert compiled[1] == compiled[2] == 2  # the copy to begin with, and the iteration


def test_a_run_without_compilation_equals_a_compiled_one():
    """For debugging: `jax.disable_jit` reaches the network and the environment."""
    env = EpisodeWrapper(Pendulum(), 3)
    net = Sequential([Normalizer(3), heads(3, 1, jax.random.key(0))])
    expected = train_ppo(env, net, config(1)).training_state
    with jax.disable_jit():
        got = train_ppo(env, net, config(1)).training_state
    assert_close(got.arrays, expected.arrays, rtol=1e-4, atol=1e-5)
    assert int(got.counts.iterations) == 1


def test_states_with_strict_constructors():
    """Case I9 through the host loop: no constructor sees a placeholder."""
    env = EpisodeWrapper(Walk(StrictState), 3)
    result = train_ppo(
        env, heads(2, 1, jax.random.key(0)), config(3, evaluate=True, iterations_per_call=2)
    )
    assert isinstance(result.training_state.rollout_state.env_state, StrictState)


@pytest.mark.slow
@pytest.mark.playground
def test_playground():
    """CartpoleBalance: trains, compiles once, replays exactly."""
    from eqx_ppo import load_playground, make_mlp_actor_critic

    env = EpisodeWrapper(load_playground("CartpoleBalance"), 7)
    log = Log()
    ppo = PPOConfig(
        n_envs=4,
        rollout_length=5,
        n_minibatches=2,
        n_epochs=1,
        total_steps=80,
        iterations_per_call=2,
        logging_level=LoggingLevel.ALL,
    )
    result = train_ppo(
        env,
        make_mlp_actor_critic(5, 1, [8], [8], key=jax.random.key(0)),
        TrainConfig(
            ppo=ppo,
            eval=EvalConfig(n_envs=2, max_episode_length=10, every_steps=40),
            console=False,
        ),
        log_fn=log,
    )
    assert log.steps == [0, 20, 40, 60, 80]
    assert [row["eval/lifespan/mean"] for row in result.eval_history] == [7.0] * 3
    assert all(row["losses/ratio_error"] <= 1e-5 for row in log.rows[1:])
    assert all(np.isfinite(row["losses/total"]) for row in log.rows[1:])
    # 4 environments with episodes of 7 steps end 4 / 7 times per step in the long run.
    rates = [row["rollout_batch/truncation_rate"] for row in log.rows[1:]]
    assert abs(np.mean(rates) - 1 / 7) < 0.06
    assert int(result.training_state.network[0].count) == 80


# --- The rest -------------------------------------------------------------------------------


def test_console(capsys):
    options = dataclasses.replace(config(4, evaluate=True, every=2), console=True)
    result = train_ppo(CASE.env, network(), options)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line, row, share in zip(lines, result.eval_history, ("0 %", "50 %", "100 %"), strict=True):
        assert f"{row['step']:,} steps" in line
        assert share in line
        assert f"{row['eval/episode_reward/mean']:.2f}" in line
    train_ppo(CASE.env, network(), config(2, evaluate=True))
    assert capsys.readouterr().out == ""


def test_configuration():
    with pytest.raises(ValueError, match=r"`TrainConfig\.seed` must be at least 0, but got -1"):
        TrainConfig(seed=-1)
    assert TrainConfig(seed=2**32 - 1).seed == 4294967295
    with pytest.raises(
        ValueError, match=r"`TrainConfig\.seed` must be below 2\*\*32, but got 42949"
    ):
        TrainConfig(seed=2**32)
    for seed in (1.0, True, "1"):
        with pytest.raises(TypeError, match=r"`TrainConfig\.seed` must be an int"):
            TrainConfig(seed=seed)
    with pytest.raises(ValueError, match="checkpoint_every_steps` must be at least 1, but got 0"):
        TrainConfig(checkpoint_every_steps=0)
    with pytest.raises(TypeError, match=r"`TrainConfig\.ppo` must be a `PPOConfig`"):
        TrainConfig(ppo={"n_envs": 4})
    with pytest.raises(TypeError, match="learning_rate"):
        TrainConfig(learning_rate=1e-3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().seed = 4


def test_numpy_arrays_in_a_network():
    loaded = jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, network())
    left, right = (
        train_ppo(CASE.env, net, config(1)).training_state for net in (network(), loaded)
    )
    assert_same(left.arrays, right.arrays)
    assert split_network(network())[1] == split_network(loaded)[1]
