"""A batch of environments in one fixed layout: dtypes, shared leaves, records of any kind."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from eqx_ppo._tree import tree_where
from eqx_ppo.algorithms import unroll_env
from eqx_ppo.envs import (
    ActionRepeatWrapper,
    BatchedEnv,
    CachedReset,
    EpisodeWrapper,
    FreshReset,
    Pendulum,
    PooledReset,
    State,
    env_spec,
)
from tests.algorithms.common import assert_same, numbers
from tests.envs.registry import CASES
from tests.helpers.networks import DICT, CountingPolicy

every_env = pytest.mark.parametrize(("env", "action"), list(CASES.values()), ids=list(CASES))


def batched(env, action):
    return BatchedEnv(env, env_spec(env, lambda obs: action))


ACTION = jax.ShapeDtypeStruct((1,), jnp.float32)


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


# --- Every environment ----------------------------------------------------------------------


@every_env
def test_batch_equals_single_environments(env, action):
    envs = batched(env, action)
    state = jax.jit(envs.reset)(keys(3))
    singles = [env.reset(key) for key in keys(3)]
    actions = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf, -leaf]), action)
    step = jax.jit(envs.step)
    for _ in range(3):
        for left, right in zip(
            jax.tree.leaves(state),
            jax.tree.leaves(jax.tree.map(lambda *rows: jnp.stack(rows), *singles)),
            strict=True,
        ):
            assert left.dtype == right.dtype
            assert not left.weak_type
            np.testing.assert_allclose(numbers(left), numbers(right), rtol=1e-5, atol=1e-6)
        state = step(state, actions)
        singles = [
            env.step(single, jax.tree.map(lambda leaf, at=index: leaf[at], actions))
            for index, single in enumerate(singles)
        ]
    assert step._cache_size() == 1


@every_env
def test_layout_is_hashable(env, action):
    first, second = (env_spec(env, lambda obs: action) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    state = env.reset(jax.random.key(0))
    assert_same(first.unflatten(first.flatten(state)), state)


def test_act_sees_one_abstract_observation():
    seen = []

    def act(obs):
        seen.append(obs)
        return {"arm": jax.ShapeDtypeStruct((2,), jnp.float32), "leg": ACTION}

    env_spec(DICT, act)
    assert jax.tree.map(lambda leaf: leaf.shape, seen) == [{"goal": (2,), "proprio": (3,)}]


# --- Dtypes ---------------------------------------------------------------------------------


class Loose:
    """What users write: Python numbers in `reset`, other dtypes and weak types in `step`."""

    def reset(self, key):
        info = {"steps": 0, "truncation": 0}
        return State(jnp.zeros(2), 0, False, info, {"speed": 0}, jax.random.bits(key, (), "uint8"))

    def step(self, state, action):
        steps = state.info["steps"] + 1
        info = {"steps": steps, "truncation": jnp.where(steps > 2, 1.0, 0.0)}
        return State(
            state.obs + action[0],
            state.reward + 0.5,
            jnp.float32(0.0),
            info,
            {"speed": jnp.float32(0.25)},
            state.data,
        )


def test_dtypes_hold_reset_and_step():
    with jax.numpy_dtype_promotion("standard"):
        envs = batched(Loose(), ACTION)
        state = jax.jit(envs.reset)(keys(3))
        step = jax.jit(envs.step)
        assert state.reward.dtype == state.done.dtype == state.metrics["speed"].dtype == "float32"
        assert state.info["steps"].dtype == "int32"
        assert state.info["truncation"].dtype == "float32"
        assert state.data.dtype == "uint8"
        for time in range(1, 4):
            state = step(state, jnp.ones((3, 1)))
            np.testing.assert_array_equal(state.reward, [0.5 * time] * 3)
            np.testing.assert_array_equal(state.metrics["speed"], [0.25] * 3)
            np.testing.assert_array_equal(state.info["steps"], [time] * 3)
        assert step._cache_size() == 1
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
        assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state))


def test_rewards_are_not_truncated_in_a_rollout():
    with jax.numpy_dtype_promotion("standard"):
        state = jax.vmap(Loose().reset)(keys(2))
        _, last, transitions = unroll_env(
            Loose(), state, CountingPolicy(), jnp.zeros(2), 4, jax.random.key(0)
        )
    np.testing.assert_array_equal(transitions.rewards[:, 0], [0.5, 1.0, 1.5, 0.5])
    np.testing.assert_array_equal(transitions.truncated[:, 0], [False, False, True, False])
    assert last.reward.dtype == jnp.float32


class Chain:
    """A dtype that spreads by one field per step."""

    def reset(self, key):
        return State(jnp.zeros(1), 0.0, False, {}, {}, (jnp.int32(0),) * 6)

    def step(self, state, action):
        return state.replace(data=(jnp.float32(0.5), *state.data[:-1]))


def test_dtypes_that_spread_over_steps():
    with jax.numpy_dtype_promotion("standard"):
        envs = batched(Chain(), ACTION)
        state = envs.reset(keys(1))
        assert {leaf.dtype for leaf in state.data} == {jnp.dtype("float32")}
        for _ in range(6):
            state = envs.step(state, jnp.zeros((1, 1)))
    np.testing.assert_array_equal(jnp.stack(state.data), np.full((6, 1), 0.5))


# --- Reset and step disagree ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Disagreeing:
    reset_info: tuple[str, ...]
    step_info: tuple[str, ...]
    size: int = 2

    def reset(self, key):
        info = {name: jnp.zeros(()) for name in self.reset_info}
        return State(jnp.zeros(2), jnp.zeros(()), jnp.array(False), info, {})

    def step(self, state, action):
        info = {name: jnp.zeros(()) for name in self.step_info}
        return state.replace(obs=jnp.zeros(self.size), info=info)


def test_structure_mismatch_names_the_keys():
    env = Disagreeing(("command", "phase"), ("phase", "energy"))
    message = (
        r"lacks \[\"\.info\['command'\]\"\] and adds \[\"\.info\['energy'\]\"\].*"
        r"Put every key of `info` and `metrics` into `reset` too"
    )
    with pytest.raises(ValueError, match=message):
        batched(env, ACTION)
    state = jax.vmap(env.reset)(keys(2))
    with pytest.raises(ValueError, match="lacks"):
        unroll_env(env, state, CountingPolicy(), jnp.zeros(2), 2, jax.random.key(0))


def test_only_added_keys():
    with pytest.raises(ValueError, match=r"lacks nothing and adds \[\"\.info\['energy'\]\"\]"):
        batched(Disagreeing((), ("energy",)), ACTION)


def test_shape_mismatch_names_the_leaf():
    with pytest.raises(ValueError, match=r"`\.obs`.* shape \(2,\) after `reset` but \(3,\)"):
        batched(Disagreeing((), (), size=3), ACTION)


def test_states_of_another_layout():
    envs = batched(Disagreeing(("a",), ("a",)), ACTION)
    other = batched(Disagreeing(("b",), ("b",)), ACTION).reset(keys(2))
    with pytest.raises(ValueError, match=r"lacks \[\"\.info\['a'\]\"\] and adds"):
        envs.canonicalize(other)
    state = envs.reset(keys(2))
    wrong = state.replace(obs=jnp.zeros((2, 5)))
    message = r"`\.obs` has shape \(2, 5\)\. Expected \(2, 2\).* or \(2,\) \(shared"
    with pytest.raises(ValueError, match=message):
        envs.step(envs.canonicalize(wrong), jnp.zeros((2, 1)))


def test_canonicalize():
    """A state from `jax.vmap(env.reset)` gets the dtypes that it lacks."""
    with jax.numpy_dtype_promotion("standard"):
        envs = batched(Loose(), ACTION)
        raw = jax.vmap(Loose().reset)(keys(2))
        assert raw.reward.dtype == jnp.int32
        assert_same(envs.canonicalize(raw), envs.reset(keys(2)))


# --- Leaves without an env axis (case F1) ---------------------------------------------------

N_ENVS = 4


class SharedData(NamedTuple):
    model: Array  # [7], shared
    coincidence: Array  # [N_ENVS], shared
    steps: Array  # scalar
    rng: Array  # a typed key
    flag: Array  # a boolean
    nothing: None
    empty: Array  # (0,)


class Sharing:
    """Half of its state belongs to all environments together; every step changes that too."""

    def reset(self, key):
        start_key, rng = jax.random.split(key)
        data = SharedData(
            model=jnp.zeros(7, jnp.float32),
            coincidence=jnp.zeros(N_ENVS, jnp.float32),
            steps=jnp.zeros((), jnp.int32),
            rng=rng,
            flag=jnp.zeros((), jnp.bool_),
            nothing=None,
            empty=jnp.zeros((0,), jnp.float32),
        )
        obs = {"x": jax.random.uniform(start_key, (3,)), "empty": jnp.zeros((0,), jnp.float32)}
        return State(obs, jnp.zeros(()), jnp.array(False), {}, {}, data)

    def step(self, state, action):
        data = state.data
        data = data._replace(
            model=data.model + 1.0,
            coincidence=data.coincidence + 2.0,
            steps=data.steps + jnp.int32(1),
            rng=jax.random.fold_in(data.rng, 1),
            flag=~data.flag,
        )
        x = state.obs["x"] + 1.0
        done = x[0] > 2.5
        return State({"x": x, "empty": state.obs["empty"]}, x[0], done, {}, {}, data)


def shared_state():
    envs = batched(Sharing(), ACTION)
    state = envs.reset(keys(N_ENVS))
    model = jnp.arange(7, dtype=jnp.float32)
    coincidence = jnp.arange(N_ENVS, dtype=jnp.float32)
    return envs, state.replace(data=state.data._replace(model=model, coincidence=coincidence))


def test_which_leaves_have_an_env_axis():
    envs, state = shared_state()
    axes = dict(zip(envs.spec.paths, envs.axes(state, N_ENVS), strict=True))
    shared = [path for path, has_axis in axes.items() if not has_axis]
    assert shared == [".data.model", ".data.coincidence"]
    # The same states one env axis richer are told apart by their rank, not by their length.
    assert all(envs.axes(envs.reset(keys(N_ENVS)), N_ENVS))


@pytest.mark.parametrize("strategy", [FreshReset(), CachedReset(), PooledReset()], ids=str)
def test_shared_leaves_in_a_rollout(strategy):
    """They come from the stepped state whatever ends; the others are reset per environment."""
    _, state = shared_state()
    length = 6
    _, last, transitions = unroll_env(
        Sharing(),
        state,
        CountingPolicy(),
        jnp.zeros(N_ENVS),
        length,
        jax.random.key(1),
        reset_strategy=strategy,
    )
    ends = np.asarray(transitions.done)
    assert (ends.any(axis=1) & ~ends.all(axis=1)).any()
    np.testing.assert_array_equal(last.data.model, np.arange(7) + length)
    np.testing.assert_array_equal(last.data.coincidence, np.arange(N_ENVS) + 2 * length)
    steps = np.zeros(N_ENVS, int)
    for row in ends:
        steps = np.where(row, 0, steps + 1)
    np.testing.assert_array_equal(last.data.steps, steps)
    np.testing.assert_array_equal(last.data.flag, steps % 2 == 1)
    assert last.data.nothing is None
    assert last.data.empty.shape == (N_ENVS, 0)
    assert last.obs["empty"].shape == (N_ENVS, 0)
    assert last.data.rng.shape == (N_ENVS,)
    assert len(np.unique(numbers(last.data.rng), axis=0)) == N_ENVS
    # Within an episode `x` rises by one per step, and a new one starts in [0, 1).
    x = np.asarray(transitions.obs["x"][:, :, 0])
    np.testing.assert_allclose(x[1:][~ends[:-1]], (x[:-1] + 1)[~ends[:-1]], rtol=1e-6)
    assert (x[1:][ends[:-1]] < 1).all()


@pytest.mark.parametrize(
    ("writes", "culprit"),
    [(("model",), "model"), (("coincidence",), "coincidence"), (("coincidence", "model"), "model")],
    ids=str,
)
def test_shared_leaves_that_depend_on_an_environment_are_named(writes, culprit):
    class Wrong(Sharing):
        def step(self, state, action):
            changed = {name: getattr(state.data, name) + action[0] for name in writes}
            return state.replace(data=state.data._replace(**changed))

    envs = BatchedEnv(Wrong(), shared_state()[0].spec)
    message = (
        rf"`\.data\.{culprit}` of .* is shared by all environments.*but `step` makes it depend"
    )
    with pytest.raises(ValueError, match=message):
        envs.step(shared_state()[1], jnp.zeros((N_ENVS, 1)))


def test_other_errors_of_a_step_stay_what_they_are():
    class Wrong(Sharing):
        def step(self, state, action):
            raise ValueError("out of fuel")

    envs = BatchedEnv(Wrong(), shared_state()[0].spec)
    with pytest.raises(ValueError, match=r"^out of fuel\s"):
        envs.step(shared_state()[1], jnp.zeros((N_ENVS, 1)))


class FixedModel(Sharing):
    """The shared data stay as they are."""

    def step(self, state, action):
        stepped = super().step(state, action)
        fixed = {"model": state.data.model, "coincidence": state.data.coincidence}
        return stepped.replace(data=stepped.data._replace(**fixed))


def test_shared_leaves_stay_shared_while_actions_are_repeated():
    """Although the repeated step stops at a different time in each environment."""
    env = ActionRepeatWrapper(FixedModel(), 3)
    envs = batched(env, ACTION)
    _, state = shared_state()
    stepped = envs.step(state, jnp.zeros((N_ENVS, 1)))
    np.testing.assert_array_equal(stepped.data.model, state.data.model)
    np.testing.assert_array_equal(stepped.data.coincidence, state.data.coincidence)
    np.testing.assert_array_equal(stepped.data.steps, np.where(state.obs["x"][:, 0] > 0.5, 2, 3))
    assert set(stepped.data.steps.tolist()) == {2, 3}


# --- Raw keys -------------------------------------------------------------------------------


class KeyData(NamedTuple):
    raw: Array  # uint32[2]
    typed: Array
    left: Array  # steps until the end


class RawKeys:
    """Keeps its randomness as two words, and as a typed key next to them."""

    def reset(self, key):
        left = jax.random.randint(key, (), 2, 5, jnp.int32)
        data = KeyData(jax.random.key_data(key), key, left)
        return State(jnp.zeros(1), jnp.zeros(()), jnp.array(False), {}, {}, data)

    def step(self, state, action):
        raw, draw = jax.random.split(state.data.raw)
        typed, _ = jax.random.split(state.data.typed)
        left = state.data.left - 1
        obs = jax.random.normal(draw, (1,), jnp.float32)
        return State(obs, jnp.zeros(()), left == 0, {}, {}, KeyData(raw, typed, left))


@pytest.mark.parametrize("strategy", [FreshReset(), CachedReset(), PooledReset()], ids=str)
def test_the_words_of_a_raw_key_stay_together(strategy):
    """With as many environments as words, and through many resets."""
    state = jax.vmap(RawKeys().reset)(keys(2))
    rows = [state.data]
    for length in range(1, 7):
        _, last, _ = unroll_env(
            RawKeys(),
            state,
            CountingPolicy(),
            jnp.zeros(2),
            length,
            jax.random.key(length),
            reset_strategy=strategy,
        )
        rows.append(last.data)
    for data in rows:
        np.testing.assert_array_equal(data.raw, jax.random.key_data(data.typed))
    words = np.concatenate([data.raw for data in rows])
    assert len(np.unique(words, axis=0)) > 4


@every_env
def test_packing(env, action):
    """As tables and back; rows of the tables are the environments."""
    envs = batched(env, action)
    state = envs.reset(keys(3))
    packed = envs.pack(state, 3)
    assert all(table.shape[0] == 3 for table in packed.tables)
    assert len({table.dtype for table in packed.tables}) == len(packed.tables)
    assert_same(envs.unpack(packed), state)
    order = jnp.array([2, 0])
    rows = packed._replace(tables=[table[order] for table in packed.tables])
    assert_same(envs.unpack(rows), jax.tree.map(lambda leaf: leaf[order], state))


def test_packing_keeps_shared_leaves_aside():
    envs, state = shared_state()
    packed = envs.pack(state, N_ENVS)
    assert [leaf.shape for leaf in packed.shared if leaf is not None] == [(7,), (N_ENVS,)]
    assert_same(envs.unpack(packed), state)


def test_packing_like_others():
    """What is shared there stays aside; what has an env axis there must have one."""
    envs, state = shared_state()
    fresh = envs.reset(keys(N_ENVS))
    packed = envs.pack(state, N_ENVS)
    alike = envs.pack(fresh, N_ENVS, like=packed)
    assert [table.shape for table in alike.tables] == [table.shape for table in packed.tables]
    short = fresh.replace(data=fresh.data._replace(steps=jnp.zeros((), jnp.int32)))
    with pytest.raises(ValueError, match=r"`\.data\.steps` of a fresh state has shape \(\), but"):
        envs.pack(short, N_ENVS, like=packed)


def test_rows_are_chosen():
    envs, state = shared_state()
    fresh = envs.reset(keys(N_ENVS, seed=1))
    mask = jnp.array([True, False, False, True])
    packed = envs.pack(state, N_ENVS)
    chosen = envs.unpack(envs.pack(fresh, N_ENVS, like=packed).where(mask, packed))
    assert_same(chosen, tree_where(mask, fresh, state, single=envs.spec.leaves))


# --- What is no state, or resets itself -------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Returning:
    """Its `reset` and `step` return whatever it is told to."""

    state: object

    def reset(self, key):
        return self.state

    def step(self, state, action):
        return self.state


class WithoutMetrics(NamedTuple):
    obs: Array
    reward: Array
    done: Array
    info: dict


@pytest.mark.parametrize("state", [(0.0, {}), WithoutMetrics(0.0, 0.0, False, {}), None], ids=repr)
def test_something_that_is_no_state(state):
    name = type(state).__name__
    with pytest.raises(TypeError, match=rf"fields `obs`.*`metrics`, but returned a `{name}`"):
        batched(Returning(state), ACTION)


FIELDS = ("obs", "reward", "done", "info", "metrics", "data")


def self_resetting(*names):
    info = {name: jnp.zeros(2) for name in names}
    return Returning(State(jnp.zeros(2), jnp.zeros(()), jnp.array(False), info, {}))


@pytest.mark.parametrize(
    "names",
    [
        ("first_obs", "first_pipeline_state", "steps"),
        ("first_obs", "first_state"),
        ("AutoResetWrapper_first_data", "AutoResetWrapper_first_obs", "AutoResetWrapper_rng"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: EpisodeWrapper(env, 3)])
def test_an_environment_that_resets_itself_is_refused(names, wrap):
    message = rf"resets itself inside `step`: its `info` holds .*{names[0]}.*inside of that wrapper"
    with pytest.raises(ValueError, match=message):
        batched(wrap(self_resetting(*names)), ACTION)


def test_a_first_observation_alone_is_no_sign_of_it():
    batched(self_resetting("first_obs"), ACTION)


@pytest.mark.playground
def test_the_wrappers_of_others_that_reset():
    """What they really leave in `info`."""
    brax = pytest.importorskip("brax.envs.wrappers.training")
    playground = pytest.importorskip("mujoco_playground._src.wrapper")

    class BatchedPendulum:
        """`pipeline_state` and `data` are where each library expects the physics."""

        def reset(self, keys):
            state = jax.vmap(Pendulum().reset)(keys)
            return SimpleNamespace(
                pipeline_state=state.data, **{name: getattr(state, name) for name in FIELDS}
            )

    for wrapper in (brax.AutoResetWrapper, playground.BraxAutoResetWrapper):
        info = wrapper(BatchedPendulum()).reset(keys(2)).info
        with pytest.raises(ValueError, match="resets itself inside `step`"):
            batched(self_resetting(*info), ACTION)
