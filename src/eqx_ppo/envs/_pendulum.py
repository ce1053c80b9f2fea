"""A torque-limited pendulum, for a quick start without a physics engine."""

import dataclasses
import math
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import KeyLike
from eqx_ppo.envs._canvas import Canvas
from eqx_ppo.envs._state import State

_GRAVITY = 10.0
_MASS = 1.0
_LENGTH = 1.0
_TIME_STEP = 0.05
_MAX_SPEED = 8.0
_MAX_TORQUE = 2.0


class _PendulumData(NamedTuple):
    """`theta` in [-pi, pi), 0 is upright (rad); `velocity` in [-8, 8] (rad/s)."""

    theta: Float[Array, ""]
    velocity: Float[Array, ""]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Pendulum:
    """Swing a pendulum up and keep it upright, with too little torque to lift it at once.

    The dynamics are those of Gymnasium's `Pendulum-v1`: a rod of 1 m and 1 kg, gravity
    10 m/s^2, steps of 0.05 s integrated by the semi-implicit Euler method, speed limited to
    8 rad/s. It starts at a random angle with a speed of up to 1 rad/s.

    - `obs`: float32 `[3]`, `(cos theta, sin theta, velocity)`; `theta = 0` is upright.
    - action: `[1]`, in [-1, 1] (clipped), scaled to a torque of at most 2 N m.
    - `reward`: `-(theta^2 + 0.1 velocity^2 + 0.001 torque^2)` of the state *before* the
        step, with `theta` in [-pi, pi): from -16.3 to 0.
    - `done`: never. Give it a time limit with `EpisodeWrapper` (200 steps in Gymnasium).

    ```python
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from eqx_ppo.envs import Pendulum
    >>> env = Pendulum()
    >>> state = jax.jit(env.reset)(jax.random.key(0))
    >>> state = jax.jit(env.step)(state, jnp.zeros(1))
    >>> state.obs.shape, bool(state.reward < 0)
    ((3,), True)

    ```
    """

    observation_size: ClassVar[int] = 3
    action_size: ClassVar[int] = 1
    dt: ClassVar[float] = _TIME_STEP

    @typed
    def reset(self, key: KeyLike) -> State:
        theta_key, velocity_key = jax.random.split(as_key(key))
        data = _PendulumData(
            theta=jax.random.uniform(theta_key, (), jnp.float32, -jnp.pi, jnp.pi),
            velocity=jax.random.uniform(velocity_key, (), jnp.float32, -1.0, 1.0),
        )
        return _state(data, reward=jnp.zeros((), jnp.float32))

    @typed
    def step(self, state: State, action: Float[Array, "1"]) -> State:
        theta, velocity = state.data
        torque = _MAX_TORQUE * jnp.clip(action[0].astype(jnp.float32), -1.0, 1.0)
        cost = theta**2 + 0.1 * velocity**2 + 0.001 * torque**2
        acceleration = 1.5 * _GRAVITY / _LENGTH * jnp.sin(theta)
        acceleration = acceleration + 3.0 / (_MASS * _LENGTH**2) * torque
        velocity = jnp.clip(velocity + acceleration * _TIME_STEP, -_MAX_SPEED, _MAX_SPEED)
        theta = _wrap_angle(theta + velocity * _TIME_STEP)
        return _state(_PendulumData(theta, velocity), reward=-cost)

    def render(
        self,
        trajectory: list[State],
        height: int = 240,
        width: int = 320,
        camera: str | None = None,
    ) -> list[UInt8[np.ndarray, "height width 3"]]:
        """Draws states, see `SupportsRender`; positive angles lean to the left.

        **Raises:** `ImportError` without Pillow (the extra `video`).
        """
        del camera
        return [_draw(float(state.data.theta), height, width) for state in trajectory]


def _draw(theta: float, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
    canvas = Canvas(height, width, center=(0.0, 0.0), extent=2.6 * _LENGTH)
    tip = (-_LENGTH * math.sin(theta), _LENGTH * math.cos(theta))
    canvas.rod((0.0, 0.0), tip, 0.2 * _LENGTH, "#cc4d4d")
    canvas.disk((0.0, 0.0), 0.05 * _LENGTH, "#222222")
    return canvas.picture()


def _wrap_angle(angle: Float[Array, ""]) -> Float[Array, ""]:
    """The same angle in [-pi, pi)."""
    return jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi


def _state(data: _PendulumData, reward: Float[Array, ""]) -> State:
    obs = jnp.stack([jnp.cos(data.theta), jnp.sin(data.theta), data.velocity])
    return State(obs, reward, jnp.zeros((), jnp.bool_), info={}, metrics={}, data=data)
