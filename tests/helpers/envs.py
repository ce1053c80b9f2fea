"""Small environments for tests."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from eqx_ppo.envs import State


class DictEnvData(NamedTuple):
    arm: jax.Array  # [2]
    leg: jax.Array  # [1]
    time: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DictEnv:
    """Dictionaries everywhere: observations, actions and rewards.

    Smooth dynamics: each action pulls its part of the body, and the reward of a part is
    minus its squared distance from the goal. An episode terminates after a number of steps
    drawn from `lengths`. `obs["proprio"]` is `(arm, leg)`, `obs["goal"]` a constant of the
    episode.
    """

    lengths: tuple[int, ...] = (4, 7)

    observation_size: ClassVar[dict[str, int]] = {"proprio": 3, "goal": 2}
    action_size: ClassVar[dict[str, int]] = {"arm": 2, "leg": 1}

    def reset(self, key):
        body_key, goal_key, length_key = jax.random.split(key, 3)
        body = jax.random.normal(body_key, (3,), jnp.float32)
        goal = jax.random.normal(goal_key, (2,), jnp.float32)
        length = jax.random.choice(length_key, jnp.array(self.lengths, jnp.int32))
        data = DictEnvData(body[:2], body[2:], jnp.zeros((), jnp.int32), length)
        return self._state(data, goal)

    def step(self, state, action):
        data = state.data
        data = DictEnvData(
            arm=0.9 * data.arm + 0.1 * jnp.tanh(action["arm"]),
            leg=0.8 * data.leg + 0.2 * jnp.tanh(action["leg"]),
            time=data.time + jnp.int32(1),
            length=data.length,
        )
        return self._state(data, state.obs["goal"])

    def _state(self, data, goal):
        obs = {"proprio": jnp.concatenate([data.arm, data.leg]), "goal": goal}
        started = data.time > 0
        reward = {
            "arm": jnp.where(started, -jnp.sum((data.arm - goal) ** 2), 0.0),
            "leg": jnp.where(started, -jnp.sum((data.leg - goal[:1]) ** 2), 0.0),
        }
        done = (data.time >= data.length).astype(jnp.float32)
        metrics = {"speed": jnp.sum(data.arm)}
        return State(obs, reward, done, info={}, metrics=metrics, data=data)


class ScriptData(NamedTuple):
    elapsed: jax.Array
    position: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class ScriptedEnv:
    """An environment whose episodes end where a script says so.

    The script is read cyclically from a start drawn uniformly at the reset. A step taken at
    position `p` sets `done` to `done_pattern[p]` and the flag to `truncated_pattern[p]`
    (without a pattern there is no flag), exactly as written, and gives the reward `p`. The
    observation is `(steps since the reset, position)`.
    """

    done_pattern: tuple[int, ...]
    truncated_pattern: tuple[int, ...] | None = None
    done_dtype: type = jnp.float32
    truncation_key: str = "truncation"

    observation_size: ClassVar[int] = 2
    action_size: ClassVar[int] = 1

    def reset(self, key):
        position = jax.random.randint(key, (), 0, len(self.done_pattern), jnp.int32)
        zero = jnp.zeros((), jnp.int32)
        return self._state(ScriptData(zero, position), zero, zero, zero)

    def step(self, state, action):
        elapsed, position = state.data
        done = jnp.array(self.done_pattern, jnp.int32)[position]
        truncated = done
        if self.truncated_pattern is not None:
            truncated = jnp.array(self.truncated_pattern, jnp.int32)[position]
        following = (position + jnp.int32(1)) % jnp.int32(len(self.done_pattern))
        data = ScriptData(elapsed + jnp.int32(1), following)
        return self._state(data, position, done, truncated)

    def _state(self, data, reward, done, truncated):
        obs = jnp.stack(data).astype(jnp.float32)
        info = {}
        if self.truncated_pattern is not None:
            info[self.truncation_key] = truncated.astype(self.done_dtype)
        reward = reward.astype(jnp.float32)
        return State(obs, reward, done.astype(self.done_dtype), info, {}, data)


class SpringParameters(NamedTuple):
    mass: jax.Array | float = 1.0
    stiffness: jax.Array | float = 4.0
    table: jax.Array | None = None  # something large that does not change


class SpringData(NamedTuple):
    position: jax.Array
    velocity: jax.Array
    left: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Spring:
    """A mass on a spring, with its parameters in an attribute.

    The observation is `(position, velocity, mass)`, through a bound method that is stored in an
    attribute as environments of Playground do it; an episode has 2 to 5 steps.
    """

    parameters: SpringParameters = dataclasses.field(default_factory=SpringParameters)
    observe: Callable | None = None

    observation_size: ClassVar[int] = 3
    action_size: ClassVar[int] = 1

    def __post_init__(self):
        object.__setattr__(self, "observe", self._observe)

    def reset(self, key):
        start_key, length_key = jax.random.split(key)
        position = jax.random.normal(start_key, (), jnp.float32)
        left = jax.random.randint(length_key, (), 2, 6, jnp.int32)
        return self._state(SpringData(position, jnp.zeros((), jnp.float32), left))

    def step(self, state, action):
        position, velocity, left = state.data
        force = action[0] - self.parameters.stiffness * position
        velocity = velocity + 0.1 * force / self.parameters.mass
        position = position + 0.1 * velocity
        return self._state(SpringData(position, velocity, left - jnp.int32(1)))

    def _state(self, data):
        reward = -jnp.square(data.position)
        return State(self.observe(data), reward, data.left <= 0, {}, {}, data)

    def _observe(self, data):
        mass = jnp.asarray(self.parameters.mass, jnp.float32)
        return jnp.stack([data.position, data.velocity, mass])
