"""Runs by names and numbers: they survive JSON, and build what they say."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import PPOConfig, make_mlp_actor_critic, make_recurrent_actor_critic
from eqx_ppo.algorithms import new_training_state, split_network
from eqx_ppo.envs import EpisodeWrapper, Pendulum, RewardScalingWrapper, TwoArms
from eqx_ppo.networks import GRU, LSTM, NormalTanhSampler
from eqx_ppo.training import (
    EnvConfig,
    NetworkConfig,
    RunConfig,
    VideoConfig,
    default_run_config,
    load_preset,
    preset_names,
)
from tests.algorithms.common import assert_same


def assert_same_networks(actual, expected):
    (arrays, rest), (expected_arrays, expected_rest) = map(split_network, (actual, expected))
    assert rest == expected_rest
    assert_same(arrays, expected_arrays)


def round_trip(config):
    return RunConfig.from_json(json.loads(json.dumps(config.to_json())))


@pytest.mark.parametrize("name", ["Pendulum", "Recall", "TwoArms", "CartpoleBalance", "brax:ant"])
def test_defaults_survive_json(name):
    config = default_run_config(name)
    assert round_trip(config) == config
    assert config.env.name == name


@pytest.mark.parametrize("name", preset_names())
def test_presets_survive_json(name):
    preset, config = load_preset(name), default_run_config(name, preset=True)
    assert round_trip(config) == config
    assert config.train == preset.config
    assert config.network.kind == "preset"
    assert config.network.actor_hidden_sizes == preset.actor_hidden_sizes
    env = config.env
    assert (env.max_len, env.action_repeat) == (preset.max_len, preset.action_repeat)
    assert env.reward_scale == preset.reward_scale


def test_everything_survives_json():
    config = RunConfig(
        env=EnvConfig(
            name="Recall", max_len=9, action_repeat=2, reward_scale=0.5, overrides={"delay": 3}
        ),
        network=NetworkConfig(kind="gru", actor_hidden_sizes=(3,), hidden_features=5),
        video=VideoConfig(every_steps=5, camera="side", format="gif"),
    )
    assert round_trip(config) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("env"), r"must have the parts .*, but has"),
        (lambda data: data["env"].update(title="x"), r"fields of `EnvConfig`, but has \['title'\]"),
        (lambda data: data["env"].pop("name"), r"`env` .* missing .* 'name'"),
        (lambda data: data["network"].update(kind="cnn"), "`NetworkConfig.kind` must be one of"),
        (lambda data: data["train"].update(seed=-1), "`TrainConfig.seed` must be at least 0"),
        (lambda data: data.update(video=[]), r"fields of `VideoConfig`, but has \[\]"),
    ],
)
def test_json_that_is_no_run(change, message):
    data = default_run_config("Pendulum").to_json()
    change(data)
    with pytest.raises(ValueError, match=message):
        RunConfig.from_json(data)


# --- Environments ---------------------------------------------------------------------------


def test_an_environment_with_its_wrappers():
    config = EnvConfig(name="Pendulum", max_len=5, action_repeat=3, reward_scale=0.1)
    env, eval_env = config.make_env(), config.make_eval_env()
    assert isinstance(env, RewardScalingWrapper)
    assert isinstance(eval_env, EpisodeWrapper)
    assert (env.scale, eval_env.max_len, eval_env.env.repeats) == (0.1, 5, 3)
    assert isinstance(env.unwrapped, Pendulum)


def test_an_environment_as_it_is():
    assert isinstance(EnvConfig(name="TwoArms").make_env(), TwoArms)
    assert EnvConfig(name="eqx-ppo:Recall", overrides={"delay": 7}).make_env().delay == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gym:Ant", "`gym:` is no source of environments; there are `eqx-ppo:`"),
        ("eqx-ppo:Ant", "`Ant` is not one of Pendulum, Recall, TwoArms"),
    ],
)
def test_unknown_environments(name, message):
    with pytest.raises(ValueError, match=message):
        default_run_config(name)
    with pytest.raises(ValueError, match=message):
        EnvConfig(name=name).make_env()


@pytest.mark.playground
def test_a_misspelled_name():
    with pytest.raises(ValueError, match=r"Or did you mean `Pendulum` of this"):
        EnvConfig(name="Pendulum2").make_env()


@pytest.mark.parametrize("wrong", [{"max_len": 0}, {"action_repeat": 1.5}, {"max_len": True}])
def test_environment_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=f"`EnvConfig.{next(iter(wrong))}` must be an int"):
        EnvConfig(name="Pendulum", **wrong)


# --- Networks -------------------------------------------------------------------------------


def make(config, env, name="Pendulum"):
    return eqx.filter_jit(config.make_network)(env, name, key=jax.random.key(3))


def test_networks_are_those_of_the_factories():
    key, sampler = jax.random.key(3), NormalTanhSampler(entropy_weight=0.02)
    sizes = {"actor_hidden_sizes": (4, 3), "critic_hidden_sizes": (5,)}
    settings = NetworkConfig(entropy_weight=0.02, hidden_features=6, **sizes)
    env = EpisodeWrapper(Pendulum(), 3)

    @eqx.filter_jit
    def both():
        pairs = [
            (
                settings.make_network(env, "Pendulum", key=key),
                make_mlp_actor_critic(3, 1, **sizes, sampler=sampler, key=key),
            )
        ]
        for kind, cell in (("lstm", LSTM), ("gru", GRU)):
            config = dataclasses.replace(settings, kind=kind)
            options = {"cell": cell, **sizes, "sampler": sampler, "key": key}
            pairs.append(
                (
                    config.make_network(env, "Pendulum", key=key),
                    make_recurrent_actor_critic(3, 1, 6, **options),
                )
            )
        return pairs

    for built, expected in both():
        assert_same_networks(built, expected)


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_dicts_get_a_head_for_each_entry(kind):
    env = TwoArms()
    sizes = (4,) if kind == "mlp" else ()
    settings = NetworkConfig(
        kind=kind, actor_hidden_sizes=sizes, critic_hidden_sizes=sizes, hidden_features=4
    )
    network = make(settings, env)
    obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2)).obs
    state = network.initialize_state(2, key=jax.random.key(1))
    output = eqx.filter_jit(lambda: network(state, obs, None).output)()
    assert jax.tree.map(jnp.shape, output.actions) == {"left": (2, 2), "right": (2, 2)}
    assert jax.tree.map(jnp.shape, output.value_estimates) == {"left": (2,), "right": (2,)}
    means = np.concatenate(
        jax.tree.leaves(eqx.nn.inference_mode(network)(state, obs, None).output.actions)
    )
    assert np.abs(means).max() < 0.1  # the last layer is small
    ppo = PPOConfig(n_envs=2, n_minibatches=1)
    jax.eval_shape(
        lambda: jax.tree.leaves(new_training_state(env, network, ppo, jax.random.key(2)))
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Silent:
    """Says nothing about its actions."""

    def reset(self, key):
        return Pendulum().reset(key)

    def step(self, state, action):
        return Pendulum().step(state, action)


def test_environments_that_do_not_describe_their_actions():
    with pytest.raises(ValueError, match="`Silent` has neither `actions` nor `action_size`"):
        NetworkConfig().make_network(EpisodeWrapper(Silent(), 2), "Silent", key=jax.random.key(0))


def test_discrete_actions_get_their_sampler():
    pytest.importorskip("gymnax")
    config = default_run_config("gymnax:CartPole-v1")
    env = config.env.make_env()
    assert env.reset(jax.random.key(0)).obs.shape == (4,)
    network = dataclasses.replace(
        config, network=NetworkConfig(actor_hidden_sizes=(3,), critic_hidden_sizes=(3,))
    ).make_network(env)
    state = network.initialize_state(2, key=jax.random.key(1))
    actions = network(state, jnp.zeros((2, 4)), None).output.actions
    assert actions.shape == (2,)
    assert jnp.issubdtype(actions.dtype, jnp.integer)


def test_the_network_of_a_preset_needs_one():
    with pytest.raises(ValueError, match="There is no preset `Pendulum`"):
        default_run_config("Pendulum", network="preset")
    config, key = NetworkConfig(kind="preset"), jax.random.key(0)
    with pytest.raises(ValueError, match="There is no preset `Pendulum`"):
        config.make_network(EpisodeWrapper(Pendulum(), 2), "Pendulum", key=key)
    with pytest.raises(ValueError, match="an environment with a time limit"):
        config.make_network(Pendulum(), "CartpoleBalance", key=key)


@pytest.mark.playground
def test_the_network_of_a_preset():
    config = default_run_config("CartpoleBalance", preset=True)
    env = config.env.make_env()
    expected = load_preset("CartpoleBalance").make_network(env, key=jax.random.key(17))
    assert_same_networks(config.make_network(env), expected)


@pytest.mark.parametrize(
    "wrong", [{"kind": "cnn"}, {"actor_hidden_sizes": (3, 0)}, {"hidden_features": 0}]
)
def test_network_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=f"`NetworkConfig.{next(iter(wrong))}` must be"):
        NetworkConfig(**wrong)
