"""The presets: their numbers against those of Playground, their meaning against brax."""

import dataclasses
import functools
import inspect
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import PPOConfig, train_ppo
from eqx_ppo.algorithms import Minibatch, ppo_loss, unroll_env
from eqx_ppo.algorithms._update import _take, minibatch_indices
from eqx_ppo.envs import EpisodeWrapper, State, playground_names
from eqx_ppo.networks import Dense, Normalizer
from eqx_ppo.training import _preset, load_preset, preset_names

SIZES = {"state": 3, "privileged_state": 5}


@dataclasses.dataclass(frozen=True, eq=False)
class Robot:
    """Drifts with its action; falls over at times. The critic's observation holds more."""

    structured: bool = True
    action_size: ClassVar[int] = 2

    def reset(self, key):
        return self._state(jax.random.normal(key, (5,), jnp.float32))

    def step(self, state, action):
        return self._state(0.9 * state.data + jnp.concatenate([action, action, action[:1]]))

    def _state(self, position):
        obs = {"state": position[:3], "privileged_state": 2.0 * position, "unused": position}
        obs = obs if self.structured else position[:3]
        reward = jnp.sum(position[1:])
        return State(obs, reward, position[0] > 1.5, info={}, metrics={}, data=position)


@pytest.fixture
def robots(monkeypatch):
    """Every preset loads the robot, and what it was asked for is kept."""
    asked = []

    def load(name, *, config_overrides):
        asked.append((name, config_overrides))
        return Robot()

    monkeypatch.setattr(_preset, "load_playground", load)
    return asked


def tiny(name, **ppo):
    return load_preset(name).with_ppo(
        **{"n_envs": 4, "rollout_length": 4, "segment_length": 2, "n_minibatches": 2} | ppo
    )


# --- The record -----------------------------------------------------------------------------


def test_unknown_names():
    with pytest.raises(ValueError, match=r"`PendulumSwingUp`.*Close matches: PendulumSwingup"):
        load_preset("PendulumSwingUp")
    with pytest.raises(ValueError, match=r"no preset `Xyzzy`\. `preset_names\(\)` lists"):
        load_preset("Xyzzy")


def test_every_name_loads_its_own_environment():
    for name in preset_names():
        preset = load_preset(name)
        assert (preset.name, preset.env_name) == (name, name)
    assert len(preset_names()) == len(set(preset_names())) == 54


def test_evaluations_are_spread_over_the_run():
    config = load_preset("CartpoleBalance").config
    assert config.eval.every_steps == config.checkpoint_every_steps == 6_666_667  # 60e6 / 9
    assert (config.eval.n_envs, config.eval.max_episode_length) == (128, 1000)
    assert not config.eval.deterministic
    shorter = load_preset("CartpoleBalance").with_ppo(total_steps=90).config
    assert (shorter.ppo.total_steps, shorter.eval.every_steps) == (90, 10)


def test_overrides_are_checked():
    preset = load_preset("CartpoleBalance")
    changed = preset.with_ppo(n_envs=64, learning_rate=1e-4)
    assert changed.ppo == dataclasses.replace(preset.ppo, n_envs=64, learning_rate=1e-4)
    assert load_preset("CartpoleBalance") == preset  # as it was
    with pytest.raises(TypeError, match="batch_size"):
        preset.with_ppo(batch_size=64)
    with pytest.raises(ValueError, match="`segment_length` must divide"):
        preset.with_ppo(segment_length=7)
    with pytest.raises(ValueError, match=r"`Preset\.n_evals` must be at least 1, but got 0"):
        dataclasses.replace(preset, n_evals=0)


# --- Environment and network ----------------------------------------------------------------


def test_environments(robots):
    """Four steps per action, 250 actions, and ten times the reward in training."""
    preset = load_preset("PendulumSwingup")
    overrides = {"ctrl_dt": 0.02}
    env = preset.make_env(config_overrides=overrides)
    eval_env = preset.make_eval_env(config_overrides=overrides)
    assert robots == [("PendulumSwingup", overrides)] * 2
    action = -0.1 * jnp.ones(2)
    states = [each.step(each.reset(jax.random.key(0)), action) for each in (env, eval_env)]
    expected, total = Robot().reset(jax.random.key(0)), 0.0
    for _ in range(4):
        expected = Robot().step(expected, action)
        assert not expected.done
        total += expected.reward
    np.testing.assert_allclose([s.reward for s in states], [10 * total, total], rtol=1e-5)
    for each, state in zip((env, eval_env), states, strict=True):
        assert each.max_len == 250
        np.testing.assert_allclose(state.obs["state"], expected.obs["state"], rtol=1e-5)


