"""An environment that breaks at random, and counts for itself how often it did."""

import dataclasses
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo.envs import Wrapper

_INFO = "faults"
N_KINDS = 3
"""What can become NaN: the physics state, the reward, the observation."""


@final
class FaultCount:
    """Counts faults on the host, by kind, apart from whatever the library counts."""

    def __init__(self):
        self._by_kind = np.zeros(N_KINDS, np.int64)

    def add(self, kinds: np.ndarray) -> None:
        """Takes in the kind of each environment's fault; `N_KINDS` stands for none."""
        self._by_kind += np.bincount(np.ravel(kinds), minlength=N_KINDS + 1)[:N_KINDS]

    @property
    def by_kind(self) -> tuple[int, ...]:
        """Faults so far: of the state, of the reward, of the observation."""
        jax.effects_barrier()
        return tuple(int(count) for count in self._by_kind)

    @property
    def total(self) -> int:
        """All faults so far."""
        return sum(self.by_kind)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class FaultyWrapper(Wrapper):
    """Makes state, reward or observation NaN in a share `rate` of all steps.

    A fault of the state leaves reward and observation of that step as they are; there is none
    in environments without a physics state. Every step that is really taken is told to `count`.
    """

    rate: float
    count: FaultCount

    def reset(self, key):
        fault_key, inner_key = jax.random.split(key)
        return self._with_faults(self.env.reset(inner_key), (fault_key, jnp.zeros((), jnp.uint32)))

    def step(self, state, action):
        key, draws = state.info[_INFO]
        draw_key, kind_key = jax.random.split(jax.random.fold_in(key, draws))
        faulty = jax.random.bernoulli(draw_key, self.rate)
        first = 0 if any(map(_is_floating, jax.tree.leaves(state.data))) else 1
        kind = jnp.where(faulty, jax.random.randint(kind_key, (), first, N_KINDS), N_KINDS)
        _tell(self.count, kind)
        info = {name: leaf for name, leaf in state.info.items() if name != _INFO}
        inner = self.env.step(state.replace(info=info), action)
        spoilt = inner.replace(
            data=_spoil(inner.data, kind == 0),
            reward=_spoil(inner.reward, kind == 1),
            obs=_spoil(inner.obs, kind == 2),
        )
        return self._with_faults(spoilt, (key, draws + jnp.uint32(1)))

    def _with_faults(self, state, faults):
        return state.replace(info={**state.info, _INFO: faults})


_CUT = "cut"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class CutWrapper(Wrapper):
    """Cuts episodes off at a share `rate` of all steps, at what looks like a time limit."""

    rate: float

    def reset(self, key):
        cut_key, inner_key = jax.random.split(key)
        state = self.env.reset(inner_key)
        return state.replace(info={**state.info, _CUT: (cut_key, jnp.zeros((), jnp.uint32))})

    def step(self, state, action):
        key, draws = state.info[_CUT]
        cut = jax.random.bernoulli(jax.random.fold_in(key, draws), self.rate)
        info = {name: leaf for name, leaf in state.info.items() if name != _CUT}
        inner = self.env.step(state.replace(info=info), action)
        flags = {"truncation": inner.info["truncation"], "done": inner.done}
        flags = {name: jnp.where(cut, jnp.ones_like(flag), flag) for name, flag in flags.items()}
        info = {**inner.info, "truncation": flags["truncation"], _CUT: (key, draws + jnp.uint32(1))}
        return inner.replace(done=flags["done"], info=info)


def _spoil(tree, where):
    def leaf_or_nan(leaf):
        return jnp.where(where, jnp.full_like(leaf, jnp.nan), leaf) if _is_floating(leaf) else leaf

    return jax.tree.map(leaf_or_nan, tree)


def _is_floating(leaf):
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _tell(count: FaultCount, kind: jax.Array) -> None:
    """One call to the host per step of the whole batch, not one per environment."""

    @jax.custom_batching.custom_vmap
    def tell(kind):
        jax.debug.callback(count.add, kind)
        return jnp.zeros((), jnp.int32)

    @tell.def_vmap
    def _(axis_size, in_batched, kinds):
        jax.debug.callback(count.add, kinds)
        return jnp.zeros(axis_size, jnp.int32), True

    tell(kind)
