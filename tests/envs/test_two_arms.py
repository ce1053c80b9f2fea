import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.envs import EpisodeWrapper, TwoArms

STEP = jax.jit(TwoArms().step)
ZERO = {"left": jnp.zeros(2), "right": jnp.zeros(2)}


def fresh(seed=0):
    return jax.jit(TwoArms().reset)(jax.random.key(seed))


def at(joints, velocities, bar=(0.0, 0.35, 0.0)):
    """A state from joint coordinates: torso, shoulders and elbows of left and right."""
    state = fresh()
    motions = []
    for values in (joints, velocities):
        torso, left_shoulder, right_shoulder, left_elbow, right_elbow = values
        upper = np.array([torso + left_shoulder, torso + right_shoulder])
        fore = upper + np.array([left_elbow, right_elbow])
        motion = type(state.data.angles)(np.asarray(torso), upper, fore)
        motions.append(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), motion))
    data = type(state.data)(*motions, jnp.array(bar, jnp.float32))
    return state.replace(data=data)


def joints_of(motion):
    torso, upper, fore = (np.asarray(leaf, np.float64) for leaf in motion)
    return np.array([torso, *(upper - torso), *(fore - upper)])


# --- An oracle in joint coordinates, from Lagrange's equations by differences ---------------


def centers_and_hands(q):
    """Centers of mass of the four rods and the two hands, complex-safe."""
    torso, *rest = q
    centers, hands = [], []
    for sign, shoulder, elbow in ((-1.0, rest[0], rest[2]), (1.0, rest[1], rest[3])):
        upper = torso + shoulder
        fore = upper + elbow
        joint = sign * 0.2 * np.array([np.cos(torso), np.sin(torso)])
        along_upper = 0.3 * np.array([np.cos(upper), np.sin(upper)])
        along_fore = 0.3 * np.array([np.cos(fore), np.sin(fore)])
        centers += [joint + along_upper / 2, joint + along_upper + along_fore / 2]
        hands.append(joint + along_upper + along_fore)
    return np.array(centers), np.array(hands)


def mass_matrix(q):
    turns = np.array([[1, 1, 0, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 0], [1, 0, 1, 0, 1]], float)
    matrix = np.zeros((5, 5))
    matrix[0, 0] = 0.3
    jacobian = np.stack(
        [centers_and_hands(q + 1e-30j * unit)[0].imag / 1e-30 for unit in np.eye(5)], axis=-1
    )
    for body, turn in zip(jacobian, turns, strict=True):
        matrix += 1.0 * body.T @ body + 1.0 * 0.3**2 / 12 * np.outer(turn, turn)
    return matrix


def acceleration(q, velocity, torque):
    """`M a = Q - (dM/dt) v + grad(v' M v) / 2`."""
    slope = [
        (mass_matrix(q + 1e-5 * unit) - mass_matrix(q - 1e-5 * unit)) / 2e-5 for unit in np.eye(5)
    ]
    inertia_change = np.einsum("k,kij->ij", velocity, slope) @ velocity
    gradient = 0.5 * np.einsum("kij,i,j->k", slope, velocity, velocity)
    spring = np.array([10.0 * q[0], 0.0, 0.0, 0.0, 0.0])
    damping = np.array([1.0, 0.3, 0.3, 0.15, 0.15]) * velocity
    return np.linalg.solve(mass_matrix(q), torque - spring - damping - inertia_change + gradient)


def oracle(q, velocity, left, right):
    torque = np.array([0.0, 3.0 * left[0], 3.0 * right[0], 1.5 * left[1], 1.5 * right[1]])
    for _ in range(2):
        velocity = velocity + 0.02 * acceleration(q, velocity, torque)
        q = q + 0.02 * velocity
    return q, velocity