def dense_sizes(port):
    layers = [layer for layer in port.layers if isinstance(layer, Dense)]
    return [layers[0].in_features, *(layer.out_features for layer in layers)]


def output(network, obs):
    return network(network.initialize_state(4, key=jax.random.key(5)), obs, None).output


def observations(structured=True):
    keys = jax.random.split(jax.random.key(1), 4)
    return jax.vmap(lambda key: Robot(structured).reset(key).obs)(keys)


@pytest.mark.parametrize(
    ("name", "actor", "critic"),
    [
        ("Go1Getup", [3, 512, 256, 128, 4], [5, 512, 256, 128, 1]),
        ("SpotGetup", [3, 128, 128, 128, 128, 4], [3, 256, 256, 256, 256, 256, 1]),
    ],
)
def test_each_port_sees_its_part_of_the_observation(robots, name, actor, critic):
    preset = load_preset(name)
    network = preset.make_network(preset.make_env(), key=jax.random.key(0))
    adapter = network.layers[-1]
    assert (dense_sizes(adapter.action), dense_sizes(adapter.value)) == (actor, critic)
    obs = observations()
    before = output(network, obs)
    for part in ("state", "privileged_state", "unused"):
        after = output(network, {**obs, part: obs[part] + 1.0})
        changed = (
            not np.allclose(after.actions, before.actions),
            not np.allclose(after.value_estimates, before.value_estimates),
        )
        assert changed == (part == "state", part == preset.critic_obs_key)


def test_a_flat_observation_is_seen_by_both():
    preset = load_preset("Go1Getup")
    env = EpisodeWrapper(Robot(structured=False), 5)
    network = preset.make_network(env, key=jax.random.key(0))
    assert [type(layer) for layer in network.layers[:-1]] == [Normalizer]
    adapter = network.layers[-1]
    assert dense_sizes(adapter.action) == [3, 512, 256, 128, 4]
    assert dense_sizes(adapter.value) == [3, 512, 256, 128, 1]
    assert output(network, observations(structured=False)).actions.shape == (4, 2)


def test_an_observation_that_lacks_a_part():
    preset = dataclasses.replace(load_preset("Go1Getup"), critic_obs_key="camera")
    with pytest.raises(ValueError, match=r"`Go1Getup` see \['camera', 'state'\].*privileged_state"):
        preset.make_network(EpisodeWrapper(Robot(), 5), key=jax.random.key(0))


def test_kernels_are_lecun_uniform_up_to_the_last(robots):
    preset = load_preset("Go1Getup")
    network = preset.make_network(preset.make_env(), key=jax.random.key(0))
    for port in (network.layers[-1].action, network.layers[-1].value):
        for layer in port.layers:
            if isinstance(layer, Dense):
                limit = math.sqrt(3.0 / layer.in_features)
                largest = float(jnp.max(jnp.abs(layer.kernel)))
                assert 0.9 * limit < largest <= limit or layer.kernel.size < 100
                assert not np.any(layer.bias)


# --- Minibatches ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "updates", "batch_size", "unroll_length"),
    [
        ("CartpoleBalance", 16 * 32, 1024, 30),
        ("PendulumSwingup", 4 * 32, 1024, 30),
        ("Go1Getup", 4 * 32, 256, 20),
        ("PandaPickCubeCartesian", 8 * 8, 256, 10),
    ],
)
def test_minibatches_are_those_of_brax(name, updates, batch_size, unroll_length):
    """`batch_size` unrolls of consecutive steps; an epoch takes every unroll once."""
    ppo = load_preset(name).ppo
    indices = minibatch_indices(ppo, jax.random.key(0))
    assert indices.shape == (updates, batch_size)
    epoch = indices[: ppo.n_minibatches]
    steps = np.arange(ppo.rollout_length)[:, None] + 1000 * np.arange(ppo.n_envs)
    steps = jnp.asarray(steps.reshape(ppo.n_segments, unroll_length, ppo.n_envs), jnp.int32)
    starts = steps[:, 0]
    taken = jax.vmap(lambda index: _take(Minibatch(steps, starts, starts), index, ppo))(epoch)
    assert taken.transitions.shape == (ppo.n_minibatches, unroll_length, batch_size)
    first = np.asarray(taken.transitions)[:, 0]
    np.testing.assert_array_equal(taken.network_state, first)
    assert np.all(np.diff(taken.transitions, axis=1) == 1)
    np.testing.assert_array_equal(np.sort(first, axis=None), np.sort(starts, axis=None))
    assert np.any(first != np.sort(first, axis=None).reshape(first.shape))  # shuffled


