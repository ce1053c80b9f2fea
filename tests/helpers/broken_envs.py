"""Environments that break the convention, each in one way, and the rule that says so.

They are what a user may write by mistake. `BROKEN_ENVS` maps a name to the environment, the
rule that must be named, and a pattern for the rest of the report.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo.envs import State

KEPT = []


class BrokenEnv(NamedTuple):
    """What is wrong with an environment, as the report must say it."""

    build: Callable[[], object]
    rule: str
    says: str


# --- A right environment ------------------------------------------------------------------


class WalkData(NamedTuple):
    position: jax.Array
    time: jax.Array


@dataclasses.dataclass(eq=False)
class Walk:
    """The action moves a position; an episode terminates after `length` steps.

    Everything below is made from it, and cheap to compile.
    """

    length: int = 5

    observation_size: ClassVar[int] = 2
    action_size: ClassVar[int] = 1

    def reset(self, key):
        return self.state(uniform(key), jnp.zeros((), jnp.int32))

    def step(self, state, action):
        position = 0.9 * state.data.position + 0.1 * action[0]
        return self.state(position, state.data.time + jnp.int32(1))

    def state(self, position, time):
        return State(
            obs=jnp.stack([position, time.astype(jnp.float32)]),
            reward=-jnp.abs(position),
            done=time >= self.length,
            info={"truncation": jnp.zeros((), jnp.bool_)},
            metrics={"position": position},
            data=WalkData(position, time),
        )


def uniform(key):
    """A number in [0, 1) from a key, for less than `jax.random.uniform` takes to compile."""
    return jax.random.key_data(key)[-1].astype(jnp.float32) / jnp.float32(2**32)


@dataclasses.dataclass(eq=False)
class Changed(Walk):
    """A walk whose states are changed after the fact."""

    after_reset: Callable = lambda state: state
    after_step: Callable = lambda state: state

    def reset(self, key):
        return self.after_reset(super().reset(key))

    def step(self, state, action):
        return self.after_step(super().step(state, action))


def changed(after_reset=None, after_step=None, both=None):
    def unchanged(state):
        return state

    return lambda: Changed(
        after_reset=after_reset or both or unchanged, after_step=after_step or both or unchanged
    )


def with_info(**entries):
    """Adds entries to `info`, each a function of the state."""

    def add(state):
        added = {name: entry(state) for name, entry in entries.items()}
        return state.replace(info={**state.info, **added})

    return add


# --- What the functions take and return ---------------------------------------------------


class TakesManyKeys(Walk):
    def reset(self, key):
        return jax.vmap(super().reset)(key)


class MakesMany(Walk):
    def reset(self, key):
        return jax.vmap(super().reset)(jax.random.split(key, 4))

    def step(self, state, action):
        return jax.vmap(super().step)(state, action)


class TakesUntypedKeys(Walk):
    def reset(self, key):
        return super().reset(jax.random.wrap_key_data(key))


class TakesParameters(Walk):
    def reset(self, key, params):
        return super().reset(key)


class WithoutMetrics(NamedTuple):
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict


class LacksMetrics(Walk):
    def state(self, position, time):
        whole = super().state(position, time)
        return WithoutMetrics(whole.obs, whole.reward, whole.done, whole.info)


class ReturnsDict(Walk):
    def reset(self, key):
        return vars(super().reset(key))


@dataclasses.dataclass
class Unregistered:
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


class ReturnsUnregistered(Walk):
    def reset(self, key):
        whole = super().reset(key)
        return Unregistered(whole.obs, whole.reward, whole.done, whole.info, whole.metrics)


class WantsTwoActions(Walk):
    action_size: ClassVar[int] = 2

    def step(self, state, action):
        return super().step(state, action @ jnp.ones((1, 1), jnp.float32))


class WantsCommand(Walk):
    def step(self, state, action):
        return super().step(state, action + state.info["command"])


class WritesInfo(Walk):
    def reset(self, key):
        return with_info(energy=lambda state: jnp.zeros((), jnp.float32))(super().reset(key))

    def step(self, state, action):
        state.info["energy"] = state.info["energy"] + jnp.square(action[0])
        return super().step(state, action).replace(info=state.info)


class Phase(NamedTuple):
    position: jax.Array
    time: jax.Array


jax.tree_util.register_pytree_node(
    Phase, lambda phase: ((phase.position,), phase.time), lambda time, kids: Phase(*kids, time)
)


class CountsInPython(Walk):
    """Its step count is part of the structure."""

    def reset(self, key):
        return super().reset(key).replace(data=Phase(uniform(key), 0))

    def step(self, state, action):
        position, time = state.data
        after = self.state(0.9 * position + 0.1 * action[0], jnp.int32(time + 1))
        return after.replace(data=Phase(after.data.position, time + 1))


class StaggersToNothing(Walk):
    def stagger(self, state, key):
        return state.replace(info={})


class StaggersToFloats(Walk):
    def stagger(self, state, key):
        return state.replace(data=state.data._replace(time=5.0 * uniform(key)))


class CarriesFloats(Walk):
    def carry_over(self, ended, fresh):
        return fresh.replace(data=fresh.data._replace(time=ended.reward))


class SaysWrongSize(Walk):
    observation_size: ClassVar[int] = 3


class SaysWrongTree(Walk):
    observation_size: ClassVar[dict[str, int]] = {"position": 1, "time": 1}


# --- Purity, compilation, batches ---------------------------------------------------------


class HostNoiseInReset(Walk):
    def reset(self, key):
        state = super().reset(key)
        return state.replace(obs=state.obs + np.float32(np.random.rand()))  # noqa: NPY002


class HostNoiseInStep(Walk):
    def step(self, state, action):
        return super().step(state, action + np.float32(np.random.rand()))  # noqa: NPY002


class CallsHostNoise(Walk):
    def step(self, state, action):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        noise = jax.pure_callback(_draw, shape, vmap_method="broadcast_all")
        return super().step(state, action + noise[None])


def _draw(*args):
    return np.float32(np.random.rand())  # noqa: NPY002


class CountsOnItself(Walk):
    count: int = 0

    def step(self, state, action):
        self.count += 1
        return super().step(state, action + jnp.float32(self.count))


class RemembersCalls(Walk):
    calls: int = 0

    def step(self, state, action):
        self.calls += 1
        return super().step(state, action)


class CountsEpisodes(Walk):
    episodes: int = 0

    def carry_over(self, ended, fresh):
        self.episodes += 1
        return fresh


class CarriesHostNoise(Walk):
    def carry_over(self, ended, fresh):
        return fresh.replace(obs=fresh.obs + np.float32(np.random.rand()))  # noqa: NPY002


class StaggersByHostNoise(Walk):
    def stagger(self, state, key):
        return state.replace(obs=state.obs + np.float32(np.random.rand()))  # noqa: NPY002


class CachesTable(Walk):
    table: object = None

    def step(self, state, action):
        if self.table is None:
            self.table = state.obs[:1] * jnp.float32(0)
        return super().step(state, action + self.table)


class KeepsStates(Walk):
    def step(self, state, action):
        KEPT.append(state.obs)
        return super().step(state, action)


class BranchesOnDone(Walk):
    def step(self, state, action):
        after = super().step(state, action)
        if after.done:
            return after.replace(reward=after.reward + jnp.float32(1))
        return after


class RoundsWithPython(Walk):
    def reset(self, key):
        state = super().reset(key)
        return state.replace(reward=jnp.float32(float(state.obs[0])))


class LooksAtTracing(Walk):
    def step(self, state, action):
        after = super().step(state, action)
        if isinstance(action, jax.core.Tracer):
            return after
        return after.replace(reward=after.reward + jnp.float32(1))


class CallsHostWithoutBatch(Walk):
    def step(self, state, action):
        shape = jax.ShapeDtypeStruct((1,), jnp.float32)
        return super().step(state, jax.pure_callback(np.tanh, shape, action))


class MixesInCallback(Walk):
    def step(self, state, action):
        shape = jax.ShapeDtypeStruct((1,), jnp.float32)
        mixed = jax.pure_callback(_centered, shape, action, vmap_method="broadcast_all")
        return super().step(state, mixed)


def _centered(actions):
    return np.asarray(actions) - np.mean(actions, dtype=np.float32)


# --- Randomness and what a step depends on ------------------------------------------------


class Noisy(Walk):
    """Draws from a key in its state."""

    def reset(self, key):
        start, noise = self.keys(key)
        return with_info(noise_key=lambda state: noise)(super().reset(start))

    def keys(self, key):
        return jax.random.split(key)

    def step(self, state, action):
        key, draw = jax.random.split(state.info["noise_key"])
        return with_info(noise_key=lambda state: key)(super().step(state, action + uniform(draw)))


class OneKeyForAll(Noisy):
    def keys(self, key):
        return key, jax.random.key(0)


class OneUntypedKeyForAll(Walk):
    def reset(self, key):
        return with_info(rng=lambda state: jax.random.PRNGKey(0))(super().reset(key))

    def step(self, state, action):
        key, draw = jax.random.split(state.info["rng"])
        noise = draw[0].astype(jnp.float32) / jnp.float32(2**32)
        return with_info(rng=lambda state: key)(super().step(state, action + noise))


class SumsRewards(Walk):
    def step(self, state, action):
        after = super().step(state, action)
        return after.replace(reward=state.reward + after.reward)


class StopsWhenDone(Walk):
    def step(self, state, action):
        after = super().step(state, action)
        return jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, after)


# --- Episodes -----------------------------------------------------------------------------


class CutsOffWithoutDone(Walk):
    def state(self, position, time):
        whole = super().state(position, time)
        return whole.replace(done=jnp.zeros((), jnp.bool_), info={"truncation": time % 4 == 3})


class ContradictsItself(Walk):
    def state(self, position, time):
        whole = super().state(position, time)
        return whole.replace(info={"truncation": whole.done, "truncated": time < 0})


class ResetsItself(Noisy):
    """Begins anew at random, from a key of its own."""

    def step(self, state, action):
        after = super().step(state, action)
        fresh = self.reset(after.info["noise_key"])
        fresh = fresh.replace(reward=after.reward, done=after.done)
        return jax.tree.map(
            lambda new, old: new if _is_key(new) else jnp.where(after.done, new, old), fresh, after
        )


def _is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class ReturnsToItsStart(Walk):
    """Goes back to its first state, which it keeps, while its count goes on."""

    def reset(self, key):
        state = super().reset(key)
        return with_info(beginning=lambda state: state.data.position, total=_zero)(state)

    def step(self, state, action):
        after = super().step(state, action)
        home = state.info["beginning"]
        total = state.info["total"] + jnp.int32(1)
        first = self.state(home, jnp.zeros((), jnp.int32)).replace(done=after.done)
        after = jax.tree.map(lambda new, old: jnp.where(after.done, new, old), first, after)
        return with_info(beginning=lambda state: home, total=lambda state: total)(after)


class CountsAnew(Noisy):
    """Begins anew by itself, where nothing but a count in `info` is the same in all episodes.

    A wrapper's own count stands beside it, and goes on.
    """

    def reset(self, key):
        start, noise = self.keys(key)
        return self._at(uniform(start), noise, jnp.zeros((), jnp.int32))

    def step(self, state, action):
        key, draw = jax.random.split(state.data)
        time = state.info["time"] + jnp.int32(1)
        over = time >= self.length
        position = jnp.where(over, uniform(draw), state.obs[0] + jnp.float32(0.3))
        return self._at(position, key, jnp.where(over, 0, time)).replace(done=over)

    def _at(self, position, key, time):
        obs = jnp.stack([position, jnp.zeros((), jnp.float32)])
        info = {"truncation": jnp.zeros((), jnp.bool_), "time": time}
        return State(obs, position, jnp.zeros((), jnp.bool_), info, {}, key)


class CarriesMeanOfNothing(Walk):
    def carry_over(self, ended, fresh):
        return fresh.replace(metrics={"position": ended.reward / jnp.float32(0)})


def _zero(state):
    return jnp.zeros((), jnp.int32)


def _root(state):
    speed = jnp.sqrt(jnp.float32(0.2) - state.data.time.astype(jnp.float32) / 10)
    return state.replace(obs=jnp.stack([state.obs[0], speed]))


def _divided(state):
    return state.replace(reward=state.reward / (state.data.time - 1).astype(jnp.float32) ** 2)


def _grown(state):
    huge = jnp.float32(10) ** (state.data.time.astype(jnp.float32) * 10)
    return state.replace(data=state.data._replace(position=state.data.position + huge))


BROKEN_ENVS = {
    "takes_many_keys": BrokenEnv(TakesManyKeys, "single environment", "takes a batch of keys"),
    "makes_many": BrokenEnv(MakesMany, "single environment", r"state\.done: .*returns 4 of them"),
    "takes_untyped_keys": BrokenEnv(TakesUntypedKeys, "single environment", "untyped key only"),
    "takes_parameters": BrokenEnv(TakesParameters, "single environment", "TypeError.*params"),
    "lacks_metrics": BrokenEnv(LacksMetrics, "state", "`WithoutMetrics` lacks `metrics`"),
    "returns_dict": BrokenEnv(ReturnsDict, "state", "`dict` lacks `obs`"),
    "returns_unregistered": BrokenEnv(ReturnsUnregistered, "state", "not a pytree"),
    "tuple_for_info": BrokenEnv(
        changed(both=lambda state: state.replace(info=())), "state", "info: must be a dictionary"
    ),
    "name_in_info": BrokenEnv(
        changed(both=with_info(task=lambda state: "walk")), "state", r"info\['task'\]: .*`str`"
    ),
    "done_column": BrokenEnv(
        changed(both=lambda state: state.replace(done=state.done[None])),
        "scalars",
        r"state\.done: must be a scalar.*bool\[1\]",
    ),
    "reward_column": BrokenEnv(
        changed(both=lambda state: state.replace(reward=state.reward[None])),
        "scalars",
        r"state\.reward: must be a scalar.*float32\[1\]",
    ),
    "flag_column": BrokenEnv(
        changed(both=with_info(truncation=lambda state: jnp.zeros(2, jnp.bool_))),
        "scalars",
        r"info\['truncation'\]: must be a scalar.*bool\[2\]",
    ),
    "marks_of_brax": BrokenEnv(
        changed(both=with_info(first_obs=lambda s: s.obs, first_pipeline_state=lambda s: s.data)),
        "reset wrappers",
        r"info\['first_obs'\]",
    ),
    "marks_of_playground": BrokenEnv(
        changed(both=with_info(AutoResetWrapper_first_obs=lambda state: state.obs)),
        "reset wrappers",
        "AutoResetWrapper_first_obs",
    ),
    "wants_two_actions": BrokenEnv(WantsTwoActions, "step", r"action float32\[2\].*action_size"),
    "wants_command": BrokenEnv(WantsCommand, "step", "KeyError: 'command'"),
    "writes_info": BrokenEnv(WritesInfo, "in place", r"state\.info\['energy'\]: .*writes"),
    "key_after_step": BrokenEnv(
        changed(after_step=with_info(torque=lambda state: state.reward)),
        "closed state",
        r"next_state\.info\['torque'\]: .*adds `info\['torque'\]`",
    ),
    "metric_lost": BrokenEnv(
        changed(after_step=lambda state: state.replace(metrics={})),
        "closed state",
        r"lacks `metrics\['position'\]`",
    ),
    "shape_after_step": BrokenEnv(
        changed(after_step=lambda state: state.replace(obs=state.obs[:1])),
        "closed state",
        r"next_state\.obs: .*float32\[1\] instead of float32\[2\]",
    ),
    "counts_in_python": BrokenEnv(CountsInPython, "closed state", "static field"),
    "staggers_to_nothing": BrokenEnv(
        StaggersToNothing, "closed state", r"staggered\.info\['truncation'\]: `stagger` must"
    ),
    "staggers_to_floats": BrokenEnv(
        StaggersToFloats,
        "dtypes",
        r"staggered\.data\.time: is float32\[\] .*after `stagger`, but int32",
    ),
    "carries_floats": BrokenEnv(
        CarriesFloats, "dtypes", r"fresh\.data\.time: is float32\[\] after `carry_over`, but int32"
    ),
    "seed_of_two_dtypes": BrokenEnv(
        changed(
            after_reset=with_info(seed=lambda state: jnp.uint32(2**31)),
            after_step=with_info(seed=lambda state: jnp.int32(0)),
        ),
        "dtypes",
        r"next_state\.info\['seed'\]: is int32\[\] after `step` and uint32\[\]",
    ),
    "says_wrong_size": BrokenEnv(SaysWrongSize, "sizes", r"observation_size: says 3.*shape \[2\]"),
    "says_wrong_tree": BrokenEnv(SaysWrongTree, "sizes", "observation_size: says {'position'"),
    "host_noise_in_reset": BrokenEnv(
        HostNoiseInReset, "purity", r"state\.obs: `reset` must .*between two compilations"
    ),
    "host_noise_in_step": BrokenEnv(HostNoiseInStep, "purity", r"next_state\.obs: `step` must"),
    "calls_host_noise": BrokenEnv(CallsHostNoise, "purity", "`step` must return the same"),
    "counts_on_itself": BrokenEnv(CountsOnItself, "purity", r"env\.count: .*changed the env"),
    "remembers_calls": BrokenEnv(RemembersCalls, "purity", r"env\.calls: .*changed the env"),
    "counts_episodes": BrokenEnv(CountsEpisodes, "purity", r"env\.episodes: .*changed the env"),
    "carries_host_noise": BrokenEnv(
        CarriesHostNoise, "purity", r"fresh\.obs: `carry_over` must .*between two compilations"
    ),
    "staggers_by_host_noise": BrokenEnv(
        StaggersByHostNoise, "purity", r"staggered\.obs: `stagger` must .*between two compilations"
    ),
    "caches_table": BrokenEnv(CachesTable, "purity", "leaked tracer"),
    "keeps_states": BrokenEnv(KeepsStates, "purity", r"leaked tracer.*in `.*\.KEPT`"),
    "branches_on_done": BrokenEnv(BranchesOnDone, "jit", r"TracerBool.*jnp\.where"),
    "rounds_with_python": BrokenEnv(RoundsWithPython, "jit", "ConcretizationTypeError.*float"),
    "looks_at_tracing": BrokenEnv(LooksAtTracing, "jit", r"next_state\.reward: `step` must"),
    "calls_host_without_batch": BrokenEnv(CallsHostWithoutBatch, "vmap", "vmap_method"),
    "mixes_in_callback": BrokenEnv(MixesInCallback, "vmap", r"next_state\.obs: .*in a batch"),
    "one_key_for_all": BrokenEnv(OneKeyForAll, "keys", r"info\['noise_key'\]: .*same key"),
    "one_untyped_key_for_all": BrokenEnv(OneUntypedKeyForAll, "keys", r"info\['rng'\]: .*same key"),
    "sums_rewards": BrokenEnv(SumsRewards, "reward and done", "incoming `reward`"),
    "stops_when_done": BrokenEnv(StopsWhenDone, "reward and done", "incoming `done`"),
    "done_after_reset": BrokenEnv(
        changed(after_reset=lambda state: state.replace(done=jnp.ones((), jnp.bool_))),
        "episode end",
        r"state\.done: is set after 8 of 8 resets",
    ),
    "cuts_off_without_done": BrokenEnv(
        CutsOffWithoutDone, "episode end", r"info\['truncation'\]: .*first at step 3"
    ),
    "contradicts_itself": BrokenEnv(ContradictsItself, "episode end", "disagree.*at step 5"),
    "resets_itself": BrokenEnv(ResetsItself, "own resets", "reset itself"),
    "counts_anew": BrokenEnv(CountsAnew, "own resets", r'allow=\("own resets",\)'),
    "returns_to_its_start": BrokenEnv(ReturnsToItsStart, "own resets", "reset itself"),
    "root": BrokenEnv(
        changed(both=_root), "finite", r"next_state\.obs: non-finite at step 3 .*8 of 8"
    ),
    "divided": BrokenEnv(
        changed(both=_divided), "finite", r"next_state\.reward: non-finite at step 1 "
    ),
    "grown": BrokenEnv(
        changed(after_step=_grown), "finite", r"data\.position: non-finite at step 4"
    ),
    "carries_mean_of_nothing": BrokenEnv(
        CarriesMeanOfNothing, "finite", r"fresh\.metrics\['position'\]: `carry_over` made it non-"
    ),
    "starts_infinite": BrokenEnv(
        changed(after_reset=lambda state: state.replace(obs=state.obs / 0.0)),
        "finite",
        r"state\.obs: non-finite after the reset",
    ),
}