def test_against_the_oracle_from_random_states():
    rng = np.random.default_rng(0)
    for _ in range(20):
        q = rng.uniform(-2, 2, 5)
        velocity = rng.uniform(-4, 4, 5)
        left, right = rng.uniform(-1, 1, (2, 2))
        action = {"left": jnp.array(left, jnp.float32), "right": jnp.array(right, jnp.float32)}
        state = STEP(at(q, velocity), action)
        q, velocity = oracle(q, velocity, left, right)
        np.testing.assert_allclose(joints_of(state.data.angles), q, atol=2e-5)
        np.testing.assert_allclose(joints_of(state.data.velocities), velocity, atol=5e-4)


def test_observation_and_reward_of_a_pose():
    """Everything after the step by the formulas of the docstring, from the oracle's motion."""
    q, velocity = np.array([0.1, 1.2, 2.0, 0.5, -0.7]), np.array([0.3, -0.5, 0.2, 1.0, -1.0])
    bar = (0.05, 0.3, 0.4)
    state = STEP(at(q, velocity, bar), ZERO)
    q, velocity = oracle(q, velocity, [0, 0], [0, 0])
    _, hands = centers_and_hands(q)
    along = 0.15 * np.array([np.cos(0.4), np.sin(0.4)])
    handles = np.array([0.05, 0.3]) + np.array([-along, along])
    np.testing.assert_allclose(state.obs["torso"], [q[0], velocity[0]], atol=1e-5)
    np.testing.assert_allclose(state.obs["goal"], [0.05, 0.3, np.cos(0.4), np.sin(0.4)], rtol=1e-6)
    for index, side in enumerate(("left", "right")):
        angles, speeds = q[[1 + index, 3 + index]], velocity[[1 + index, 3 + index]]
        expected = np.concatenate([np.cos(angles), np.sin(angles), speeds, hands[index]])
        np.testing.assert_allclose(state.obs[side], expected, atol=1e-5)
        distance = np.linalg.norm(hands[index] - handles[index])
        np.testing.assert_allclose(state.metrics[f"{side}_distance"], distance, atol=1e-5)
        np.testing.assert_allclose(state.reward[side], 1 / (1 + (distance / 0.05) ** 2), rtol=1e-4)


def test_hand_computed_rewards():
    """At rest with bent elbows: hands at (-+0.2 +- 0.3, 0.3), handles 0.05 m further on."""
    at_rest = at([0.0, np.pi / 2, np.pi / 2, -np.pi / 2, np.pi / 2], np.zeros(5), (0.3, 0.3, 0.0))
    state = STEP(at_rest, ZERO)
    # The left hand is at (0.1, 0.3), its handle at (0.15, 0.3): 5 cm, half a reward.
    np.testing.assert_allclose(state.reward["left"], 0.5, rtol=1e-5)
    # The right hand is at (-0.1, 0.3), its handle at (0.45, 0.3): 55 cm, eleven times 5 cm.
    np.testing.assert_allclose(state.reward["right"], 1 / 122, rtol=1e-5)
    assert not bool(state.done)


def test_one_arm_moves_the_other():
    rest = at([0.0, 1.4, 1.7, 0.5, -0.5], np.zeros(5))
    pushed = STEP(rest, {"left": jnp.array([1.0, 0.0]), "right": jnp.zeros(2)})
    still = STEP(rest, ZERO)
    moved = np.linalg.norm(pushed.obs["right"][6:] - still.obs["right"][6:])
    assert moved > 1e-4  # m, within 0.04 s
    assert float(pushed.obs["torso"][0]) < 0.0  # it turns against the arm's push


def test_mirrored_actions_give_mirrored_motion():
    state = at([0.0, 1.4, np.pi - 1.4, 0.5, -0.5], np.zeros(5))
    for push in ([0.9, -0.4], [-0.3, 1.0], [0.5, 0.5]):
        action = {"left": jnp.array(push), "right": -jnp.array(push)}
        state = STEP(state, action)
        mirror = np.array([-1.0, 1.0])
        np.testing.assert_allclose(
            state.obs["left"][6:] * mirror, state.obs["right"][6:], atol=1e-6
        )
        np.testing.assert_allclose(state.obs["torso"], 0.0, atol=1e-6)
        np.testing.assert_allclose(state.reward["left"], state.reward["right"], rtol=1e-4)


