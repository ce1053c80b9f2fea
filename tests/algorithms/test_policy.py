"""A policy does what its network did in training, one environment or many, without a critic."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import make_policy, unroll_env
from eqx_ppo.networks import (
    LSTM,
    CategoricalSampler,
    Container,
    Dense,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
    StatefulModuleOutput,
    StatelessModule,
    VariationalBottleneck,
    make_mlp_actor_critic,
)
from tests.helpers.networks import CASES, SCRIPTED, heads, policy as actor
from tests.helpers.trees import assert_close, assert_same, signature

N_ENVS, LENGTH = 3, 12

NETWORKS = {
    "everything": (CASES["everything"].env, CASES["everything"].build),
    "dict_delay": (CASES["dict_delay"].env, CASES["dict_delay"].build),
    "noise_within": (
        SCRIPTED,
        lambda key: Sequential([Dense(2, 4, key=key), VariationalBottleneck(2), heads(2, 1, key)]),
    ),
}


@eqx.filter_jit
def rollout(env, network, key):
    """What a network saw and did, from the carry that `key` makes."""
    state = network.initialize_state(N_ENVS, key=key)
    env_state = jax.vmap(env.reset)(jax.random.split(jax.random.key(8), N_ENVS))
    return unroll_env(env, env_state, network, state, LENGTH, jax.random.key(9))[2]


def recorded(key):
    """Observations, and ends of episodes that differ between environments."""
    obs_key, done_key = jax.random.split(key)
    obs = 30.0 * jax.random.normal(obs_key, (LENGTH, N_ENVS, 2), jnp.float32)
    return obs, jax.random.bernoulli(done_key, 0.3, (LENGTH, N_ENVS))


@eqx.filter_jit
def repeat(policy, key, obs, done, batch_size=None, reset=True):
    """The actions of a policy on recorded observations and ends of episodes."""

    def step(carry, inputs):
        action, carry = policy.act(carry, inputs[0])
        return policy.reset(carry, inputs[1]) if reset else carry, action

    return jax.lax.scan(step, policy.init(key, batch_size), (obs, done))[1]


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [("everything", True), ("dict_delay", False), ("noise_within", False)],
)
def test_a_policy_acts_as_its_network_did(name, deterministic, getkey):
    env, build = NETWORKS[name]
    network = build(getkey())
    acting = eqx.nn.inference_mode(network) if deterministic else network
    key = getkey()
    transitions = rollout(env, acting, key)
    assert 0 < np.sum(transitions.done) < transitions.done.size
    policy = make_policy(network, deterministic=deterministic)
    actions = repeat(policy, key, transitions.obs, transitions.done, N_ENVS)
    assert_close(actions, transitions.network_output.actions, rtol=1e-4, atol=1e-7)


def test_resets_matter_and_may_be_numbers(getkey):
    policy, key = make_policy(NETWORKS["everything"][1](getkey())), getkey()
    obs, done = recorded(getkey())
    with_resets = repeat(policy, key, obs, done, N_ENVS)
    assert_same(repeat(policy, key, obs, done.astype(jnp.float32), N_ENVS), with_resets)
    without = repeat(policy, key, obs, done, N_ENVS, reset=False)
    first = np.argmax(np.any(done, axis=1))
    np.testing.assert_array_equal(without[: first + 1], with_resets[: first + 1])
    assert np.max(np.abs(without[first + 1 :] - with_resets[first + 1 :])) > 1e-2


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_single_environment_is_a_batch_of_one(deterministic, getkey):
    network, key = NETWORKS["everything"][1](getkey()), getkey()
    policy = make_policy(network, deterministic=deterministic)
    obs, done = (leaf[:, 0] for leaf in recorded(getkey()))
    single = repeat(policy, key, obs, done)
    assert single.shape == (LENGTH, 1)
    assert_same(single, repeat(policy, key, obs[:, None], done[:, None], 1)[:, 0])


def test_policies_can_be_mapped(getkey):
    policy = make_policy(NETWORKS["everything"][1](getkey()), deterministic=False)
    keys = jax.random.split(getkey(), N_ENVS)
    obs, done = recorded(getkey())
    mapped = jax.vmap(repeat, in_axes=(None, 0, 1, 1), out_axes=1)
    together = mapped(policy, keys, obs, done)
    for row, key in enumerate(keys):
        alone = repeat(policy, key, obs[:, row], done[:, row])
        np.testing.assert_allclose(together[:, row], alone, atol=1e-6)


def test_only_a_deterministic_policy_ignores_the_key(getkey):
    network = make_mlp_actor_critic(2, 1, [4], [4], key=getkey())
    for deterministic in (True, False):
        policy = make_policy(network, deterministic=deterministic)
        assert policy.deterministic is deterministic
        actions = [policy.act(policy.init(jax.random.key(seed)), np.ones(2))[0] for seed in (0, 1)]
        assert np.array_equal(*actions) is deterministic


def test_discrete_actions(getkey):
    sampler = CategoricalSampler(4, entropy_weight=0.0)
    network = make_mlp_actor_critic(2, 1, [4], [4], key=getkey(), sampler=sampler)
    network = eqx.tree_at(
        lambda net: net[1].action[-2].kernel, network, replace_fn=lambda k: 1e3 * k
    )
    policy = make_policy(network)
    obs = jax.random.normal(getkey(), (16, 2), jnp.float32)
    actions, _ = policy.act(policy.init(getkey(), 16), obs)
    logits = network[1].action[:-1]([(), ()], network[0]((), obs).output).output
    assert actions.dtype == jnp.int32
    np.testing.assert_array_equal(actions, np.argmax(np.asarray(logits), axis=-1))
    assert len(set(np.asarray(actions))) > 1
    single, _ = policy.act(policy.init(getkey()), obs[0])
    assert single.shape == ()
    assert single == actions[0]


# --- What is left out -----------------------------------------------------------------------


class Explodes(StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        raise AssertionError("the value was computed")


def test_the_value_port_is_not_run_and_has_no_carry(getkey):
    value = Sequential([LSTM(2, 3, key=getkey()), Explodes()])
    adapter = PPOAdapter(action=actor(2, 1, getkey()), value=value)
    network = Sequential([Dense(2, 2, key=getkey()), Sequential([adapter])])
    policy = make_policy(network)
    carry = policy.init(getkey(), 5)
    sizes = {leaf.shape for leaf in jax.tree.leaves(carry)}
    assert sizes == {(5,)}  # the keys and draws of the sampler
    assert policy.act(carry, np.ones((5, 2)))[0].shape == (5, 1)
    with pytest.raises(AssertionError, match="value was computed"):
        network(network.initialize_state(5, key=getkey()), jnp.ones((5, 2), jnp.float32))


class Better(Container):
    """Acts by whichever of two actor-critics promises more."""

    def wire(self, call, x):
        first, second = call("first", x), call("second", x)

        def better(first, second):
            chosen = first.value_estimates > second.value_estimates
            return jax.tree.map(
                lambda a, b: jnp.where(chosen[:, None], a, b),
                *(out.actions for out in (first, second)),
            )

        return first._replace(actions=call.local(better, first, second))


def test_a_value_that_actions_depend_on_is_kept(getkey):
    network = Better({"first": heads(2, 1, getkey()), "second": heads(2, 1, getkey())})
    acting = eqx.nn.inference_mode(network)
    obs = jax.random.normal(getkey(), (16, 2), jnp.float32)
    out = acting(acting.initialize_state(16, key=getkey()), obs).output
    policy = make_policy(network)
    actions, _ = policy.act(policy.init(getkey(), 16), obs)
    np.testing.assert_array_equal(actions, out.actions)
    others = [
        acting[name](acting[name].initialize_state(16, key=getkey()), obs) for name in acting.names
    ]
    assert all(np.any(actions != other.output.actions) for other in others)


# --- The carry, and what does not fit -------------------------------------------------------


def test_the_carry_is_closed_and_one_trace_is_enough(getkey):
    policy = make_policy(NETWORKS["everything"][1](getkey()), deterministic=False)
    traces = []

    @eqx.filter_jit
    def step(policy, carry, obs, done):
        traces.append(1)
        action, after = policy.act(carry, obs)
        return action, policy.reset(after, done)

    carry = policy.init(getkey(), 2)
    for done in ([True, False], [False, False]):
        _, after = step(policy, carry, np.ones((2, 2), np.float32), np.array(done))
        assert signature(after) == signature(carry)
        carry = after
    assert len(traces) == 1


def test_a_policy_leaves_its_network_alone(getkey):
    network = NETWORKS["everything"][1](getkey())
    leaves = jax.tree.leaves(network)
    make_policy(network)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(network), strict=True))
    assert network[-1].action[-1].inference is False


def test_double_precision_observations_are_taken(getkey):
    policy = make_policy(make_mlp_actor_critic(2, 1, [4], [4], key=getkey()))
    carry = policy.init(getkey())
    action, _ = policy.act(carry, np.array([0.5, -1.0]))
    assert action.dtype == jnp.float32
    assert_same(action, policy.act(carry, jnp.array([0.5, -1.0], jnp.float32))[0])


class Halves(StatelessModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(0.5 * x, state)


def test_what_does_not_fit_is_refused(getkey):
    network = make_mlp_actor_critic(2, 1, [4], [4], key=getkey())
    policy = make_policy(network)
    with pytest.raises(ValueError, match=r"`batch_size` must be at least 1, but got 0"):
        policy.init(getkey(), 0)
    single, batched = policy.init(getkey()), policy.init(getkey(), 3)
    with pytest.raises(ValueError, match=r"`done` must be a scalar.*without.*shape \(3,\)"):
        policy.reset(single, np.zeros(3, bool))
    with pytest.raises(ValueError, match=r"`done` must be one value per environment.*shape \(\)"):
        policy.reset(batched, False)
    recurrent = make_policy(CASES["lstm_trained_start"].build(getkey()))
    with pytest.raises(ValueError, match="`done` has 2 values, but the carry is that of 3 env"):
        recurrent.reset(recurrent.init(getkey(), 3), np.zeros(2, bool))
    with pytest.raises(TypeError, match="`batch_size` must be an int or `None`, but got True"):
        policy.init(getkey(), True)
    with pytest.raises(ValueError, match=r"`Normalizer` expected.*\[B, 2\].*got \[1, 3, 2\]"):
        policy.act(single, np.zeros((3, 2), np.float32))
    with pytest.raises(
        ValueError, match=r"`Normalizer` expected.*\[B, 2\].*got \[3, 5\]"
    ) as caught:
        policy.act(batched, np.zeros((3, 5), np.float32))
    assert "network.layers[0]" in caught.value.__notes__[0]
    sampler = Sequential([Halves(), NormalTanhSampler(entropy_weight=0.0)])
    for wrong, kind in ((Halves(), "ArrayImpl"), (sampler, "Sample")):
        unfit = make_policy(wrong)
        with pytest.raises(TypeError, match=f"outputs a `PPONetworkOutput`, but got a `{kind}`"):
            unfit.act(unfit.init(getkey()), np.zeros(2, np.float32))