# --- The loss against brax ------------------------------------------------------------------

T, B = 8, 6


@functools.cache
def brax_case():
    """One unroll, gathered by one network, and another network with moved statistics."""
    preset = tiny("LeapCubeReorient", n_envs=B)
    env = EpisodeWrapper(Robot(), 5)
    keys = jax.random.split(jax.random.key(0), 4)
    old, new = (preset.make_network(env, key=key) for key in keys[:2])
    start = old.initialize_state(B, key=keys[2])
    env_state = jax.vmap(env.reset)(jax.random.split(keys[3], B))
    unroll = jax.jit(lambda: unroll_env(env, env_state, old, start, T, keys[3]))
    _, env_state, transitions = unroll()
    assert all(bool(jnp.any(flags)) for flags in (transitions.terminated, transitions.truncated))
    # As if it had collected the unroll, but for its first statistics.
    new = new.update_statistics(transitions.rollout_extras)
    last = output_of(new, env_state.obs).value_estimates
    next_values = transitions.next_values.at[-1].set(last)  # brax has the current critic's
    transitions = transitions._replace(next_values=next_values)
    return preset, new, start, transitions, env_state.obs


def output_of(network, obs):
    return network(network.initialize_state(B, key=jax.random.key(5)), obs, None).output


def brax_network(network):
    """brax's networks and their parameters, with the weights of ours."""
    from brax.training.acme import running_statistics, specs
    from brax.training.agents.ppo import losses, networks

    adapter = network.layers[-1]
    theirs = networks.make_ppo_networks(
        {name: (size,) for name, size in SIZES.items()},
        Robot.action_size,
        preprocess_observations_fn=running_statistics.normalize,
        policy_hidden_layer_sizes=dense_sizes(adapter.action)[1:-1],
        value_hidden_layer_sizes=dense_sizes(adapter.value)[1:-1],
        value_obs_key="privileged_state",
    )

    def weights(port):
        layers = [layer for layer in port.layers if isinstance(layer, Dense)]
        return {
            "params": {
                f"hidden_{i}": {"kernel": layer.kernel, "bias": layer.bias}
                for i, layer in enumerate(layers)
            }
        }

    params = losses.PPONetworkParams(weights(adapter.action), weights(adapter.value))
    shapes = {name: specs.Array((size,), jnp.float32) for name, size in SIZES.items()}
    return theirs, params, running_statistics.init_state(shapes)


def brax_data(transitions, last_obs):
    """A transition of brax, leaves `[B, T, ...]`."""
    from brax.training import types

    obs = {name: transitions.obs[name] for name in SIZES}
    following = {
        name: jnp.concatenate([leaf[1:], last_obs[name][None]]) for name, leaf in obs.items()
    }
    raw = transitions.rollout_extras[-1]["action"][-1]
    data = types.Transition(
        observation=obs,
        action=transitions.network_output.actions,
        reward=transitions.rewards,
        discount=1.0 - transitions.done,
        next_observation=following,
        extras={
            "state_extras": {"truncation": transitions.truncated.astype(jnp.float32)},
            "policy_extras": {
                "raw_action": raw,
                "log_prob": transitions.network_output.log_likelihoods,
                "distribution_params": jnp.ones((T, B, 4)),  # for a metric
            },
        },
    )
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), data)


def both_losses(gae_lambda):
    """The terms of our loss and of brax's, and what brax's entropy is estimated from."""
    from brax.training.acme import running_statistics
    from brax.training.agents.ppo import losses

    preset, network, start, transitions, last_obs = brax_case()
    ppo = dataclasses.replace(preset.ppo, gae_lambda=gae_lambda)
    batch = Minibatch(transitions, start, jnp.zeros(B, jnp.bool_))
    _, ours = jax.jit(lambda: ppo_loss(network, batch, ppo))()
    theirs, params, statistics = brax_network(network)
    data = brax_data(transitions, last_obs)
    statistics = running_statistics.update(statistics, data.observation)
    entropy_cost = preset.entropy_weight

    def loss(key):
        return losses.compute_ppo_loss(
            params,
            statistics,
            data,
            key,
            theirs,
            entropy_cost=entropy_cost,
            discounting=ppo.discounting_factor,
            gae_lambda=gae_lambda,
            clipping_epsilon=ppo.clip_range,
        )[1]

    keys = jax.random.split(jax.random.key(3), 300)
    return ppo, ours, jax.jit(lambda: jax.lax.map(loss, keys))()


