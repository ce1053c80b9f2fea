"""Settings as JSON: every field, and back."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo import EvalConfig, LoggingLevel, PPOConfig, TrainConfig
from eqx_ppo.envs import CachedReset, FreshReset, PooledReset, ResetStrategy
from eqx_ppo.training import config_from_json, config_to_json, load_preset

# Every field with another value than its default.
OTHER = TrainConfig(
    ppo=PPOConfig(
        n_envs=8,
        rollout_length=6,
        total_steps=2**40,
        gae_lambda=0.9,
        discounting_factor=1,
        clip_range=float("inf"),
        value_clip_range=0.3,
        learning_rate=0.1,
        gradient_clipping=1.0,
        weight_decay=1e-4,
        normalize_advantages="none",
        combine_advantages=True,
        advantages="minibatch",
        truncation="mask",
        n_epochs=2,
        n_minibatches=8,
        segment_length=3,
        replay_chunks=2,
        critic_loss_weight=0.5,
        reset_strategy=PooledReset(size=20, refill=3),
        iterations_per_call=3,
        logging_level=LoggingLevel.LOSSES | LoggingLevel.GRAD_NORM,
        logging_percentiles=(0, 50),
    ),
    eval=EvalConfig(
        enabled=False,
        every_steps=7,
        n_envs=3,
        max_episode_length=5,
        deterministic=False,
        vary_key=False,
        logging_level=LoggingLevel.ALL,
        logging_percentiles=None,
    ),
    seed=3,
    checkpoint_every_steps=9,
    console=False,
    max_invalid_share=0.25,
    invalid_window=4,
)


def through_json(config):
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    text = json.dumps(config_to_json(config), allow_nan=False)
    return config_from_json(json.loads(text, parse_constant=refuse))


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        OTHER,
        TrainConfig(ppo=PPOConfig(reset_strategy=FreshReset(), logging_level=LoggingLevel.NONE)),
        TrainConfig(ppo=PPOConfig(reset_strategy=CachedReset(), learning_rate=np.float64(1e-3))),
        load_preset("CartpoleBalance").config,
    ],
    ids=["defaults", "other", "fresh", "cached", "preset"],
)
def test_settings_come_back_exactly(config):
    back = through_json(config)
    assert back == config
    assert repr(dataclasses.replace(back, ppo=PPOConfig())) == repr(
        dataclasses.replace(config, ppo=PPOConfig())
    )


def test_every_field_is_there():
    """And the test above has another value for each."""
    data, defaults = config_to_json(OTHER), config_to_json(TrainConfig())
    for record, names in (
        (TrainConfig, data),
        (PPOConfig, data["ppo"]),
        (EvalConfig, data["eval"]),
    ):
        assert list(names) == [field.name for field in dataclasses.fields(record)]
    for part in ("ppo", "eval"):
        same = [name for name, value in data[part].items() if value == defaults[part][name]]
        assert same == []
    assert data["ppo"]["reset_strategy"] == {"kind": "PooledReset", "size": 20, "refill": 3}
    assert data["ppo"]["logging_level"] == ["LOSSES", "GRAD_NORM"]
    assert data["ppo"]["clip_range"] == "inf"


def test_arrays_come_back_with_their_dtype():
    config = TrainConfig(
        ppo=PPOConfig(
            learning_rate=jnp.float32(0.1), clip_range=jnp.array([0.1, 0.2], jnp.bfloat16)
        )
    )
    back = through_json(config).ppo
    for got, expected in (
        (back.learning_rate, config.ppo.learning_rate),
        (back.clip_range, config.ppo.clip_range),
    ):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_code_is_recorded_by_its_name_and_not_read_back():
    @dataclasses.dataclass(frozen=True)
    class Mine(ResetStrategy):
        def start(self, env, n_envs, key):
            raise NotImplementedError

        def deal(self, env, state, done, key):
            raise NotImplementedError

    schedule = optax.linear_schedule(1.0, 0.0, 10)
    data = config_to_json(TrainConfig(ppo=PPOConfig(learning_rate=schedule)))
    assert data["ppo"]["learning_rate"]["kind"] == "code"
    assert "schedule" in data["ppo"]["learning_rate"]["description"]
    with pytest.raises(ValueError, match=r"`TrainConfig\.ppo\.learning_rate` was .*schedule.*code"):
        config_from_json(data)
    config = config_from_json({**data, "ppo": {**data["ppo"], "learning_rate": None}})
    assert config == TrainConfig()
    data = config_to_json(TrainConfig(ppo=PPOConfig(reset_strategy=Mine())))
    assert "Mine()" in data["ppo"]["reset_strategy"]["description"]
    with pytest.raises(ValueError, match=r"`TrainConfig\.ppo\.reset_strategy` was .*Mine"):
        config_from_json(data)


def test_missing_fields_have_their_defaults():
    assert config_from_json({}) == TrainConfig()
    assert config_from_json({"ppo": {"n_envs": 8}}) == TrainConfig(ppo=PPOConfig(n_envs=8))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sed": 1}, r"`TrainConfig` has no fields \['sed'\]; its fields are \['ppo'"),
        ({"ppo": {"envs": 1}}, r"`TrainConfig\.ppo` has no fields \['envs'\]"),
        ({"ppo": 3}, r"`TrainConfig\.ppo` must be an object with fields, but got 3"),
        ({"ppo": {"n_envs": 0}}, r"`PPOConfig\.n_envs` must be an int of at least 1"),
        (
            {"ppo": {"logging_level": ["LOSES"]}},
            r"`TrainConfig\.ppo\.logging_level` has no family 'LOSES'",
        ),
        ({"ppo": {"logging_level": 3}}, r"logging_level` must be a list of families, but got 3"),
        (
            {"ppo": {"reset_strategy": "PooledReset"}},
            r'reset_strategy` must be an object with a "kind", but got \'PooledReset\'',
        ),
        (
            {"ppo": {"reset_strategy": {"kind": "NoReset"}}},
            r"has the unknown kind 'NoReset'; there are \['CachedReset', 'FreshReset'",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(data)
