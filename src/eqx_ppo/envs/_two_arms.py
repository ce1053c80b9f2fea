"""Two arms on one torso: structured observations, actions and rewards, with real coupling."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import KeyLike, Tree
from eqx_ppo.envs._canvas import Canvas
from eqx_ppo.envs._state import State

_LINK_MASS = 1.0  # kg, of an upper arm and of a forearm
_LINK_LENGTH = 0.3  # m
_SHOULDER = 0.2  # m, from the pivot of the torso to a shoulder
_TORSO_INERTIA = 0.3  # kg m^2, without the arms
_TORSO_STIFFNESS = 10.0  # N m / rad
_TORSO_DAMPING = 1.0  # N m s / rad
_JOINT_DAMPING = np.array([0.3, 0.15], np.float32)  # N m s / rad, shoulder and elbow
_MAX_TORQUE = np.array([3.0, 1.5], np.float32)  # N m, shoulder and elbow
_HALF_BAR = 0.15  # m, from the center of the bar to a handle
_BAR_LOW = np.array([-0.1, 0.25, -0.5], np.float32)  # m, m, rad
_BAR_HIGH = np.array([0.1, 0.45, 0.5], np.float32)
_REWARD_SCALE = 0.05  # m, the distance at which the reward is a half
_TIME_STEP = 0.02  # s
_SUBSTEPS = 2

_SIDES = ("left", "right")
_SIGN = np.array([-1.0, 1.0], np.float32)
_COLORS = ("#1f77b4", "#d62728")  # of the hands and their ends of the bar

# The kinetic energy is half the sum of C_ij cos(angle_i - angle_j) velocity_i velocity_j.
_C_TORSO = _TORSO_INERTIA + 4 * _LINK_MASS * _SHOULDER**2
_C_UPPER = 4 / 3 * _LINK_MASS * _LINK_LENGTH**2
_C_FORE = 1 / 3 * _LINK_MASS * _LINK_LENGTH**2
_C_UPPER_FORE = 1 / 2 * _LINK_MASS * _LINK_LENGTH**2
_C_TORSO_UPPER = 3 / 2 * _LINK_MASS * _SHOULDER * _LINK_LENGTH * _SIGN
_C_TORSO_FORE = 1 / 2 * _LINK_MASS * _SHOULDER * _LINK_LENGTH * _SIGN


class _Motion(NamedTuple):
    """Angles from the x axis (rad), or their velocities or accelerations; arms left, right."""

    torso: Float[Array, ""]
    upper: Float[Array, "2"]
    fore: Float[Array, "2"]


class _TwoArmsData(NamedTuple):
    """`bar` is the pose of the bar: center (m) and angle (rad)."""

    angles: _Motion
    velocities: _Motion
    bar: Float[Array, "3"]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TwoArms:
    r"""Bring both hands to the two ends of a bar, on a torso that gives way.

    Two planar arms, each of two uniform rods of 0.3 m and 1 kg, move in a horizontal plane.
    Their shoulders sit 0.2 m left and right of the pivot of a torso that turns against a
    spring (10 N m/rad) and a damper. So each arm pushes the torso, and with it the other arm,
    back: neither hand can be held still without regard to the other arm. The arms do not
    collide and have no joint limits.

    At the reset the torso is at rest, facing y, with the arms roughly stretched out; a bar of
    0.3 m lies at a random place and angle within reach of both.

    - `obs`: a dict of float32 arrays,
        - `"left"`, `"right"` `[8]`: cosine and sine of the shoulder's angle (relative to the
            torso), of the elbow's, their velocities (rad/s), the hand's position (m);
        - `"torso"` `[2]`: angle (rad) and velocity (rad/s);
        - `"goal"` `[4]`: center of the bar (m), cosine and sine of its angle.
    - action: `{"left": [2], "right": [2]}`, each in [-1, 1] (clipped), scaled to torques of at
        most 3 N m at the shoulder and 1.5 N m at the elbow.
    - `reward`: `{"left": scalar, "right": scalar}`, `1 / (1 + (d / 5 cm)^2)` with the distance
        `d` of the hand from its end of the bar after the step: in (0, 1].
    - `done`: never. Give it a time limit with `EpisodeWrapper`, for example of 100 steps (of
        0.04 s each).
    - `metrics`: `"left_distance"` and `"right_distance"` (m).

    In 100 steps each arm's return is about 4 under random actions, or under none, and about 92
    under a trained policy (`examples/two_arms.py`); it cannot exceed 100.

    The equations of motion, with absolute angles $\phi$ and constants $C_{ij}$ of the masses,
    are $\sum_j C_{ij} (\cos(\phi_i - \phi_j) \ddot\phi_j + \sin(\phi_i - \phi_j)
    \dot\phi_j^2) = Q_i$, integrated by the semi-implicit Euler method in steps of 0.02 s.

    ```python
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from eqx_ppo.envs import TwoArms
    >>> env = TwoArms()
    >>> state = jax.jit(env.reset)(jax.random.key(0))
    >>> action = {"left": jnp.zeros(2), "right": jnp.ones(2)}
    >>> state = jax.jit(env.step)(state, action)
    >>> {key: obs.shape for key, obs in sorted(state.obs.items())}
    {'goal': (4,), 'left': (8,), 'right': (8,), 'torso': (2,)}
    >>> sorted(state.reward)
    ['left', 'right']

    ```
    """

    observation_size: ClassVar[Mapping[str, int]] = {"left": 8, "right": 8, "torso": 2, "goal": 4}
    action_size: ClassVar[Mapping[str, int]] = {"left": 2, "right": 2}
    dt: ClassVar[float] = _TIME_STEP * _SUBSTEPS

    @typed
    def reset(self, key: KeyLike) -> State:
        shoulder_key, elbow_key, bar_key = jax.random.split(as_key(key), 3)
        shoulders = jax.random.uniform(shoulder_key, (2,), jnp.float32, -0.5, 0.5)
        elbows = jax.random.uniform(elbow_key, (2,), jnp.float32, -1.0, 1.0)
        upper = shoulders + jnp.pi / 2
        angles = _Motion(jnp.zeros((), jnp.float32), upper, upper + elbows)
        bar = jax.random.uniform(bar_key, (3,), jnp.float32) * (_BAR_HIGH - _BAR_LOW) + _BAR_LOW
        state = _state(_TwoArmsData(angles, jax.tree.map(jnp.zeros_like, angles), bar))
        return state.replace(reward=jax.tree.map(jnp.zeros_like, state.reward))

    @typed
    def step(self, state: State, action: Tree) -> State:
        """One step of 0.04 s.

        **Raises:** `ValueError` for an action that is not `{"left": [2], "right": [2]}`.
        """
        torque = jnp.clip(_both_arms(action), -1.0, 1.0) * _MAX_TORQUE[None]
        data = state.data
        for _ in range(_SUBSTEPS):
            data = _integrate(data, torque)
        return _state(data)

    def render(
        self,
        trajectory: list[State],
        height: int = 240,
        width: int = 320,
        camera: str | None = None,
    ) -> list[UInt8[np.ndarray, "height width 3"]]:
        """Draws states from above, see `SupportsRender`; each hand in the color of its end.

        **Raises:** `ImportError` without Pillow (the extra `video`).
        """
        del camera
        return [_draw(state.data, height, width) for state in trajectory]


def _both_arms(action: Tree) -> Float[Array, "2 2"]:
    """Sides by joints, float32."""
    shapes = jax.tree.map(jnp.shape, action)
    if shapes != {"left": (2,), "right": (2,)}:
        raise ValueError(
            "The action of `TwoArms` must be a dict of torques, `left` [2] and `right` [2], but "
            f"got {shapes}. Give the network a sampler per arm, in `Map` or `Parallel`."
        )
    return jnp.stack([action[side].astype(jnp.float32) for side in _SIDES])


def _integrate(data: _TwoArmsData, torque: Float[Array, "2 2"]) -> _TwoArmsData:
    def advance(value, rate):
        return value + _TIME_STEP * rate

    acceleration = _acceleration(data.angles, data.velocities, torque)
    velocities = jax.tree.map(advance, data.velocities, acceleration)
    return data._replace(
        angles=jax.tree.map(advance, data.angles, velocities), velocities=velocities
    )


def _acceleration(angles: _Motion, velocities: _Motion, torque: Float[Array, "2 2"]) -> _Motion:
    """Solves the equations of motion: each arm for a given torso, then the torso."""
    to_upper, to_fore = angles.torso - angles.upper, angles.torso - angles.fore
    bend = angles.upper - angles.fore
    joints = torque - _relative(velocities) * _JOINT_DAMPING[None]
    shoulder, elbow = joints[:, 0], joints[:, 1]
    push_upper = jnp.sin(to_upper) * _C_TORSO_UPPER
    push_fore = jnp.sin(to_fore) * _C_TORSO_FORE
    push_bend = _C_UPPER_FORE * jnp.sin(bend)
    squares = jax.tree.map(jnp.square, velocities)

    force = (
        shoulder - elbow + push_upper * squares.torso - push_bend * squares.fore,
        elbow + push_fore * squares.torso + push_bend * squares.upper,
    )
    torso_force = -_TORSO_STIFFNESS * angles.torso - _TORSO_DAMPING * velocities.torso
    torso_force = torso_force - jnp.sum(
        shoulder + push_upper * squares.upper + push_fore * squares.fore
    )
    coupling = (jnp.cos(to_upper) * _C_TORSO_UPPER, jnp.cos(to_fore) * _C_TORSO_FORE)

    free = _solve_arm(bend, force)
    dragged = _solve_arm(bend, coupling)
    inertia = _C_TORSO - jnp.sum(coupling[0] * dragged[0] + coupling[1] * dragged[1])
    torso_force = torso_force - jnp.sum(coupling[0] * free[0] + coupling[1] * free[1])
    torso = torso_force / inertia
    return _Motion(torso, free[0] - dragged[0] * torso, free[1] - dragged[1] * torso)


def _solve_arm(
    bend: Float[Array, "2"], force: tuple[Float[Array, "2"], Float[Array, "2"]]
) -> tuple[Float[Array, "2"], Float[Array, "2"]]:
    """The accelerations of upper arm and forearm on a torso that is held."""
    mixed = _C_UPPER_FORE * jnp.cos(bend)
    determinant = _C_UPPER * _C_FORE - mixed**2  # positive: C_UPPER_FORE^2 < C_UPPER C_FORE
    return (
        (_C_FORE * force[0] - mixed * force[1]) / determinant,
        (_C_UPPER * force[1] - mixed * force[0]) / determinant,
    )


def _relative(motion: _Motion) -> Float[Array, "2 2"]:
    """Sides by joints: the shoulder relative to the torso, the elbow to the upper arm."""
    return jnp.stack([motion.upper - motion.torso, motion.fore - motion.upper], axis=1)


def _direction(angle: Float[Array, "*shape"]) -> Float[Array, "*shape 2"]:
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def _state(data: _TwoArmsData) -> State:
    """The state whose rewards are those of the hands where they are."""
    angles, (x, y, slope) = data.angles, data.bar
    torso, bar = _direction(angles.torso)[None], _direction(slope)[None]
    hands = _SIGN[:, None] * _SHOULDER * torso
    hands = hands + _LINK_LENGTH * (_direction(angles.upper) + _direction(angles.fore))
    center = jnp.stack([x, y])
    handles = center[None] + _SIGN[:, None] * _HALF_BAR * bar
    distances = jnp.linalg.norm(hands - handles, axis=1)
    rewards = 1.0 / (1.0 + jnp.square(distances / _REWARD_SCALE))

    joints, velocities = _relative(angles), _relative(data.velocities)
    arms = [jnp.cos(joints), jnp.sin(joints), velocities, hands]
    arms = jnp.concatenate(arms, axis=1)
    obs: dict[str, Array] = dict(zip(_SIDES, arms, strict=True))
    obs["torso"] = jnp.stack([angles.torso, data.velocities.torso])
    obs["goal"] = jnp.concatenate([center, bar[0]])
    return State(
        obs=obs,
        reward=dict(zip(_SIDES, rewards, strict=True)),
        done=jnp.zeros((), jnp.bool_),
        info={},
        metrics={f"{side}_distance": d for side, d in zip(_SIDES, distances, strict=True)},
        data=data,
    )


def _draw(data: _TwoArmsData, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
    canvas = Canvas(height, width, center=(0.0, 0.3), extent=1.3)
    angles = jax.tree.map(np.asarray, data.angles)
    shoulders = [sign * _SHOULDER * _unit(angles.torso) for sign in _SIGN]
    canvas.rod(shoulders[0], shoulders[1], 0.08, "#555555")
    hands = []
    for side, shoulder in enumerate(shoulders):
        elbow = shoulder + _LINK_LENGTH * _unit(angles.upper[side])
        hands.append(elbow + _LINK_LENGTH * _unit(angles.fore[side]))
        canvas.rod(shoulder, elbow, 0.05, "#555555")
        canvas.rod(elbow, hands[-1], 0.04, "#555555")
    x, y, slope = np.asarray(data.bar)
    handles = [np.array([x, y]) + sign * _HALF_BAR * _unit(slope) for sign in _SIGN]
    canvas.rod(handles[0], handles[1], 0.015, "#bbbbbb")
    for hand, handle, color in zip(hands, handles, _COLORS, strict=True):
        canvas.disk(handle, 0.035, color)
        canvas.disk(hand, 0.022, "#222222")
        canvas.disk(hand, 0.016, color)
    return canvas.picture()


def _unit(angle: np.ndarray) -> np.ndarray:
    return np.array([np.cos(angle), np.sin(angle)])