@pytest.mark.playground  # which brings brax
def test_the_loss_is_that_of_brax():
    """Its advantages are ours for lambda = 1; below that it leaves out one lambda."""
    ppo, ours, theirs = both_losses(gae_lambda=1.0)
    assert abs(float(ours["losses/actor"])) > 1e-3
    np.testing.assert_allclose(ours["losses/actor"], theirs["policy_loss"][0], rtol=1e-4)
    weighted = ppo.critic_loss_weight * ours["losses/critic"]
    np.testing.assert_allclose(weighted, theirs["v_loss"][0], rtol=1e-4)
    estimates = np.asarray(theirs["entropy_loss"])
    error = 4.0 * estimates.std() / math.sqrt(len(estimates))
    assert 0.0 < error < 0.2 * abs(estimates.mean())
    np.testing.assert_allclose(ours["losses/regularization"], estimates.mean(), atol=error)


@pytest.mark.playground
def test_value_targets_are_those_of_brax():
    ppo, ours, theirs = both_losses(gae_lambda=0.95)
    weighted = ppo.critic_loss_weight * ours["losses/critic"]
    np.testing.assert_allclose(weighted, theirs["v_loss"][0], rtol=1e-4)
    assert not np.allclose(ours["losses/actor"], theirs["policy_loss"][0], rtol=1e-4)


# --- The numbers against Playground ---------------------------------------------------------


@pytest.fixture
def playground(monkeypatch, tmp_path):
    """Playground without robot models, and without a way to fetch them."""
    package = pytest.importorskip("mujoco_playground")
    monkeypatch.setattr(package._src.mjx_env, "MENAGERIE_PATH", tmp_path / "missing")
    return package


