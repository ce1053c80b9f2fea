"""Every environment that must follow the convention, by name, with a sample action."""

import jax
import jax.numpy as jnp

from eqx_ppo import envs
from eqx_ppo._tree import replace
from tests.helpers.envs import DictEnv, ScriptedEnv, Spring

_ACTION = jnp.array([0.3], jnp.float32)
_ARMS_ACTION = {
    "left": jnp.array([0.3, -0.2], jnp.float32),
    "right": jnp.array([-0.5, 0.1], jnp.float32),
}
_DICT_ACTION = {
    "arm": jnp.array([0.3, -0.2], jnp.float32),
    "leg": jnp.array([0.5], jnp.float32),
}


def _other_mass(key, parameters):
    mass = parameters.mass * jax.random.uniform(key, (), jnp.float32, 0.5, 2.0)
    return parameters._replace(mass=mass)


class _CountsSteps(envs.Wrapper):
    def reset(self, key):
        state = self.env.reset(key)
        return replace(state, info={**state.info, "steps": jnp.zeros((), jnp.int32)})

    def step(self, state, action):
        steps = state.info["steps"] + jnp.int32(1)
        state = self.env.step(state, action)
        return replace(state, info={**state.info, "steps": steps})


CASES = {
    "pendulum": (envs.Pendulum(), _ACTION),
    "recall": (envs.Recall(delay=2), _ACTION),
    "constant_reward": (envs.ConstantRewardProbe(), _ACTION),
    "observation_reward": (envs.ObservationRewardProbe(), _ACTION),
    "discount": (envs.DiscountProbe(), _ACTION),
    "action_reward": (envs.ActionRewardProbe(), _ACTION),
    "observation_action": (envs.ObservationActionProbe(), _ACTION),
    "truncation": (envs.TruncationProbe(), _ACTION),
    "two_arms": (envs.TwoArms(), _ARMS_ACTION),
    "episode": (envs.EpisodeWrapper(envs.Pendulum(), 3), _ACTION),
    "episode_of_episode": (
        envs.EpisodeWrapper(envs.EpisodeWrapper(envs.Recall(delay=1), 5), 2),
        _ACTION,
    ),
    "reward_scaling": (envs.RewardScalingWrapper(DictEnv(), 0.5), _DICT_ACTION),
    "action_repeat": (envs.ActionRepeatWrapper(envs.Recall(delay=2), 3), _ACTION),
    "action_repeat_of_metrics": (
        envs.ActionRepeatWrapper(DictEnv(), 2, sum_metrics=True),
        _DICT_ACTION,
    ),
    "action_repeat_of_dicts": (
        envs.EpisodeWrapper(envs.ActionRepeatWrapper(DictEnv(), 2), 3),
        _DICT_ACTION,
    ),
    "frame_stack": (envs.FrameStackWrapper(envs.EpisodeWrapper(DictEnv(), 3), 2), _DICT_ACTION),
    "observation_delay": (
        envs.EpisodeWrapper(envs.ObservationDelayWrapper(DictEnv(), 2), 3),
        _DICT_ACTION,
    ),
    "keep_info": (
        envs.KeepInfoWrapper(_CountsSteps(envs.EpisodeWrapper(envs.Pendulum(), 3)), ("steps",)),
        _ACTION,
    ),
    "domain_randomization": (
        envs.DomainRandomizationWrapper(Spring(), _other_mass, "parameters"),
        _ACTION,
    ),
    "dict": (DictEnv(), _DICT_ACTION),
    "dict_episode": (envs.EpisodeWrapper(DictEnv(), 5), _DICT_ACTION),
    "scripted": (ScriptedEnv((0, 0, 1), (0, 1, 0)), _ACTION),
    "scripted_int": (ScriptedEnv((0, 1), (0, 1), jnp.int32, "truncated"), _ACTION),
    "scripted_without_flag": (ScriptedEnv((0, 1)), _ACTION),
    "scripted_episode": (
        envs.EpisodeWrapper(ScriptedEnv((0, 0, 1), (0, 1, 0), jnp.int32), 2),
        _ACTION,
    ),
}
