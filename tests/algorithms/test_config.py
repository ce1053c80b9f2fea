"""Every field of the configuration is checked, and every one has an effect."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo.algorithms import (
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    make_optimizer,
    new_training_state,
    ppo_step,
)
from eqx_ppo.envs import CachedReset
from eqx_ppo.training import TrainConfig
from tests.algorithms.common import (
    assert_same,
    compiled,
    differ,
    rollout_of,
    small_config,
)
from tests.helpers.networks import CASES

# --- Values that are refused (case E5) ------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_envs": 10, "n_minibatches": 4},
            r"n_minibatches=4 for n_envs=10 \* 1 = 10\. No environment is dropped",
        ),
        ({"n_envs": 2, "n_minibatches": 4}, r"n_minibatches=4 for n_envs=2 \* 1 = 2"),
        (
            {"n_envs": 3, "rollout_length": 6, "segment_length": 3, "n_minibatches": 4},
            r"n_minibatches=4 for n_envs=3 \* 2 = 6",
        ),
        (
            {"rollout_length": 20, "segment_length": 6},
            "segment_length=6 and rollout_length=20",
        ),
        (
            {"n_envs": 12, "n_minibatches": 2, "replay_chunks": 4},
            "replay_chunks=4 for 12 / n_minibatches=2 = 6",
        ),
        ({"segment_length": 0}, "segment_length` must be an int of at least 1, but got 0"),
        ({"n_envs": 0}, "n_envs` must be an int of at least 1, but got 0"),
        ({"n_envs": 4.0}, "n_envs` must be an int of at least 1, but got 4.0"),
        ({"n_envs": True}, "n_envs` must be an int of at least 1, but got True"),
        ({"n_epochs": 0}, "n_epochs` must be an int of at least 1, but got 0"),
        ({"n_minibatches": 0}, "n_minibatches` must be an int of at least 1, but got 0"),
        ({"rollout_length": 0}, "rollout_length` must be an int of at least 1, but got 0"),
        ({"iterations_per_call": 0}, "iterations_per_call` must be an int of at least 1"),
        ({"total_steps": -1}, "total_steps` must be an int of at least 0, but got -1"),
        ({"gae_lambda": 1.5}, r"gae_lambda` must be in \[0.0, 1.0\], but got 1.5"),
        ({"discounting_factor": -0.1}, r"discounting_factor` must be in \[0.0, 1.0\]"),
        ({"discounting_factor": np.float32(1.5)}, r"discounting_factor` must be in \[0.0, 1.0\]"),
        ({"clip_range": 0.0}, r"clip_range` must be in \(0.0, inf\], but got 0.0"),
        ({"value_clip_range": -1}, r"value_clip_range` must be in \(0.0, inf\], but got -1"),
        ({"gradient_clipping": 0}, r"gradient_clipping` must be in \(0.0, inf\], but got 0"),
        ({"learning_rate": -1e-3}, r"learning_rate` must be in \[0.0, inf\], but got -0.001"),
        ({"learning_rate": float("nan")}, r"learning_rate` must be in \[0.0, inf\], but got nan"),
        ({"weight_decay": -1.0}, r"weight_decay` must be in \[0.0, inf\]"),
        ({"critic_loss_weight": -1.0}, r"critic_loss_weight` must be in \[0.0, inf\]"),
        ({"normalize_advantages": "rollout"}, r"must be one of \('minibatch', 'batch', 'none'\)"),
        ({"advantages": "batch"}, r"must be one of \('rollout', 'minibatch'\)"),
        ({"truncation": "masked"}, r"truncation` must be one of \('bootstrap', 'mask'\)"),
        (
            {"advantages": "minibatch", "normalize_advantages": "batch"},
            "needs advantages of the whole rollout",
        ),
        ({"logging_percentiles": (50, 101)}, r"must lie in 0 to 100, but got \(50, 101\)"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


def test_unknown_fields():
    with pytest.raises(TypeError, match="entropy_cost"):
        PPOConfig(entropy_cost=1e-2)
    with pytest.raises(TypeError):
        PPOConfig(256)  # by keyword only


@pytest.mark.parametrize("name", ["every_steps", "n_envs", "max_episode_length"])
def test_evaluation_needs_positive_numbers(name):
    with pytest.raises(ValueError, match=f"EvalConfig.{name}` must be an int of at least 1"):
        EvalConfig(**{name: 0})


def test_arrays_are_taken_as_they_are():
    rate = jnp.array([-1.0])
    assert PPOConfig(learning_rate=rate).learning_rate is rate


def test_booleans_for_the_normalization():
    assert PPOConfig(normalize_advantages=True) == PPOConfig(normalize_advantages="minibatch")
    assert PPOConfig(normalize_advantages=False) == PPOConfig(normalize_advantages="none")


def test_derived_numbers():
    config = PPOConfig(n_envs=6, rollout_length=12, segment_length=4, n_minibatches=9)
    assert config.n_segments == 3
    assert config.steps_per_iteration == 72
    assert PPOConfig().n_segments == 1


# --- Every field matters (case E11) ---------------------------------------------------------

SINGLE, DICT = CASES["normalizer_on_top"], CASES["dict"]

# Numbers, which one compiled run takes as arguments: before and after the change.
NUMBERS = {
    "gae_lambda": (0.95, 0.5),
    "discounting_factor": (0.99, 0.9),
    "clip_range": (0.2, 1e-3),
    "value_clip_range": (1.0, 1e-3),
    "learning_rate": (1e-2, 1e-3),
    "gradient_clipping": (1.0, 0.1),
    "weight_decay": (1e-3, 0.1),
    "critic_loss_weight": (1.0, 0.5),
}
CHANGES = {
    "n_envs": 2,
    "rollout_length": 6,
    "normalize_advantages": "none",
    "advantages": "minibatch",
    "truncation": "mask",
    "n_epochs": 3,
    "n_minibatches": 4,
    "segment_length": 2,
    "reset_strategy": CachedReset(),
    # Turned on at all:
    "value_clip_range": 1e-3,
    "gradient_clipping": 0.1,
    "weight_decay": 0.1,
}
CHANGE_THE_START = {"n_envs", "reset_strategy", "gradient_clipping", "weight_decay"}
DICT_CHANGES = {"combine_advantages": True}
WITHOUT_EFFECT_ON_A_STEP = {
    "total_steps": 64,  # when the training loop ends
    "iterations_per_call": 3,  # how the training loop calls; see tests/training
    "logging_level": LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS,
    "logging_percentiles": (50,),
}
WITHOUT_EFFECT_BUT_ROUNDING = {"replay_chunks"}  # see test_memory.py
BASE = {"learning_rate": 1e-2}


@functools.cache
def started(case):
    """The start of training; most settings do not enter it."""
    start, _ = compiled(case.env, case.build(jax.random.key(0)), small_config(**BASE))
    return start(jax.random.key(1))


def run(case, **changes):
    """The weights after two iterations, and the metrics of the last."""
    config = small_config(**BASE | changes)
    start, step = compiled(case.env, case.build(jax.random.key(0)), config)
    state = start(jax.random.key(1)) if changes.keys() & CHANGE_THE_START else started(case)
    for _ in range(2):
        state, metrics = step(state)
    return state.arrays, metrics


@pytest.fixture(scope="module")
def base():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return {id(case): run(case) for case in (SINGLE, DICT)}


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [(SINGLE, name, value) for name, value in CHANGES.items()]
    + [(DICT, name, value) for name, value in DICT_CHANGES.items()],
    ids=[*CHANGES, *DICT_CHANGES],
)
def test_field_changes_the_result(case, name, value, base):
    arrays, _ = run(case, **{name: value})
    assert differ(arrays, base[id(case)][0])


@pytest.fixture(scope="module")
def run_with_numbers():
    """Weights after two iterations, as a compiled function of the numbers."""

    @jax.jit
    def compiled_run(numbers):
        config = small_config(**numbers)
        network = SINGLE.build(jax.random.key(0))
        state = new_training_state(SINGLE.env, network, config, jax.random.key(1))
        for _ in range(2):
            state, _ = ppo_step(SINGLE.env, state, config)
        return state.arrays

    def run(**changes):
        numbers = {name: before for name, (before, _) in NUMBERS.items()} | changes
        return compiled_run({name: jnp.float32(number) for name, number in numbers.items()})

    return run


@pytest.mark.parametrize("name", NUMBERS)
def test_number_changes_the_result(name, run_with_numbers):
    assert differ(run_with_numbers(**{name: NUMBERS[name][1]}), run_with_numbers())


@pytest.mark.exact
@pytest.mark.parametrize("name", WITHOUT_EFFECT_ON_A_STEP)
def test_field_changes_nothing_but_what_is_logged(name, base):
    arrays, metrics = run(SINGLE, **{name: WITHOUT_EFFECT_ON_A_STEP[name]})
    expected, expected_metrics = base[id(SINGLE)]
    assert_same(arrays, expected)
    assert (metrics.keys() > expected_metrics.keys()) == name.startswith("logging")


def test_no_field_is_forgotten():
    fields = {field.name for field in dataclasses.fields(PPOConfig)}
    on_results = CHANGES.keys() | NUMBERS.keys() | DICT_CHANGES.keys()
    on_results |= WITHOUT_EFFECT_BUT_ROUNDING
    assert fields == on_results | WITHOUT_EFFECT_ON_A_STEP.keys()


# --- Logging levels -------------------------------------------------------------------------

FAMILIES = {
    LoggingLevel.LOSSES: {
        "losses/actor",
        "losses/critic",
        "losses/regularization",
        "losses/total",
        "losses/ratio_error",
        "skipped_updates",
        "invalid_steps",
    },
    LoggingLevel.CRITIC_EXTRA: {
        "losses/critic_R^2",
        "losses/advantages/mean",
        "losses/advantages/std",
        "losses/predicted_value/mean",
        "losses/predicted_value/std",
    },
    LoggingLevel.ACTOR_EXTRA: {
        "losses/clipping_fraction",
        "losses/approximate_kl",
        "log_likelihood/mean",
        "log_likelihood/std",
    },
    LoggingLevel.ROLLOUT_STATS: {
        "rollout_batch/reward/mean",
        "rollout_batch/reward/std",
        "rollout_batch/action/mean",
        "rollout_batch/action/std",
        "rollout_batch/done_rate",
        "rollout_batch/truncation_rate",
    },
    LoggingLevel.ROLLOUT_OBS: {"rollout_batch/obs/mean", "rollout_batch/obs/std"},
    LoggingLevel.GRAD_NORM: {"grad_norm"},
    LoggingLevel.WEIGHTS: {"weights/mean", "weights/std"},
    LoggingLevel.NETWORK_METRICS: {
        f"net/2/action/1/{name}/{part}"
        for name in ("mean", "std", "entropy")
        for part in ("mean", "std")
    },
    LoggingLevel.ENV_METRICS: set(),  # this environment reports none
    LoggingLevel.THROUGHPUT: set(),  # the training loop adds it
    LoggingLevel.NONE: set(),
}


@pytest.mark.parametrize("level", FAMILIES, ids=str)
def test_each_level_logs_its_family_and_no_more(level):
    config = small_config(**BASE, logging_level=level)
    state = started(SINGLE)
    metrics = jax.eval_shape(lambda state: ppo_step(SINGLE.env, state, config)[1], state)
    assert metrics.keys() == FAMILIES[level]
    assert all(value.shape == () for value in metrics.values())


def test_all_that_is_logged_is_finite():
    level = LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS
    _, metrics = run(SINGLE, logging_level=level)
    assert metrics.keys() == set().union(*FAMILIES.values())
    assert all(np.isfinite(value) for value in metrics.values())


def test_percentiles_are_those_of_numpy():
    """Of a rollout's rewards and of the gradient steps' losses."""
    case = CASES["mlp"]
    config = small_config(
        logging_level=LoggingLevel.ROLLOUT_STATS | LoggingLevel.LOSSES,
        logging_percentiles=(0, 25, 100),
    )
    start, step = compiled(case.env, case.build(jax.random.key(0)), config)
    state = start(jax.random.key(1))
    rewards = np.asarray(rollout_of(case.env, config)(state).transitions.rewards)
    _, metrics = step(state)
    for level in (0, 25, 100):
        np.testing.assert_allclose(
            metrics[f"rollout_batch/reward/p{level}"], np.percentile(rewards, level), rtol=1e-6
        )
    np.testing.assert_allclose(metrics["rollout_batch/reward/mean"], rewards.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["rollout_batch/reward/std"], rewards.std(), rtol=1e-6)
    low, middle, high = (float(metrics[f"losses/total/p{level}"]) for level in (0, 25, 100))
    assert low < middle < high
    assert low < float(metrics["losses/total"]) < high


# --- The optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 1e-3}, {"gradient_clipping": 1.0}, {"weight_decay": 0.0}]
)
def test_an_optimizer_and_its_settings_are_an_error(changes):
    with pytest.raises(ValueError, match=rf"sets \['{next(iter(changes))}'\], but an optimizer"):
        make_optimizer(PPOConfig(**changes), optax.sgd(1.0))


def test_a_given_optimizer_is_used():
    optimizer = optax.sgd(1.0)
    assert make_optimizer(PPOConfig(), optimizer) is optimizer


def first_step(config, grads):
    params = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([0.5])}
    optimizer = make_optimizer(config)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return np.concatenate([updates["w"], updates["b"]])


def test_default_optimizer():
    """Adam's first step is the rate against the sign of the gradient; AdamW shrinks too."""
    grads = {"w": jnp.array([3.0, -4.0]), "b": jnp.array([0.0])}
    np.testing.assert_allclose(first_step(PPOConfig(), grads), [-3e-4, 3e-4, 0.0], rtol=1e-5)
    rate = PPOConfig(learning_rate=0.1)
    np.testing.assert_allclose(first_step(rate, grads), [-0.1, 0.1, 0.0], rtol=1e-5)
    decay = PPOConfig(learning_rate=0.1, weight_decay=0.5)
    expected = [-0.1 - 0.05 * 1.0, 0.1 + 0.05 * 2.0, -0.05 * 0.5]
    np.testing.assert_allclose(first_step(decay, grads), expected, rtol=1e-5)