@functools.cache
def defaults():
    """What brax uses where Playground says nothing."""
    from brax.training.agents.ppo import networks, train

    def of(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    return of(train.train) | {"network_factory": of(networks.make_ppo_networks)}


def published(playground, name):
    """brax's settings for an environment, complete; and the keys that Playground gives."""
    from mujoco_playground.config import (
        dm_control_suite_params,
        locomotion_params,
        manipulation_params,
    )

    suites = {
        playground.dm_control_suite: dm_control_suite_params,
        playground.locomotion: locomotion_params,
        playground.manipulation: manipulation_params,
    }
    (params,) = (module for suite, module in suites.items() if name in suite.ALL_ENVS)
    given = params.brax_ppo_config(name).to_dict()
    networks = defaults()["network_factory"] | given.pop("network_factory", {})
    return {**defaults(), **given, "network_factory": networks}, set(given)


def translated(brax):
    """brax's settings in our terms."""
    network, repeat = brax["network_factory"], brax["action_repeat"]
    unrolls, rest = divmod(brax["batch_size"] * brax["num_minibatches"], brax["num_envs"])
    assert rest == 0
    for total in (brax["num_timesteps"], brax["episode_length"]):
        assert total % repeat == 0
    ppo = PPOConfig(
        n_envs=brax["num_envs"],
        rollout_length=unrolls * brax["unroll_length"],
        segment_length=brax["unroll_length"],
        total_steps=brax["num_timesteps"] // repeat,
        gae_lambda=brax["gae_lambda"],
        discounting_factor=brax["discounting"],
        clip_range=brax["clipping_epsilon"],
        value_clip_range=brax["clipping_epsilon_value"],
        learning_rate=brax["learning_rate"],
        gradient_clipping=brax["max_grad_norm"],
        normalize_advantages=brax["normalize_advantage"],
        advantages="minibatch",
        truncation="bootstrap" if brax["bootstrap_on_timeout"] else "mask",
        n_epochs=brax["num_updates_per_batch"],
        n_minibatches=brax["num_minibatches"],
        critic_loss_weight=brax["vf_loss_coefficient"],
    )
    return {
        "ppo": ppo,
        "entropy_weight": brax["entropy_cost"],
        "actor_hidden_sizes": tuple(network["policy_hidden_layer_sizes"]),
        "critic_hidden_sizes": tuple(network["value_hidden_layer_sizes"]),
        "critic_obs_key": network["value_obs_key"],
        "max_len": brax["episode_length"] // repeat,
        "action_repeat": repeat,
        "reward_scale": brax["reward_scaling"],
        "n_evals": brax["num_evals"] - 1,
        "n_eval_envs": brax["num_eval_envs"],
    }


def assert_published(name, brax):
    preset = vars(load_preset(name))
    own = {"name", "env_name", "needs_models"}
    expected = translated(brax)
    assert {key: value for key, value in preset.items() if key not in own} == expected


@pytest.mark.playground
def test_every_number_is_the_published_one(playground):
    for name in set(preset_names()) - {"PendulumSwingup"}:
        assert_published(name, published(playground, name)[0])


@pytest.mark.playground
def test_the_misspelled_entry_applies(playground, monkeypatch):
    """Playground writes `PendulumSwingUp` where its environment is `PendulumSwingup`."""
    suite = playground.dm_control_suite
    config = suite.get_default_config("PendulumSwingup")
    monkeypatch.setattr(suite, "get_default_config", lambda name: config)
    from mujoco_playground.config import dm_control_suite_params

    intended = dm_control_suite_params.brax_ppo_config("PendulumSwingUp").to_dict()
    assert (intended["action_repeat"], intended["num_updates_per_batch"]) == (4, 4)
    assert_published("PendulumSwingup", published(playground, "PendulumSwingup")[0] | intended)


@pytest.mark.playground
def test_nothing_that_is_published_is_left_out(playground):
    """The settings that Playground gives, and what all of them say where we have no choice."""
    translated_keys = {
        *("num_envs", "batch_size", "unroll_length", "num_minibatches", "num_updates_per_batch"),
        *("num_timesteps", "discounting", "learning_rate", "entropy_cost", "max_grad_norm"),
        *("clipping_epsilon", "reward_scaling", "episode_length", "action_repeat"),
        *("num_evals", "num_eval_envs"),
    }
    without_counterpart = {"num_resets_per_eval"}
    for name in preset_names():
        brax, given = published(playground, name)
        assert given <= translated_keys | without_counterpart | {"normalize_observations"}
        assert brax["normalize_observations"]
        assert brax["network_factory"]["policy_obs_key"] == "state"
    assert defaults()["learning_rate_schedule"] is None
    assert not defaults()["deterministic_eval"]
    assert defaults()["network_factory"]["distribution_type"] == "tanh_normal"
    assert defaults()["network_factory"]["activation"] is jax.nn.swish


@pytest.mark.playground
def test_names_are_those_of_playground(playground):
    assert set(preset_names()) == set(playground.registry.ALL_ENVS)
    offline = {name for name in preset_names() if not load_preset(name).needs_models}
    assert offline == set(playground_names())


# --- Training -------------------------------------------------------------------------------


def train(preset, **changes):
    config = dataclasses.replace(preset.config, console=False, **changes)
    env, eval_env = preset.make_env(), preset.make_eval_env()
    network = preset.make_network(env, key=jax.random.key(0))
    return network, train_ppo(env, network, config, eval_env=eval_env)


def assert_trained(before, result, n_steps):
    after = result.training_state.network
    assert result.total_steps == n_steps
    assert result.final_metrics["invalid_steps"] == result.final_metrics["skipped_updates"] == 0
    assert result.final_metrics["losses/ratio_error"] < 1e-3
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    moved = [not np.array_equal(a, b) for a, b in pairs if eqx.is_inexact_array(a)]
    assert sum(moved) >= 0.9 * len(moved)


def test_a_preset_trains(robots):
    preset = dataclasses.replace(tiny("Go1Getup", total_steps=32), max_len=6, n_eval_envs=3)
    preset = dataclasses.replace(preset, n_evals=2, reward_scale=100.0)
    before, result = train(preset)
    assert_trained(before, result, 32)
    assert [row["step"] for row in result.eval_history] == [0, 16, 32]
    returns = result.eval_history[0]["eval/episode_reward/mean"]
    assert 0.0 < abs(returns) < 100.0  # not scaled


@pytest.mark.playground
@pytest.mark.slow
def test_a_preset_trains_on_playground():
    preset = tiny("PendulumSwingup", total_steps=16)
    evaluation = dataclasses.replace(preset.config.eval, enabled=False)
    before, result = train(preset, eval=evaluation)
    assert_trained(before, result, 16)
