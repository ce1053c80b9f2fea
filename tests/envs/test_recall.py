import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.envs import Recall


def with_cue(env, cue):
    for seed in range(100):
        state = env.reset(jax.random.key(seed))
        if float(state.obs[0]) == cue:
            return state
    raise AssertionError("no such cue")


def episode(env, state, policy):
    """The return of one episode and what the policy saw."""
    total, seen = 0.0, []
    step = jax.jit(env.step)
    for time in range(env.delay + 2):
        assert not bool(state.done)
        seen.append(tuple(np.asarray(state.obs).tolist()))
        state = step(state, jnp.array([policy(time, seen)], jnp.float32))
        total += float(state.reward)
    assert bool(state.done)
    return total, seen


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("cue", [-1.0, 1.0])
def test_an_episode(delay, cue):
    env = Recall(delay=delay)
    state = with_cue(env, cue)
    total, seen = episode(env, state, lambda time, seen: seen[0][0])
    assert seen == [(cue, 0.0)] + [(0.0, 0.0)] * delay + [(0.0, 1.0)]
    assert total == Recall.MAX_RETURN == 1.0


@pytest.mark.parametrize("answer", [0.3, -0.7, 1.0, 5.0])
def test_only_the_answer_on_go_is_rewarded_and_it_is_clipped(answer):
    env = Recall(delay=2)
    for cue in (-1.0, 1.0):
        state = with_cue(env, cue)
        noisy, _ = episode(env, state, lambda time, _: answer if time == 3 else 0.9)
        np.testing.assert_allclose(noisy, cue * np.clip(answer, -1, 1), rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_without_memory_the_expected_return_is_exactly_zero(seed):
    """For every function of the observation: the two cues cancel."""
    env = Recall(delay=1)
    weight, bias = np.random.default_rng(seed).normal(size=2)

    def memoryless(time, seen):
        shown, go = seen[-1]
        return np.tanh(weight * shown + bias * go)

    returns = [episode(env, with_cue(env, cue), memoryless)[0] for cue in (-1.0, 1.0)]
    assert returns[0] != 0.0
    assert sum(returns) == 0.0


def test_cues_are_balanced_and_independent_of_the_delay():
    keys = jax.random.split(jax.random.key(0), 4000)
    cues = np.asarray(jax.jit(jax.vmap(Recall().reset))(keys).obs[:, 0])
    assert set(cues.tolist()) == {-1.0, 1.0}
    assert abs(cues.mean()) < 5 / np.sqrt(4000)


def test_past_the_end_nothing_is_rewarded():
    env = Recall(delay=0)
    state = env.reset(jax.random.key(0))
    for _ in range(2):
        state = env.step(state, jnp.ones(1))
    for _ in range(3):
        state = env.step(state, jnp.ones(1))
        assert (bool(state.done), float(state.reward)) == (True, 0.0)
        np.testing.assert_array_equal(state.obs, [0.0, 0.0])


def test_delay_is_checked():
    for wrong in (-1, 2**31):
        with pytest.raises(ValueError, match=rf"`delay`.*{wrong}"):
            Recall(wrong)
    for wrong in (1.0, True, None):
        with pytest.raises(TypeError, match="`delay` must be a Python integer"):
            Recall(wrong)