def test_gradient_clipping_bounds_the_global_norm():
    """Seen through Adam's epsilon: a clipped gradient of norm 1e-8 gives a visibly small step."""
    grads = {"w": jnp.array([3.0, -4.0]), "b": jnp.array([0.0])}
    step = first_step(PPOConfig(learning_rate=1.0, gradient_clipping=1e-8), grads)
    sizes = np.array([0.6e-8, 0.8e-8])
    np.testing.assert_allclose(np.abs(step[:2]), sizes / (sizes + 1e-8), rtol=1e-3)


def test_schedules_count_updates():
    config = PPOConfig(learning_rate=optax.linear_schedule(0.1, 0.0, 2))
    optimizer = make_optimizer(config)
    params, grads = jnp.array([1.0]), jnp.array([1.0])
    state, sizes = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            updates, state = optimizer.update(grads, state, params)
            sizes.append(-float(updates[0]))
    np.testing.assert_allclose(sizes, [0.1, 0.05, 0.0], rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PPOConfig(reset_strategy="cached"), "`ResetStrategy`, such as `PooledReset"),
        (lambda: PPOConfig(reset_strategy=CachedReset), "`ResetStrategy`, such as `PooledReset"),
        (lambda: PPOConfig(logging_level="ALL"), "`LoggingLevel`, such as"),
        (lambda: EvalConfig(logging_level=3), "`LoggingLevel`, such as"),
        (lambda: TrainConfig(ppo=EvalConfig()), "`TrainConfig.ppo` must be a `PPOConfig`"),
        (lambda: TrainConfig(checkpoint_every_steps=2e1), "must be an int, but got `20.0`"),
        (lambda: TrainConfig(seed=True), "must be an int, but got `True`"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_numpy_integers_are_integers():
    assert TrainConfig(seed=np.int64(3)).seed == 3
