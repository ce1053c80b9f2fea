"""The whole PPO loss of a minibatch equals that of `nnx-ppo` 0.3.0, and so do its gradients.

Our rollout, with terminations and time limits inside, goes through both losses, with the
weights that collected it and with later ones. The ancestor masks time limits, which is
`PPOConfig(truncation="mask")` here, and always evaluates with the current critic.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("nnx_ppo")

from nnx_ppo.algorithms import metrics as their_metrics, ppo as their_ppo, types as their_types
from nnx_ppo.networks.types import PPONetworkOutput as TheirOutput

from eqx_ppo import networks as nets
from eqx_ppo.algorithms import LoggingLevel, Minibatch, PPOConfig, Transition, ppo_loss, unroll_env
from eqx_ppo.algorithms._loss import advantages_and_targets
from eqx_ppo.algorithms._metrics import flatten_metrics, rollout_metrics, weight_metrics
from eqx_ppo.algorithms._replay import replay
from eqx_ppo.envs import EpisodeWrapper
from tests.algorithms.common import ScheduledEnv, schedule
from tests.helpers.envs import DictEnv
from tests.helpers.modules import with_statistics
from tests.helpers.networks import dict_heads, heads
from tests.parity import common
from tests.parity.carry import extras_to_ancestor, state_to_ancestor
from tests.parity.convert import to_ancestor

T, B = 4, 6
TERMS = LoggingLevel.LOSSES | LoggingLevel.ACTOR_EXTRA | LoggingLevel.CRITIC_EXTRA
THEIR_TERMS = (
    their_types.LoggingLevel.LOSSES
    | their_types.LoggingLevel.ACTOR_EXTRA
    | their_types.LoggingLevel.CRITIC_EXTRA
)


# --- Networks -----------------------------------------------------------------------------


def with_lstm(key):
    keys = jax.random.split(key)
    lstm = nets.LSTM(2, 5, trainable_initial_state=True, key=keys[0])
    return nets.Sequential([nets.Normalizer(2), lstm, heads(5, 1, keys[1], entropy_weight=0.1)])


def with_bottlenecks(key):
    """Noise and penalties in the trunk, a delay before it."""
    keys = jax.random.split(key, 3)
    return nets.Sequential(
        [
            nets.Delay(jax.ShapeDtypeStruct((2,), jnp.float32), 1),
            nets.Normalizer(2),
            nets.Dense(2, 6, key=keys[0]),
            nets.VariationalBottleneck(3, kl_weight=0.05),
            nets.Dense(3, 4, activation=jnp.tanh, key=keys[1]),
            nets.AR1VariationalBottleneck(2, kl_weight=0.05, ar1_weight=0.3),
            heads(2, 1, keys[2]),
        ]
    )


def with_parts(key):
    """One sampler, one value and one reward for each part of a dict."""
    keys = jax.random.split(key)
    layers = [
        nets.Normalizer({"goal": 2, "proprio": 3}),
        nets.Flattener(),
        nets.Dense(5, 4, activation=jnp.tanh, key=keys[0]),
    ]
    return nets.Sequential([*layers, dict_heads(4, {"arm": 2, "leg": 1}, keys[1])])


NETWORKS = {
    "mlp": lambda key: nets.make_mlp_actor_critic(2, 1, [6, 5], [7], key=key),
    "lstm": with_lstm,
    "bottlenecks": with_bottlenecks,
    "parts": with_parts,
}


class Recorded(NamedTuple):
    """A rollout by ours: `last_obs` is what the network would see after it."""

    network: nets.StatefulModule
    later: nets.StatefulModule
    carry: object
    transitions: Transition
    last_obs: object


@functools.cache
def recorded(name):
    """The second of two rollouts, so that it begins inside of episodes."""
    network = with_statistics(common.with_weights(NETWORKS[name], seed=1))
    if name == "parts":
        env = EpisodeWrapper(DictEnv(lengths=(2, 7)), 3)
        env_state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), B))
    else:
        env = ScheduledEnv()
        ends = {"terminate": [(1, 0), (5, 1), (7, 2)], "truncate": [(2, 0), (4, 3), (6, 3), (6, 4)]}
        env_state = schedule(np.linspace(-1, 1, B), **ends)

    @common.jit
    def unroll(env_state, carry):
        return unroll_env(env, env_state, network, carry, T, jax.random.key(3))

    carry = jax.jit(lambda key: network.initialize_state(B, key=key))(jax.random.key(2))
    carry, env_state, _ = unroll(env_state, carry)
    _, env_state, transitions = unroll(env_state, carry)
    assert transitions.truncated.sum() >= 2
    assert transitions.terminated.sum() >= 2
    later = common.moved(network, 0.1, seed=2)
    return Recorded(network, later, carry, transitions, env_state.obs)


def to_their_transitions(record):
    """Of `next_obs` the ancestor reads the last one only."""
    t, output = record.transitions, record.transitions.network_output
    return their_types.Transition(
        obs=t.obs,
        network_output=TheirOutput(output.actions, output.log_likelihoods, output.value_estimates),
        rewards=t.rewards,
        done=t.done,
        truncated=t.truncated,
        next_obs=jax.tree.map(lambda leaf: leaf[None], record.last_obs),
        metrics={},
        rollout_extras=extras_to_ancestor(record.network, t.rollout_extras),
    )


# --- The loss -----------------------------------------------------------------------------


def our_loss(network, record, config):
    """With the current critic also after the last step, where ours keeps the rollout's value.

    No carry is `fresh`: the ancestor starts from what was stored, so that a trained initial
    state gets a gradient only from resets inside the sequence.
    """
    start, never = record.carry, jnp.zeros(B, jnp.bool_)
    after = replay(network, start, never, record.transitions).next_state
    last = network(after, record.last_obs).output.value_estimates
    next_values = jax.tree.map(lambda value: jnp.broadcast_to(value, (T, B)), last)
    transitions = record.transitions._replace(next_values=next_values)
    return ppo_loss(network, Minibatch(transitions, start, never), config)


def our_loss_of_rollout(network, record, config):
    """With the advantages of the rollout, as the first gradient step has them."""
    values = record.transitions.network_output.value_estimates
    advantages, targets = advantages_and_targets(record.transitions, values, config)
    start, never = record.carry, jnp.zeros(B, jnp.bool_)
    batch = Minibatch(record.transitions, start, never, advantages, targets)
    return ppo_loss(network, batch, config)


def their_loss(network, record, config):
    promotion, rank = common.as_the_ancestor_runs()
    with promotion, rank:
        return their_ppo.ppo_loss(
            to_ancestor(network),
            state_to_ancestor(network, record.carry),
            to_their_transitions(record),
            clip_range=config.clip_range,
            normalize_advantages=config.normalize_advantages == "minibatch",
            combine_advantages=config.combine_advantages,
            discounting_factor=config.discounting_factor,
            gae_lambda=config.gae_lambda,
            critic_loss_weight=config.critic_loss_weight,
            logging_level=THEIR_TERMS,
        )


@common.jit
def with_gradient(loss, network, record, config):
    params, rest = eqx.partition(network, nets.trainable(network))

    def of(params):
        return loss(eqx.combine(params, rest), record, config)

    return jax.value_and_grad(of, has_aux=True)(params)


def config(**changes):
    options = {"truncation": "mask", "advantages": "minibatch", "logging_level": TERMS}
    return PPOConfig(n_envs=B, rollout_length=T, n_minibatches=1, **options | changes)


VARIANTS = {
    "default": {},
    "numbers": {
        "normalize_advantages": "none",
        "gae_lambda": 0.7,
        "discounting_factor": 0.9,
        "clip_range": 0.1,
        "critic_loss_weight": 0.3,
    },
    "combined": {"combine_advantages": True},
    "combined, not normalized": {"combine_advantages": True, "normalize_advantages": "none"},
}
RUNS = {
    "mlp": ("default", "numbers"),
    "lstm": ("default",),
    "bottlenecks": ("numbers",),
    "parts": ("numbers", "combined", "combined, not normalized"),
}


def assert_equal_losses(ours, theirs, options):
    (loss, terms), gradients = ours
    (expected, their_terms), their_gradients = theirs
    common.assert_equal((loss, gradients), (expected, their_gradients))
    assert common.spread(their_gradients) > 1e-3
    means = jax.tree.map(jnp.mean, their_terms.pop("losses/advantages"))
    assert their_terms.keys() <= terms.keys()
    for name, expected_term in their_terms.items():
        common.assert_equal(terms[name], expected_term, at_least=1.0)
    is_normalized = options.normalize_advantages == "minibatch"
    for name, mean in flatten_metrics({"losses/advantages": means}).items():
        assert (abs(float(mean)) < 1e-5) == is_normalized
        if not is_normalized:  # theirs are logged afterwards, ours before
            common.assert_equal(terms[f"{name}/mean"], mean, at_least=1.0)


@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name, those in RUNS.items() for variant in those]
)
def test_loss_with_later_weights(name, variant):
    record, options = recorded(name), config(**VARIANTS[variant])
    ours = with_gradient(our_loss, record.later, record, options)
    theirs = with_gradient(their_loss, record.later, record, options)
    assert_equal_losses(ours, theirs, options)
    fractions = jax.tree.leaves(theirs[0][1]["losses/clipping_fraction"])
    assert all(0 < float(fraction) < 1 for fraction in fractions)


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_of_the_first_minibatch(name):
    """With the weights of the rollout: what was recorded serves, and no ratio is clipped."""
    record, changes = recorded(name), VARIANTS[RUNS[name][0]]
    options = config(**changes | {"advantages": "rollout"})
    ours = with_gradient(our_loss_of_rollout, record.network, record, options)
    theirs = with_gradient(their_loss, record.network, record, config(**changes))
    assert_equal_losses(ours, theirs, options)
    assert float(ours[0][1]["losses/ratio_error"]) < 1e-5


def test_bootstrapping_is_another_loss():
    """What the option changes: the value target of a time limit is not the value itself."""
    record = recorded("mlp")
    masked, bootstrapped = (
        common.jit(our_loss_of_rollout)(record.network, record, config(truncation=truncation))
        for truncation in ("mask", "bootstrap")
    )
    assert abs(float(bootstrapped[0] - masked[0])) > 1e-3


# --- Metrics ------------------------------------------------------------------------------


@pytest.mark.parametrize("percentiles", [None, (0, 25, 100)])
def test_metrics_of_a_rollout(percentiles):
    """Those that the ancestor logs are there under the same names, save `loglikelihood`."""
    record = recorded("parts")
    levels = ("ROLLOUT_STATS", "ROLLOUT_OBS", "ACTOR_EXTRA", "CRITIC_EXTRA", "WEIGHTS")
    ours, theirs = (
        functools.reduce(lambda a, b: a | b, (kind[level] for level in levels))
        for kind in (LoggingLevel, their_types.LoggingLevel)
    )
    options = config(logging_level=ours, logging_percentiles=percentiles)
    promotion, rank = common.as_the_ancestor_runs()
    with promotion, rank:
        expected = their_metrics.compute_metrics(
            {}, to_their_transitions(record), theirs, percentiles
        )
        their_metrics.log_weight_stats(expected, to_ancestor(record.network), percentiles)
    got = rollout_metrics(record.transitions, options) | weight_metrics(record.network, options)
    expected = {
        name.replace("loglikelihood", "log_likelihood"): value for name, value in expected.items()
    }
    assert expected.keys() <= got.keys()
    assert len(expected) > 20
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