def test_without_torque_the_energy_falls_to_nothing():
    def energy(state):
        q, velocity = joints_of(state.data.angles), joints_of(state.data.velocities)
        return 0.5 * velocity @ mass_matrix(q) @ velocity + 5.0 * q[0] ** 2

    state = at([0.2, 1.0, 2.0, 0.5, -1.0], [1.0, -3.0, 3.0, 5.0, -4.0])
    energies = [energy(state)]
    for _ in range(200):
        state = STEP(state, ZERO)
        energies.append(energy(state))
    assert np.all(np.diff(energies) < 1e-3)
    assert energies[-1] < 1e-3 * energies[0]


def test_actions_are_clipped_and_full_torque_stays_bounded():
    strong = {"left": jnp.array([9.0, -9.0]), "right": jnp.array([-9.0, 9.0])}
    full = jax.tree.map(lambda leaf: jnp.clip(leaf, -1.0, 1.0), strong)
    state = fresh()
    jax.tree.map(np.testing.assert_array_equal, STEP(state, strong), STEP(state, full))
    for time in range(500):
        sign = 1.0 if (time // 7) % 2 else -1.0
        state = STEP(state, jax.tree.map(lambda leaf, s=sign: s * leaf, full))
        assert np.abs(joints_of(state.data.velocities)).max() < 40.0


def test_starts_are_spread_and_the_bar_is_within_reach():
    state = jax.jit(jax.vmap(TwoArms().reset))(jax.random.split(jax.random.key(0), 2000))
    assert all(float(jnp.max(jnp.abs(reward))) == 0.0 for reward in state.reward.values())
    bars = np.asarray(state.data.bar)
    low, high = np.array([-0.1, 0.25, -0.5]), np.array([0.1, 0.45, 0.5])
    assert np.all((bars >= low - 1e-6) & (bars <= high + 1e-6))
    # Uniform: mean in the middle, five standard errors; variance width^2 / 12.
    assert np.all(np.abs(bars.mean(0) - (low + high) / 2) < 5 * (high - low) / np.sqrt(12 * 2000))
    np.testing.assert_allclose(bars.var(0), (high - low) ** 2 / 12, rtol=0.1)
    for index, sign in enumerate((-1.0, 1.0)):
        along = sign * 0.15 * np.stack([np.cos(bars[:, 2]), np.sin(bars[:, 2])], 1)
        reach = np.linalg.norm(bars[:, :2] + along - np.array([sign * 0.2, 0.0]), axis=1)
        assert reach.max() < 0.6
        joints = np.stack(
            [
                np.asarray(state.data.angles.upper)[:, index] - np.pi / 2,
                np.asarray(state.data.angles.fore - state.data.angles.upper)[:, index],
            ]
        )
        assert np.all(np.abs(joints) <= np.array([[0.5], [1.0]]) + 1e-6)
        assert np.all(np.abs(joints.mean(1)) < 5 * np.array([0.5, 1.0]) / np.sqrt(3 * 2000))


@pytest.mark.parametrize(
    "action",
    [
        jnp.zeros(4),
        {"left": jnp.zeros(2)},
        {"left": jnp.zeros(2), "right": jnp.zeros(3)},
        {"left": jnp.zeros(2), "right": jnp.zeros(2), "third": jnp.zeros(2)},
    ],
)
def test_actions_of_another_form_are_refused(action):
    with pytest.raises(ValueError, match="`left` \\[2\\] and `right` \\[2\\]"):
        TwoArms().step(fresh(), action)


def test_with_a_time_limit():
    state = EpisodeWrapper(TwoArms(), 1).reset(jax.random.key(0))
    assert bool(EpisodeWrapper(TwoArms(), 1).step(state, ZERO).info["truncation"])
