"""The environments in `tests.helpers.envs` do what other tests rely on."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.envs import DictEnv, ScriptedEnv


def test_dict_env():
    env = DictEnv(lengths=(2, 4))
    action = {"arm": jnp.array([0.5, -1.0]), "leg": jnp.array([2.0])}
    lengths = set()
    for seed in range(6):
        state = env.reset(jax.random.key(seed))
        body, goal = np.asarray(state.obs["proprio"]), np.asarray(state.obs["goal"])
        for step in range(1, 5):  # noqa: B007
            state = env.step(state, action)
            body = np.concatenate(
                [0.9 * body[:2] + 0.1 * np.tanh([0.5, -1.0]), 0.8 * body[2:] + 0.2 * np.tanh([2.0])]
            )
            np.testing.assert_allclose(state.obs["proprio"], body, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(state.obs["goal"], goal)
            arm, leg = -np.sum((body[:2] - goal) ** 2), -((body[2] - goal[0]) ** 2)
            np.testing.assert_allclose(state.reward["arm"], arm, rtol=1e-4)
            np.testing.assert_allclose(state.reward["leg"], leg, rtol=1e-4)
            if float(state.done):
                break
        lengths.add(step)
    assert lengths == {2, 4}


def test_scripted_env():
    done, truncated = (0, 1, 0, 0, 1), (1, 0, 0, 0, 1)
    env = ScriptedEnv(done, truncated, jnp.int32, "truncated")
    starts = set()
    for seed in range(12):
        state = env.reset(jax.random.key(seed))
        start = int(state.data.position)
        starts.add(start)
        for elapsed in range(7):
            position = (start + elapsed) % 5
            np.testing.assert_array_equal(state.obs, [elapsed, position])
            state = env.step(state, jnp.zeros(1))
            assert int(state.done) == done[position]
            assert int(state.info["truncated"]) == truncated[position]
            assert float(state.reward) == position
    assert len(starts) >= 4
    assert ScriptedEnv((0, 1)).reset(jax.random.key(0)).info == {}
