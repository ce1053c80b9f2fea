"""Integer, masked and bounded actions through the whole algorithm."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import (
    LoggingLevel,
    PPOConfig,
    eval_rollout,
    new_training_state,
    ppo_step,
    replay_error,
    unroll_env,
)
from eqx_ppo.envs import State
from eqx_ppo.networks import (
    AffineSampler,
    BetaSampler,
    CategoricalSampler,
    Dense,
    Lift,
    Map,
    MaskedLogits,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    Sequential,
    make_mlp_actor_critic,
)

N_ENVS, LENGTH = 6, 8


@dataclasses.dataclass(frozen=True, eq=False)
class AllKinds:
    """Every kind of action at once; each step allows other choices.

    The observation is `(features [3], mask [4])`, where only one choice is forbidden. A
    choice that is forbidden, a number that is out of range or a wrong type ends the episode,
    and so do four steps.
    """

    observation_size: ClassVar[dict[str, int]] = {"features": 3, "mask": 4}
    action_size: ClassVar[dict[str, int]] = {
        "choice": 1,
        "switches": 2,
        "push": 2,
        "steer": 1,
        "turn": 1,
    }

    def reset(self, key):
        features = jax.random.normal(key, (3,), jnp.float32)
        return self._state(features, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), False)

    def step(self, state, action):
        assert action["choice"].shape == ()
        assert action["choice"].dtype == action["switches"].dtype == jnp.int32
        assert action["switches"].shape == (2,)
        legal = state.obs["mask"][action["choice"]]
        legal &= jnp.all(action["switches"] < jnp.array([2, 3], jnp.int32))
        legal &= jnp.all(jnp.abs(action["steer"]) <= 0.4) & jnp.all(jnp.abs(action["turn"]) <= 1.0)
        features = jnp.cos(3.0 * state.obs["features"] + action["push"][0] + action["turn"])
        elapsed = state.data + jnp.int32(1)
        reward = action["switches"][1].astype(jnp.float32) - jnp.sum(action["steer"])
        return self._state(features, elapsed, reward, (elapsed >= 4) | ~legal, ~legal)

    def _state(self, features, elapsed, reward, done, illegal=False):
        mask = jnp.arange(4) != (jnp.abs(features[0] * 100.0).astype(jnp.int32) % 4)
        metrics = {"illegal": jnp.asarray(illegal).astype(jnp.float32)}
        obs = {"features": features, "mask": mask}
        return State(obs, reward, jnp.asarray(done), {}, metrics, elapsed)


def features_of(obs):
    return obs["features"]


def all_kinds_network(key):
    """Parameters by key from one layer each, then one sampler by key."""
    keys = iter(jax.random.split(key, 6))

    def dense(n_outputs):
        return Sequential([Lift(features_of), Dense(3, n_outputs, key=next(keys))])

    heads = Parallel(
        choice=Sequential(
            [
                Parallel(logits=dense(4), mask=Lift(lambda obs: obs["mask"])),
                Lift(lambda x: MaskedLogits(x["logits"], x["mask"])),
            ]
        ),
        switches=dense(5),
        push=dense(2),
        steer=dense(2),
        turn=dense(2),
    )
    weight = {"entropy_weight": 1e-2}
    samplers = Map(
        choice=CategoricalSampler(4, **weight),
        switches=MultiCategoricalSampler((2, 3), **weight),
        push=NormalSampler(2, **weight),
        steer=AffineSampler(NormalTanhSampler(**weight), -0.4, 0.4),
        turn=BetaSampler(**weight),
    )
    value = Sequential([Lift(features_of), Dense(3, 1, key=next(keys))])
    return PPOAdapter(action=Sequential([heads, samplers]), value=value)


@pytest.fixture(scope="module")
def rollout():
    """A network, its carry, and what `unroll_env` made of them."""
    env, network = AllKinds(), all_kinds_network(jax.random.key(0))
    state = network.initialize_state(N_ENVS, key=jax.random.key(1))

    @jax.jit
    def run(state, key):
        env_state = jax.vmap(env.reset)(jax.random.split(key, N_ENVS))
        return unroll_env(env, env_state, network, state, LENGTH, key)

    return network, state, run(state, jax.random.key(2))[2]


def test_actions_keep_their_types_through_the_rollout_and_are_legal(rollout):
    _, _, transitions = rollout
    actions = transitions.network_output.actions
    assert actions["choice"].shape == (LENGTH, N_ENVS)
    assert actions["switches"].shape == (LENGTH, N_ENVS, 2)
    assert actions["choice"].dtype == actions["switches"].dtype == jnp.int32
    mask = np.asarray(transitions.obs["mask"])
    assert np.take_along_axis(mask, np.asarray(actions["choice"])[..., None], axis=-1).all()
    assert len(np.unique(actions["choice"])) == 4
    assert (np.abs(actions["steer"]) <= 0.4).all()
    assert np.abs(actions["steer"]).max() > 0.2
    np.testing.assert_array_equal(np.flatnonzero(transitions.done.any(axis=1)), [3, 7])


def test_the_replay_of_all_kinds_has_the_ratio_one(rollout):
    network, state, transitions = rollout
    assert float(eqx.filter_jit(replay_error)(network, state, transitions)) < 2e-6
    other = eqx.tree_at(
        lambda net: net.action[1]["push"].pre_std, network, replace_fn=lambda x: x + 0.1
    )
    assert float(eqx.filter_jit(replay_error)(other, state, transitions)) > 1e-2


def test_an_iteration_trains_and_reports_all_kinds():
    env, network = AllKinds(), all_kinds_network(jax.random.key(0))
    config = PPOConfig(
        n_envs=4,
        rollout_length=8,
        total_steps=32,
        n_epochs=1,
        n_minibatches=2,
        combine_advantages=True,
        logging_level=LoggingLevel.ALL,
        logging_percentiles=(50,),
    )
    state = jax.jit(lambda key: new_training_state(env, network, config, key))(jax.random.key(3))
    after, metrics = jax.jit(lambda state: ppo_step(env, state, config))(state)
    assert float(metrics["losses/ratio_error"]) < 1e-5
    assert float(metrics["env/illegal/mean"]) == 0.0
    assert 0 <= float(metrics["rollout_batch/action/choice/mean"]) <= 3
    assert float(metrics["rollout_batch/action/switches/p50"]) in (0.0, 0.5, 1.0, 2.0)
    entropies = [name for name in metrics if "entropy" in name and name.endswith("mean")]
    assert len(entropies) == 5
    assert np.isfinite([float(metrics[name]) for name in entropies]).all()
    before, now = (s.network.action[1]["push"].pre_std for s in (state, after))
    assert (np.asarray(before) != np.asarray(now)).all()


def test_evaluation_takes_the_likeliest_legal_choice():
    env, network = AllKinds(), all_kinds_network(jax.random.key(0))
    run = jax.jit(
        lambda key: eval_rollout(env, network, 5, 10, key, logging_level=LoggingLevel.ALL)
    )
    result = run(jax.random.key(4))
    np.testing.assert_array_equal(result.lengths, [4] * 5)  # an illegal action would end it
    np.testing.assert_array_equal(result.metrics["env"]["illegal"], [0.0] * 5)
    again = run(jax.random.key(4))
    np.testing.assert_array_equal(again.returns, result.returns)


# --- Learning -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Bandit:
    """One step; the reward is 1 for the choice that the observation names, else 0."""

    observation_size: ClassVar[int] = 3
    action_size: ClassVar[int] = 1

    def reset(self, key):
        best = jax.random.randint(key, (), 0, 3, jnp.int32)
        return self._state(jax.nn.one_hot(best, 3, dtype=jnp.float32), jnp.float32(0), False)

    def step(self, state, action):
        return self._state(state.obs, state.obs[action], True)

    def _state(self, obs, reward, done):
        return State(obs, jnp.asarray(reward), jnp.asarray(done), {}, {})


@pytest.mark.slow
def test_a_discrete_policy_learns_which_choice_is_best():
    """From one in three right to all of them."""
    network = make_mlp_actor_critic(
        3,
        1,
        (16,),
        (16,),
        sampler=CategoricalSampler(3, entropy_weight=1e-3),
        key=jax.random.key(0),
    )
    config = PPOConfig(
        n_envs=32, rollout_length=8, total_steps=30 * 256, n_minibatches=2, learning_rate=1e-2
    )
    env = Bandit()
    state = jax.jit(lambda key: new_training_state(env, network, config, key))(jax.random.key(1))

    @jax.jit
    def train(state):
        return jax.lax.scan(lambda s, _: ppo_step(env, s, config), state, None, length=30)[0]

    evaluate = eqx.filter_jit(lambda net, key: jnp.mean(eval_rollout(env, net, 64, 2, key).returns))
    assert float(evaluate(network, jax.random.key(2))) < 0.6
    assert float(evaluate(train(state).network, jax.random.key(2))) == 1.0
