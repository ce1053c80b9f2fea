"""Where the next episode of an environment starts.

The rollout, not the environment, begins episodes: before a step it asks a reset strategy for
fresh states for the environments whose last episode is over, and for all of them before the
first step. A strategy is a small hashable record that is part of the configuration; what it
carries along is part of the training state.
"""

import abc
import dataclasses
from typing import NamedTuple, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from eqx_ppo._typing import EnvState, Tree
from eqx_ppo.envs._batched import BatchedEnv, PackedStates
from eqx_ppo.envs._protocol import Env

_BATCH = 32  # with fewer resets at a time each takes much longer; measured on CheetahRun


class ResetStrategy(abc.ABC):
    """How fresh states are had. Subclass as a frozen dataclass."""

    @abc.abstractmethod
    def start(self, env: BatchedEnv, n_envs: int, key: Key[Array, ""]) -> Tree:
        """The strategy's own state, before anything was dealt."""

    def adopt(self, env: BatchedEnv, states: EnvState, key: Key[Array, ""]) -> Tree:
        """The strategy's own state for environments that are running already, `[B, ...]`."""
        return self.start(env, jnp.shape(states.done)[0], key)

    @abc.abstractmethod
    def deal(
        self, env: BatchedEnv, state: Tree, wanted: Bool[Array, " B"], key: Key[Array, ""]
    ) -> tuple[EnvState, Tree]:
        """A fresh state for every environment in `wanted`, and the new strategy state.

        Called on steps at which one is wanted; under `jax.vmap` (over seeds, say) on those at
        which any of them wants one, and the states of those that want none stay as they were.

        **Returns:** leaves `[B, ...]`; rows of other environments are not used.
        """


@final
@dataclasses.dataclass(frozen=True)
class FreshReset(ResetStrategy):
    """Calls `env.reset` for every environment on every step at which any episode begins.

    Exact and simple, and slow where a reset costs more than a step.
    """

    def start(self, env: BatchedEnv, n_envs: int, key: Key[Array, ""]) -> Tree:
        """No state."""
        del env, n_envs, key
        return ()

    def deal(
        self, env: BatchedEnv, state: Tree, wanted: Bool[Array, " B"], key: Key[Array, ""]
    ) -> tuple[EnvState, Tree]:
        """One reset per environment, wanted or not."""
        return env.reset(jax.random.split(key, wanted.shape[0])), state


@final
@dataclasses.dataclass(frozen=True)
class CachedReset(ResetStrategy):
    """Returns each environment to its own first state.

    Free, but training sees only `n_envs` different starts. What counts as the first state is
    the one that training began with; `unroll_env` begins with the states that it is given, so
    give it fresh ones: in the middle of an episode it would return there.
    """

    def start(self, env: BatchedEnv, n_envs: int, key: Key[Array, ""]) -> Tree:
        """One reset per environment."""
        return env.reset(jax.random.split(key, n_envs))

    def adopt(self, env: BatchedEnv, states: EnvState, key: Key[Array, ""]) -> Tree:
        """The states as they are: each environment's first one, as far as is known."""
        del env, key
        return jax.tree.map(jnp.copy, states)  # no buffer is shared

    def deal(
        self, env: BatchedEnv, state: Tree, wanted: Bool[Array, " B"], key: Key[Array, ""]
    ) -> tuple[EnvState, Tree]:
        """The first states."""
        del env, wanted, key
        return state, state


class PoolState(NamedTuple):
    """A ring of fresh states: the next `available` ones, from `head` on, are undealt."""

    states: PackedStates
    head: Int32[Array, ""]
    available: Int32[Array, ""]


@final
@dataclasses.dataclass(frozen=True)
class PooledReset(ResetStrategy):
    """Deals each fresh state once, out of a pool that is refilled in batches.

    As good as `FreshReset` (every state comes from `env.reset` with a key of its own, and no
    two environments get the same one), at the price of one reset per episode.

    **Arguments:**

    - `size`: how many fresh states there is room for; `None` for as many as there are
        environments, and at least that many (all may end at once, and all begin at once).
    - `refill`: how many resets are made at a time, as often as needed, when the pool cannot
        serve a step; `None` for an eighth of `size`, and 32 at least if there are as many.
        Resets in a larger batch take less time each, but more of them are made before they
        are needed.
    """

    size: int | None = None
    refill: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("refill", self.refill)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`PooledReset.{name}` must be at least 1 and whole, but got {value!r}."
                )

    def start(self, env: BatchedEnv, n_envs: int, key: Key[Array, ""]) -> PoolState:
        """An empty pool, so that resets are compiled in one place: where it is refilled."""
        capacity, _ = self._sizes(n_envs)
        return PoolState(
            env.pack(env.blank(capacity, key), capacity),
            head=jnp.zeros((), jnp.int32),
            available=jnp.zeros((), jnp.int32),
        )

    def deal(
        self, env: BatchedEnv, state: PoolState, wanted: Bool[Array, " B"], key: Key[Array, ""]
    ) -> tuple[EnvState, PoolState]:
        """The next undealt states, in the order of the environments that want one."""
        capacity, refill = self._sizes(wanted.shape[0])
        n_wanted = jnp.sum(wanted, dtype=jnp.int32)

        def short(pool: PoolState) -> Bool[Array, ""]:
            return pool.available < n_wanted

        def add(pool: PoolState) -> PoolState:
            added = pool.available + jnp.arange(refill, dtype=jnp.int32)
            keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(added)
            new = env.pack(env.reset(keys), refill)
            places = (pool.head + added) % capacity
            tables = [
                table.at[places].set(rows)
                for table, rows in zip(pool.states.tables, new.tables, strict=True)
            ]
            states = pool.states._replace(tables=tables)
            return PoolState(states, pool.head, pool.available + refill)

        pool = jax.lax.while_loop(short, add, state)
        rank = jnp.where(wanted, jnp.cumsum(wanted, dtype=jnp.int32) - 1, 0)
        dealt = env.unpack(_rows(pool.states, (pool.head + rank) % capacity))
        head = (pool.head + n_wanted) % capacity
        return dealt, PoolState(pool.states, head, pool.available - n_wanted)

    def _sizes(self, n_envs: int) -> tuple[int, int]:
        """How many states the ring holds, and how many are made at a time."""
        size = n_envs if self.size is None else self.size
        if size < n_envs:
            raise ValueError(
                "`PooledReset.size` must be at least the number of environments, because all "
                f"may end on one step, but got {size} for {n_envs} environments."
            )
        refill = max(size // 8, min(size, _BATCH)) if self.refill is None else self.refill
        return size + refill, refill


def _rows(states: PackedStates, index: Int32[Array, " N"]) -> PackedStates:
    return states._replace(tables=[table[index] for table in states.tables])


@runtime_checkable
class SupportsOwnResets(Protocol):
    """An environment that can be reset in one way only, such as one on the host.

    `reset_strategy` is that way. Training asks for it in its configuration; evaluation and
    `unroll_env` take it by themselves.
    """

    @property
    def reset_strategy(self) -> ResetStrategy:
        """The strategy that works."""
        ...


def own_resets(env: Env, otherwise: ResetStrategy) -> ResetStrategy:
    """The only strategy that works for `env`, or `otherwise` where any of them does.

    **Arguments:**

    - `env`: an environment; see `SupportsOwnResets`.
    - `otherwise`: the strategy for all other environments.
    """
    return env.reset_strategy if isinstance(env, SupportsOwnResets) else otherwise
