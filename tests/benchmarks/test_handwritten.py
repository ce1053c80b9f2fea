"""The update written by hand is this library's: what its memory is compared with is the same."""

import dataclasses

import jax
import numpy as np

from benchmarks import _handwritten
from benchmarks._environments import sizes_of
from benchmarks._handwritten import Experience
from benchmarks._parts import make_workload, part_runners
from benchmarks._settings import Setting, tiny
from eqx_ppo.algorithms._update import update
from eqx_ppo.networks import make_mlp_actor_critic

SETTING = dataclasses.replace(tiny(Setting(env="Pendulum")), actor_sizes=(8, 8), critic_sizes=(9,))


def weights_of(network) -> dict[str, list]:
    """The dense layers of actor and critic."""
    (adapter,) = network.layers
    ports = {"actor": adapter.action.layers[:-1], "critic": adapter.value.layers}
    return {
        name: [(layer.kernel, layer.bias) for layer in layers] for name, layers in ports.items()
    }


def test_update_by_hand_gives_the_same_weights():
    work = make_workload(SETTING)
    sizes = sizes_of(work.env)
    network = make_mlp_actor_critic(
        sizes.obs,
        sizes.action,
        SETTING.actor_sizes,
        SETTING.critic_sizes,
        normalize_obs=False,
        key=jax.random.key(0),
    )
    work = work._replace(network=network)
    key = jax.random.key(1)

    @jax.jit
    def both(key):
        state = work.new_state(key)
        rollout = work.collect(state, key)
        ours = update(
            state.network, state.optimizer_state, rollout, work.config, work.optimizer, key
        )
        steps = rollout.transitions
        experience = Experience(
            obs=steps.obs,
            raw_actions=steps.rollout_extras[0]["action"][-1],
            log_likelihoods=steps.network_output.log_likelihoods,
            rewards=steps.rewards,
            values=steps.network_output.value_estimates,
            next_values=steps.next_values,
            terminated=steps.terminated,
            truncated=steps.truncated,
        )
        optimizer, by_hand = _handwritten.make_update(SETTING)
        before = weights_of(state.network)
        after, _ = by_hand(before, optimizer.init(before), experience, key)
        return before, weights_of(ours.network), after

    before, ours, by_hand = both(key)
    for start, mine, theirs in zip(*map(jax.tree.leaves, (before, ours, by_hand)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
        assert np.abs(mine - start).max() > 3e-4  # 4 steps of Adam at 3e-4


def test_parts_run_on_the_data_of_a_rollout():
    runners = part_runners(make_workload(SETTING))
    assert list(runners) == [
        "env",
        "rollout",
        "policy forward",
        "bootstrap",
        "advantages",
        "update",
        "statistics",
    ]
    for runner in runners.values():
        runner.run(1)
