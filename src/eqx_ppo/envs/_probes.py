"""Probe environments: each isolates one part of PPO, and its solution is known exactly.

They are ordered by what they need. If one fails while those before it pass, the fault
lies in the part that it adds: the value loss, the dependence on the observation,
discounting, the policy gradient, both together, bootstrapping at a time limit. Observation
and action are float32 `[1]` in all of them. `gamma` is the discount factor.
"""

import abc
import dataclasses
from typing import ClassVar, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import KeyLike
from eqx_ppo.envs._state import State


class _OneStepProbe(abc.ABC):
    """One observation, one action, one reward, then termination.

    The last observation equals the first, so that a value that is wrongly bootstrapped
    across the termination shows.
    """

    observation_size: ClassVar[int] = 1
    action_size: ClassVar[int] = 1

    @abc.abstractmethod
    def _observe(self, key: PRNGKeyArray) -> Float[Array, "1"]:
        """Draws the observation."""

    @abc.abstractmethod
    def _reward(self, obs: Float[Array, "1"], action: Float[Array, "1"]) -> Float[Array, "1"]:
        """The reward, as an array of one element."""

    @typed
    def reset(self, key: KeyLike) -> State:
        return _state(self._observe(as_key(key)), jnp.zeros((), jnp.float32), done=False)

    @typed
    def step(self, state: State, action: Float[Array, "1"]) -> State:
        reward = self._reward(state.obs, action.astype(jnp.float32))
        return _state(state.obs, reward[0], done=True)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ConstantRewardProbe(_OneStepProbe):
    """One step, observation 1, reward 1: does the critic learn a constant?

    Must be learnt: value 1, for every `gamma`. A value that is bootstrapped across the
    termination tends to `1 / (1 - gamma)` instead.
    """

    def _observe(self, key: PRNGKeyArray) -> Float[Array, "1"]:
        return jnp.ones((1,), jnp.float32)

    def _reward(self, obs: Float[Array, "1"], action: Float[Array, "1"]) -> Float[Array, "1"]:
        return jnp.ones_like(obs)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ObservationRewardProbe(_OneStepProbe):
    """One step, observation -1 or 1, reward = observation: does the critic see?

    Must be learnt: value -1 for observation -1 and 1 for 1, for every `gamma`. A critic
    that does not see the observation stays at the mean, 0.
    """

    def _observe(self, key: PRNGKeyArray) -> Float[Array, "1"]:
        return _sign(key)

    def _reward(self, obs: Float[Array, "1"], action: Float[Array, "1"]) -> Float[Array, "1"]:
        return obs


@final
@dataclasses.dataclass(frozen=True, eq=False)
class DiscountProbe:
    """Two steps, reward 1 at the end of the second: is the reward discounted?

    The observation is -1 in the first step, 1 in the second and after it.

    Must be learnt: value `gamma` for observation -1 and 1 for 1. A critic without
    discounting says 1 for both, one without bootstrapping (at `gae_lambda = 0`) says 0 for
    the first.
    """

    observation_size: ClassVar[int] = 1
    action_size: ClassVar[int] = 1

    @typed
    def reset(self, key: KeyLike) -> State:
        as_key(key)  # checked like everywhere, though nothing is drawn
        return _state(-jnp.ones((1,), jnp.float32), jnp.zeros((), jnp.float32), done=False)

    @typed
    def step(self, state: State, action: Float[Array, "1"]) -> State:
        second = state.obs[0] > 0
        return _state(jnp.ones((1,), jnp.float32), second.astype(jnp.float32), done=second)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ActionRewardProbe(_OneStepProbe):
    """One step, observation 1, reward `1 - (action - 0.5)^2`: is there a policy gradient?

    Must be learnt: the mode of the policy, 0.5. The value of a policy with mean `m` and
    variance `s2` of the action is `1 - (m - 0.5)^2 - s2`, for every `gamma`: 1 at the best.
    """

    def _observe(self, key: PRNGKeyArray) -> Float[Array, "1"]:
        return jnp.ones((1,), jnp.float32)

    def _reward(self, obs: Float[Array, "1"], action: Float[Array, "1"]) -> Float[Array, "1"]:
        return 1.0 - (action - 0.5) ** 2


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ObservationActionProbe(_OneStepProbe):
    """One step, observation -1 or 1, reward `-(action - observation / 2)^2`.

    Does the action follow the observation, with advantages credited to the right sample?

    Must be learnt: the mode of the policy, -0.5 for observation -1 and 0.5 for 1; the value
    is 0 at the best, for every `gamma`. The best constant action, 0, has the value -0.25.
    """

    def _observe(self, key: PRNGKeyArray) -> Float[Array, "1"]:
        return _sign(key)

    def _reward(self, obs: Float[Array, "1"], action: Float[Array, "1"]) -> Float[Array, "1"]:
        return -((action - 0.5 * obs) ** 2)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TruncationProbe:
    """Observation 1 and reward 1 for ever: is the value bootstrapped at a time limit?

    It never terminates; use it inside `EpisodeWrapper(TruncationProbe(), max_len)`.

    Must be learnt: value `1 / (1 - gamma)`, for every `max_len`, because the time limit is
    not part of the task. If time limits are taken for terminations, the values lie between
    1 and `(1 - gamma^max_len) / (1 - gamma)`.
    """

    observation_size: ClassVar[int] = 1
    action_size: ClassVar[int] = 1

    @typed
    def reset(self, key: KeyLike) -> State:
        as_key(key)  # checked like everywhere, though nothing is drawn
        return self._state(jnp.ones((1,), jnp.float32), jnp.zeros((), jnp.float32))

    @typed
    def step(self, state: State, action: Float[Array, "1"]) -> State:
        return self._state(state.obs, jnp.ones((), jnp.float32))

    def _state(self, obs: Float[Array, "1"], reward: Float[Array, ""]) -> State:
        return State(obs, reward, jnp.zeros((), jnp.bool_), info={}, metrics={})


def _sign(key: PRNGKeyArray) -> Float[Array, "1"]:
    return jax.random.rademacher(key, (1,), jnp.float32)


def _state(obs: Float[Array, "1"], reward: Float[Array, ""], done: bool | Array) -> State:
    info = {"truncation": jnp.zeros((), jnp.bool_)}  # it ends by itself
    return State(obs, reward, jnp.asarray(done, jnp.bool_), info, metrics={})
