"""`check_env` finds what is wrong, says where, and leaves right environments alone."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import ContractError, check_env, envs
from eqx_ppo.envs import State
from eqx_ppo.envs._conformance._actions import action_sampler
from eqx_ppo.envs._conformance._advice import on_resets
from eqx_ppo.envs._conformance._changes import ChangeRecorder
from eqx_ppo.envs._conformance._rules import RULES
from eqx_ppo.envs._conformance._trial import Size, Trial
from tests.envs.registry import CASES
from tests.helpers import broken_envs as broken
from tests.helpers.broken_envs import BROKEN_ENVS, Noisy, Walk, changed, uniform, with_info

QUICK = ("pendulum", "recall", "observation_reward", "discount", "episode")
UNEVEN = ("scripted",)  # sets the flag without `done`, as a test wants it


def findings(env, **options):
    with pytest.raises(ContractError) as caught:
        check_env(env, **options)
    return caught.value.findings


def advice(env, **options):
    return {finding.rule: finding for finding in check_env(env, **options).advice}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in CASES
        if name not in UNEVEN
    ],
)
def test_no_right_environment_is_flagged(name):
    report = check_env(CASES[name][0])
    assert report.skipped == ()
    assert 0.0 < report.reset_cost < np.inf


# --- Right environments that look unusual -------------------------------------------------


class TupleState(NamedTuple):
    obs: object
    reward: object
    done: object
    info: object
    metrics: object
    data: object


class OfTuples(Walk):
    def state(self, position, time):
        return TupleState(**vars(super().state(position, time)))


class ModuleState(eqx.Module):
    obs: object
    reward: object
    done: object
    info: dict
    metrics: dict
    data: object
    limit: int = eqx.field(static=True, default=5)


class OfModules(Walk):
    def state(self, position, time):
        return ModuleState(**vars(super().state(position, time)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["obs", "reward", "done", "info", "metrics", "data"],
    meta_fields=[],
)
@dataclasses.dataclass
class PlainState:
    obs: object
    reward: object
    done: object
    info: dict
    metrics: dict
    data: object


class OfDataclasses(Walk):
    def state(self, position, time):
        return PlainState(**vars(super().state(position, time)))


class Structured(Walk):
    """Dictionaries of observations and rewards; actions of three kinds."""

    observation_size: ClassVar[dict[str, int]] = {"place": 1, "clock": 1}
    action_size: ClassVar[dict[str, int]] = {"push": 1, "gear": 4, "brake": 1}

    def step(self, state, action):
        force = action["push"] + action["gear"].astype(jnp.float32)
        after = super().step(_flat(state), jnp.where(action["brake"], jnp.float32(0), force))
        return self._structured(after)

    def reset(self, key):
        return self._structured(super().reset(key))

    def _structured(self, state):
        place, clock = jnp.split(state.obs, 2)
        reward = {"near": state.reward, "alive": jnp.ones((), jnp.float32)}
        return state.replace(obs={"place": place, "clock": clock}, reward=reward)


def _flat(state):
    obs = jnp.concatenate([state.obs["place"], state.obs["clock"]])
    return state.replace(obs=obs, reward=state.reward["near"])


class ByUntypedKey(Noisy):
    def keys(self, key):
        start, noise = jax.random.split(key)
        return start, jax.random.key_data(noise)


class ByCount(Noisy):
    """Its key stays, and every step draws by its count."""

    def step(self, state, action):
        key = state.info["noise_key"]
        draw = jax.random.fold_in(key, state.data.time)
        after = Walk.step(self, state, action + uniform(draw))
        return with_info(noise_key=lambda state: key)(after)


class PlainNumbers(Walk):
    """Python numbers and nothing where others have arrays."""

    def reset(self, key):
        return super().reset(key).replace(done=False, info={}, metrics={})

    def step(self, state, action):
        return super().step(state, action).replace(done=False, info={}, metrics={})


class LooksUp(Walk):
    """A table that is made when it is first needed, in NumPy."""

    @functools.cached_property
    def table(self):
        return np.linspace(0.0, 1.0, 16, dtype=np.float32)

    def step(self, state, action):
        index = jnp.clip(state.data.time, 0, 15)
        return super().step(state, action + jnp.asarray(self.table)[index])


class Compiled(Walk):
    """Compiles its own methods."""

    @functools.partial(jax.jit, static_argnums=0)
    def reset(self, key):
        return Walk.reset(self, key)

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, action):
        return Walk.step(self, state, action)


class Chaotic(Walk):
    """Amplifies every rounding error about a hundred thousand times."""

    def step(self, state, action):
        x = jnp.clip(jnp.abs(state.data.position + 0.01 * action[0]), 0.01, 0.99)
        for _ in range(20):
            x = jnp.float32(3.9) * x * (jnp.float32(1) - x)
        return self.state(x, state.data.time + jnp.int32(1))


class ComesHome(Walk):
    """Leaves home, fetches something, and is done when it is back."""

    def reset(self, key):
        return self._at(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool_))

    def step(self, state, action):
        place, carries = state.data
        place = place + jnp.where(carries, -1, 1).astype(jnp.int32)
        return self._at(place, carries | (place >= 2))

    def _at(self, place, carries):
        obs = jnp.stack([place, carries.astype(jnp.int32)])
        home = carries & (place == 0)
        return State(obs, home.astype(jnp.float32), home, {}, {}, (place, carries))


class WalksHome(Noisy):
    """A random walk that begins at home, and is done when it is back."""

    def reset(self, key):
        start = self._at(jnp.zeros((), jnp.int32), self.keys(key)[1])
        return start.replace(done=jnp.zeros((), jnp.bool_))

    def step(self, state, action):
        key, draw = jax.random.split(state.data)
        move = jnp.where(uniform(draw) < 0.5, -1, 1).astype(jnp.int32)
        return self._at(state.obs[0] + move, key)

    def _at(self, place, key):
        obs = jnp.stack([place, jnp.abs(place)])
        return State(obs, place.astype(jnp.float32), place == 0, {}, {}, key)


class InCircles(Walk):
    """Ends when a phase has gone once around; the position goes on."""

    def reset(self, key):
        return super().reset(key).replace(data=jnp.zeros((), jnp.int32))

    def step(self, state, action):
        phase = (state.data + jnp.int32(1)) % 5
        obs = state.obs + jnp.float32(1)
        return state.replace(obs=obs, reward=action[0], done=phase == 0, data=phase)


class InParts(Walk):
    """Observes a tuple, and says the size of each part."""

    observation_size: ClassVar[tuple[int, int]] = (1, 3)

    def state(self, position, time):
        whole = super().state(position, time)
        return whole.replace(obs=(position[None], jnp.full(3, time.astype(jnp.float32))))


class PassesOn(Walk):
    """Never ends, so that it leaves `done` alone."""

    def step(self, state, action):
        after = super().step(state, action)
        return state.replace(obs=after.obs, reward=after.reward, data=after.data)


def sentinel(state):
    """Distances that are infinite where nothing is seen."""
    seen = jnp.array([jnp.inf, jnp.inf, 1.0], jnp.float32)
    return with_info(ranges=lambda state: seen)(state)


def shared(state):
    return with_info(table=lambda state: jnp.arange(8, dtype=jnp.float32), nothing=lambda s: None)(
        state
    )


UNUSUAL = {
    "tuples": (OfTuples, {}),
    "modules": (OfModules, {}),
    "dataclasses": (OfDataclasses, {}),
    "untyped key": (ByUntypedKey, {}),
    "typed key": (Noisy, {}),
    "key and count": (ByCount, {}),
    "plain numbers": (PlainNumbers, {}),
    "lazy table": (LooksUp, {}),
    "compiled methods": (Compiled, {}),
    "chaotic": (Chaotic, {}),
    "comes home": (ComesHome, {"sample_action": jnp.zeros(1, jnp.float32)}),
    "in circles": (InCircles, {}),
    "walks home": (WalksHome, {}),
    "in parts": (InParts, {}),
    "passes done on": (PassesOn, {}),
    "passes done on to a wrapper": (lambda: envs.ActionRepeatWrapper(PassesOn(), 2), {}),
    "passes done on, cut off": (
        lambda: envs.EpisodeWrapper(envs.ActionRepeatWrapper(PassesOn(), 2), 3),
        {},
    ),
    "infinite sentinels": (changed(both=sentinel), {}),
    "shared leaves": (changed(both=shared), {}),
    "integer done": (
        changed(both=lambda state: state.replace(done=state.done.astype(jnp.int32))),
        {},
    ),
    "half precision": (
        changed(both=lambda state: state.replace(obs=state.obs.astype(jnp.bfloat16))),
        {},
    ),
    "empty leaf": (
        changed(both=with_info(contacts=lambda state: jnp.zeros((0, 3), jnp.float32))),
        {},
    ),
    "integer reward": (
        changed(both=lambda state: state.replace(reward=jnp.sign(state.reward).astype(jnp.int32))),
        {},
    ),
    "one start": (lambda: Walk(length=1), {}),
    "actions of three kinds": (
        Structured,
        {
            "sample_action": {
                "push": jnp.zeros(1, jnp.float32),
                "gear": jnp.array([3], jnp.int32),
                "brake": jnp.zeros(1, jnp.bool_),
            }
        },
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_environment_is_not_flagged(name):
    build, options = UNUSUAL[name]
    check_env(build(), **options)


# --- Broken environments ------------------------------------------------------------------


@pytest.mark.parametrize("name", BROKEN_ENVS)
def test_a_broken_environment_is_caught_by_the_right_rule(name):
    case = BROKEN_ENVS[name]
    (found,) = findings(case.build())
    assert (found.rule, found.path) == (case.rule, "env")
    assert re.search(case.says, str(found))


def test_every_rule_has_an_environment_that_breaks_it():
    assert {case.rule for case in BROKEN_ENVS.values()} == set(RULES)
    assert len(BROKEN_ENVS) >= 15


@pytest.mark.parametrize("name", ["metric_lost", "sums_rewards", "divided", "branches_on_done"])
def test_the_culprit_is_found_inside_wrappers(name):
    inner = BROKEN_ENVS[name].build()
    env = envs.EpisodeWrapper(envs.RewardScalingWrapper(inner, 0.5), 7)
    (found,) = findings(env)
    assert (found.rule, found.path) == (BROKEN_ENVS[name].rule, "env.env.env")


def test_a_wrapper_does_not_hide_that_an_environment_resets_itself():
    env = envs.FrameStackWrapper(envs.EpisodeWrapper(broken.CountsAnew(), 100), 2)
    (found,) = findings(env, n_steps=20)
    assert (found.rule, found.path) == ("own resets", "env.env.env")
    assert "own resets" in advice(env, n_steps=20, allow=("own resets",))


def test_what_a_wrapper_gives_to_an_environment_is_no_fault():
    class Commands(envs.Wrapper):
        def reset(self, key):
            return with_info(command=lambda state: state.reward)(self.env.reset(key))

        def step(self, state, action):
            after = self.env.step(state, action)
            return with_info(command=lambda state: state.reward)(after)

    check_env(Commands(broken.WantsCommand()), n_steps=10)


def test_a_fault_of_the_wrapper_itself_is_told_of_the_wrapper():
    class Doubles(envs.Wrapper):
        def reset(self, key):
            return self.env.reset(key)

        def step(self, state, action):
            return self.env.step(state, action).replace(reward=2.0 * state.reward)

    (found,) = findings(envs.EpisodeWrapper(Doubles(Walk()), 7))
    assert (found.rule, found.path) == ("reward and done", "env.env")


def test_two_mistakes_are_both_named():
    class Both(broken.SumsRewards):
        observation_size: ClassVar[int] = 7

    found = findings(Both())
    assert [(one.rule, one.leaf) for one in found] == [
        ("sizes", "observation_size"),
        ("reward and done", "next_state.reward"),
    ]


def test_the_report_lists_everything_in_prose():
    with pytest.raises(ContractError) as caught:
        check_env(
            changed(both=lambda s: s.replace(done=s.done[None], reward=s.reward[None]))(),
        )
    lines = str(caught.value).split("\n")
    assert lines[0] == "`Changed` breaks 2 rules of its contract:"
    assert lines[1].startswith("1. [scalars] env, state.done: must be a scalar, of any dtype")
    assert lines[2].startswith("2. [scalars] env, state.reward: must be a scalar, but is float32")


def test_the_same_key_gives_the_same_test():
    def blow_ups(seed):
        return findings(changed(both=seldom)(), key=jax.random.key(seed))

    def seldom(state):
        bad = state.data.position < jnp.float32(-0.05)
        return state.replace(reward=jnp.where(bad, jnp.nan, state.reward))

    first = blow_ups(3)
    assert blow_ups(3) == first
    assert blow_ups(4) != first


# --- What is allowed, and advice ----------------------------------------------------------


def test_what_is_allowed_becomes_advice():
    env = broken.WritesInfo()
    found = advice(env, allow=("in place",))
    assert found["in place"].leaf == "state.info['energy']"
    two = changed(both=broken._divided)()
    two.observation_size = 7
    assert [one.rule for one in findings(two, allow=("sizes",))] == ["finite"]


def test_a_rule_that_does_not_exist_cannot_be_allowed():
    with pytest.raises(ValueError, match=r"no rule `purety`.*`purity`"):
        check_env(Walk(), allow=("purety",))


def test_dtypes_that_can_be_joined_are_advice():
    env = changed(after_reset=lambda state: state.replace(reward=jnp.int32(0), done=False))()
    with jax.numpy_dtype_promotion("standard"):
        found = advice(env)["dtypes"]
    assert found.leaf == "next_state.reward"
    assert found.message.startswith("is float32[] after `step` and int32[] after `reset`. The")
    with jax.numpy_dtype_promotion("strict"):  # where the library could not join them
        (error,) = findings(env)
    assert (error.rule, error.leaf) == ("dtypes", "next_state.reward")


def test_a_weak_type_is_advice():
    found = advice(changed(after_reset=lambda state: state.replace(reward=0.0))())
    assert "float32[] (weakly typed) after `reset`" in found["dtypes"].message


def test_integers_that_half_precision_would_lose_are_no_advice():
    env = changed(
        after_reset=with_info(count=lambda state: jnp.int32(0)),
        after_step=with_info(count=lambda state: jnp.float16(0)),
    )()
    with jax.numpy_dtype_promotion("standard"):
        (found,) = findings(env)
    assert found.rule == "dtypes"
    assert "joined, float16 loses numbers" in found.message


def test_rounding_that_does_not_repeat_is_advice():
    class Rounds(Walk):
        def step(self, state, action):
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            noise = jax.pure_callback(tiny, shape, vmap_method="broadcast_all")
            return super().step(state, action + noise[None])

    calls = itertools.count()

    def tiny(*args):
        return np.float32(2e-6 * (next(calls) % 8))  # never twice the same in a row

    assert advice(Rounds())["rounding"].leaf == "next_state.obs"


def test_metrics_in_place_are_advice():
    class WritesMetrics(Walk):
        def step(self, state, action):
            state.metrics["position"] = state.data.position
            return super().step(state, action).replace(metrics=state.metrics)

    assert advice(WritesMetrics())["metrics in place"].leaf == "state.metrics['position']"


def test_a_start_that_is_always_the_same_is_advice():
    class AtRest(Walk):
        def reset(self, key):
            return self.state(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    assert "starts" in advice(AtRest())
    assert "starts" not in advice(Walk())


def test_a_key_that_stays_is_advice():
    class Stays(Noisy):
        def step(self, state, action):
            key = state.info["noise_key"]
            _, draw = jax.random.split(key)
            after = Walk.step(self, state, action + uniform(draw))
            return with_info(noise_key=lambda state: key)(self.without_count(after))

        def without_count(self, state):
            return state.replace(data=state.data._replace(time=jnp.zeros((), jnp.int32)))

        def reset(self, key):
            return super().reset(key)

    assert advice(Stays())["still keys"].leaf == "state.info['noise_key']"
    assert "still keys" not in advice(ByCount())


def test_an_environment_without_end_is_advised():
    assert "time limit" in advice(envs.TruncationProbe())
    assert "time limit" not in advice(envs.EpisodeWrapper(envs.TruncationProbe(), 1000))
    assert "time limit" not in advice(Walk())


def test_an_end_at_the_start_is_advice_where_nothing_leaps():
    found = advice(InCircles())["own resets"]
    assert found.leaf == "next_state.data"
    assert "does not leap" in found.message
    assert advice(WalksHome())["own resets"].leaf == "next_state.obs"
    assert "own resets" not in advice(Walk())


def test_what_a_dear_reset_means():
    assert on_resets(1.0) == []
    (found,) = on_resets(120.4)
    assert "as long as 120 steps" in found.message
    assert "every step at which one begins 121 times as slow" in found.message


def test_the_report_of_a_right_environment():
    report = check_env(envs.TruncationProbe())
    lines = str(report).split("\n")
    assert re.fullmatch(r"no rule is broken; a reset costs about as much as [\d.]+ steps", lines[0])
    assert lines[1].startswith("advice: [starts] env, state: every reset returns the same state")
    assert len(lines) == 1 + len(report.advice)


def test_what_would_take_minutes_is_skipped_and_said():
    class Long(Walk):
        def step(self, state, action):
            for _ in range(1600):
                action = action * jnp.float32(0.999)
            return super().step(state, action)

    report = check_env(envs.EpisodeWrapper(Long(), 9))
    assert report.skipped == ("jit", "own resets inside of wrappers")
    assert "not tested, because it would take minutes: jit, own resets inside" in str(report)


# --- Actions and options ------------------------------------------------------------------


def drawn(env, sample_action=None, n=2000):
    sampler = action_sampler(env, sample_action)
    return sampler(jax.random.split(jax.random.key(0), n))


def test_actions_by_their_size():
    actions = drawn(envs.TwoArms())
    assert actions["left"].shape == actions["right"].shape == (2000, 2)
    assert actions["left"].dtype == jnp.float32
    values = np.asarray(actions["left"])
    assert -1.0 <= values.min() < -0.99 < 0.99 < values.max() <= 1.0
    assert np.any(values != np.asarray(actions["right"]))
    walk = Walk()
    walk.action_size = (2, 3)
    assert drawn(walk).shape == (2000, 2, 3)


def test_actions_like_a_sample():
    sample = {
        "push": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        "gear": jnp.array(4, jnp.int32),
        "brake": jnp.zeros((), jnp.bool_),
    }
    actions = drawn(Walk(), sample)
    assert (actions["push"].shape, actions["push"].dtype) == ((2000, 3), jnp.bfloat16)
    assert set(np.asarray(actions["gear"]).tolist()) == set(range(5))
    assert set(np.asarray(actions["brake"]).tolist()) == {False, True}


def test_actions_by_their_description():
    walk = Walk()
    walk.actions = {
        "box": envs.ContinuousActions((-2.0, 0.0, -np.inf), (2.0, np.inf, np.inf)),
        "choice": envs.DiscreteActions(3),
        "choices": envs.MultiDiscreteActions((2, 4)),
    }
    actions = drawn(walk)
    box = np.asarray(actions["box"])
    np.testing.assert_allclose(box.min(axis=0), [-2.0, 0.0, -1.0], atol=0.01)
    np.testing.assert_allclose(box.max(axis=0), [2.0, 2.0, 1.0], atol=0.01)
    assert set(np.asarray(actions["choice"]).tolist()) == {0, 1, 2}
    assert np.asarray(actions["choices"]).max(axis=0).tolist() == [1, 3]


def test_actions_of_ones_own():
    actions = drawn(Walk(), lambda key: jax.random.normal(key, (1,), jnp.float32))
    np.testing.assert_allclose(np.std(actions), 1.0, atol=0.05)


def test_an_environment_must_say_what_its_actions_are():
    class Silent(Walk):
        action_size: ClassVar[None] = None

    with pytest.raises(ValueError, match=r"an action of `Silent` is.*`action_size`.*sample_action"):
        check_env(Silent())
    check_env(Silent(), sample_action=jnp.zeros(1, jnp.float32))


@pytest.mark.parametrize("size", [{"n_envs": 1}, {"n_steps": 2}])
def test_a_test_that_is_too_small_is_refused(size):
    with pytest.raises(ValueError, match="at least 2 environments and 3 steps"):
        check_env(Walk(), **size)


def test_an_object_that_is_no_environment_is_refused():
    with pytest.raises(Exception, match="env"):
        check_env(3)


def test_an_environment_on_the_host_is_refused():
    pytest.importorskip("gymnasium")
    env = envs.load_gymnasium("CartPole-v1", 2)
    with pytest.raises(TypeError, match="`GymnasiumEnv` keeps its state on the host"):
        check_env(env)


def test_the_documentation_lists_every_rule():
    page = Path(__file__).parents[2] / "docs" / "checks.md"
    (section,) = re.findall(
        r"^### The rules of an environment\n(.*?)^#", page.read_text(), re.MULTILINE | re.DOTALL
    )
    assert re.findall(r"^\| `([a-zA-Z ]+)` \|", section, re.MULTILINE) == list(RULES)


# --- Episodes, by hand --------------------------------------------------------------------


def test_a_leap_is_a_change_beyond_the_usual_ones():
    """Two environments; the first leaf counts and is back at 0, the second walks evenly."""
    time = np.array([[0, 1, 2, 0], [0, 1, 2, 0]])
    place = np.array([[[0.0], [0.5], [0.25], [0.5]], [[1.0], [0.5], [1.0], [0.75]]])
    recorder = ChangeRecorder([time[:, 0], place[:, 0]])
    for step in range(3):
        before, after = ([time[:, at], place[:, at]] for at in (step, step + 1))
        recorder.add(before, after, np.full(2, step == 2))
    found = recorder.changes()
    np.testing.assert_array_equal(found.leaf, [0, 1])
    np.testing.assert_array_equal(found.usual, [[1.0, -0.5], [1.0, 0.5]])
    np.testing.assert_array_equal(found.at_end, [[-2.0, 0.25], [-2.0, -0.25]])
    assert found.jump(np.array([True, False]))
    assert found.jump(np.array([True, True]))
    assert not found.jump(np.array([False, True]))
    assert not found.jump(np.array([False, False]))
    assert not found._replace(at_end=found.at_end[:0]).jump(np.array([True, True]))


def test_episodes_go_on_from_their_first_states():
    """A walk of five steps, seen twelve times: ends at 5 and 10; `time` is the oracle."""
    trial = Trial(Walk(), action_sampler(Walk(), None), jax.random.key(0), Size(3, 12))
    found = trial.episodes
    expected = np.isin(np.arange(1, 13), (5, 10))[:, None] & np.ones((1, 3), bool)
    np.testing.assert_array_equal(found.done, expected)
    np.testing.assert_array_equal(found.ended, expected)
    time = trial.spec.paths.index(".data.time")
    assert not np.any(found.at_start[:, :, time])  # after a step it is never at 0
    constant = trial.spec.paths.index(".info['truncation']")
    assert np.all(found.at_start[:, :, constant])
    assert found.blow_up is None
