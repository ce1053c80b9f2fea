"""Pictures of the small environments show what the states say."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.envs import (
    ActionRepeatWrapper,
    EpisodeWrapper,
    Pendulum,
    Recall,
    RewardScalingWrapper,
    SupportsRender,
    TwoArms,
    find_renderer,
)

pytest.importorskip("PIL")


def colored(picture, color):
    """Where a picture shows a color, as the mean row and column."""
    near = np.all(np.abs(picture.astype(int) - np.array(color)) < 20, axis=-1)
    assert near.any()
    return np.argwhere(near).mean(axis=0)


@pytest.mark.parametrize(
    ("theta", "direction"),
    [(0.0, (-1, 0)), (np.pi, (1, 0)), (np.pi / 2, (0, -1)), (-np.pi / 2, (0, 1))],
)
def test_the_pendulum_points_where_it_is(theta, direction):
    """Up, down, left and right (rows count downwards)."""
    state = Pendulum().reset(jax.random.key(0))
    state = state.replace(data=state.data._replace(theta=jnp.float32(theta)))
    (picture,) = Pendulum().render([state], height=100, width=120)
    assert picture.shape == (100, 120, 3)
    assert picture.dtype == np.uint8
    np.testing.assert_array_equal(picture[0, 0], 255)
    rod = colored(picture, (204, 77, 77)) - np.array([49.5, 59.5])
    half = 0.5 * 100 / 2.6  # of the rod, in pixels
    np.testing.assert_allclose(rod, half * np.array(direction), atol=3.0)


def test_hands_are_where_the_observation_has_them():
    env = TwoArms()
    state = env.reset(jax.random.key(3))
    bar = jnp.array([0.05, 0.4, 0.3], jnp.float32)
    state = state.replace(data=state.data._replace(bar=bar))
    (picture,) = env.render([state], height=400, width=400)
    center, scale = np.array([0.0, 0.3]), 400 / 1.3
    for sign, color in ((-1, (31, 119, 180)), (1, (214, 39, 40))):
        handle = np.array([0.05, 0.4]) + sign * 0.15 * np.array([np.cos(0.3), np.sin(0.3)])
        column, row = scale * (handle - center) * np.array([1, -1]) + 200
        np.testing.assert_allclose(picture[round(row), round(column)], color, atol=20)
    for side, color in (("left", (31, 119, 180)), ("right", (214, 39, 40))):
        hand = np.asarray(state.obs[side][-2:])
        column, row = scale * (hand - center) * np.array([1, -1]) + 200
        np.testing.assert_allclose(picture[round(row), round(column)], color, atol=20)


def test_a_trajectory_gives_a_picture_each():
    states = [TwoArms().reset(jax.random.key(seed)) for seed in range(3)]
    pictures = TwoArms().render(states, 32, 48)
    assert [picture.shape for picture in pictures] == [(32, 48, 3)] * 3
    assert not np.array_equal(pictures[0], pictures[1])


def test_wrappers_leave_the_drawing_to_the_environment():
    env = Pendulum()
    wrapped = RewardScalingWrapper(EpisodeWrapper(ActionRepeatWrapper(env, 3), 5), 0.1)
    assert find_renderer(wrapped) == (env, pytest.approx(0.15))
    assert find_renderer(env) == (env, 0.05)
    assert find_renderer(TwoArms())[1] == pytest.approx(0.04)
    assert isinstance(env, SupportsRender)


@dataclasses.dataclass(frozen=True, eq=False)
class Pictured:
    """Draws, but does not say how long a step takes."""

    def render(self, trajectory, height=240, width=320, camera=None):
        return []


@pytest.mark.parametrize("env", [EpisodeWrapper(Recall(), 9), Pictured()])
def test_environments_that_cannot_be_drawn(env):
    with pytest.raises(TypeError, match=r"`(Recall|Pictured)` cannot be drawn"):
        find_renderer(env)


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "eqx-ppo\[video\]"'):
        Pendulum().render([Pendulum().reset(jax.random.key(0))])
