"""The state of training as it goes from one compiled call to the next.

A physics state has some hundred small leaves. Each of them would be a kernel that takes it
out of its table after the last step of a call, to be compiled before training begins and run
after each call. So the states of the environments stay rows of tables until somebody looks.
"""

import dataclasses
from collections.abc import Hashable
from typing import Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_ppo._tree import replace
from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import TrainingState
from eqx_ppo.envs import BatchedEnv, Env, PackedStates


def pack_state(env: Env, state: TrainingState) -> TrainingState:
    """The same state, with those of the environments as rows of tables."""
    rollout = state.rollout_state
    batched = BatchedEnv(env, state.env_spec)
    return _with_env_state(state, batched.pack(rollout.env_state, rollout.fresh.shape[0]))


def unpack_state(env: Env, packed: TrainingState) -> TrainingState:
    """Undoes `pack_state`."""
    batched = BatchedEnv(env, packed.env_spec)
    return _with_env_state(packed, batched.unpack(_rows(packed)))


def open_state(env: Env, packed: TrainingState) -> TrainingState:
    """Undoes `pack_state` on the host, and takes over what is in no table.

    It waits for the state, but not for what the device does after it, and nothing is compiled:
    no leaf is computed on the device.
    """
    rows = _rows(packed)
    on_host = rows._replace(tables=[_on_host(table) for table in rows.tables])
    place = _place_of(rows.tables[0])
    leaves = [_to_device(leaf, place) for leaf in BatchedEnv(env, packed.env_spec).leaves(on_host)]
    return _with_env_state(packed, packed.env_spec.unflatten(leaves))


def _rows(packed: TrainingState) -> PackedStates:
    rows: Tree = packed.rollout_state.env_state
    return rows


def _with_env_state(state: TrainingState, env_state: Tree) -> TrainingState:
    return replace(state, rollout_state=state.rollout_state._replace(env_state=env_state))


@final
@dataclasses.dataclass(frozen=True)
class _HostKeys:
    """Keys on the host, with what `BatchedEnv.leaves` does to a table."""

    data: np.ndarray
    impl: Hashable
    n_words: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape[:-1]

    def __getitem__(self, index: Tree) -> Self:
        return dataclasses.replace(self, data=self.data[index])

    def reshape(self, shape: tuple[int, ...]) -> Self:
        return dataclasses.replace(self, data=self.data.reshape(*shape, self.n_words))


def _on_host(table: Array) -> Tree:
    if not jnp.issubdtype(table.dtype, jax.dtypes.prng_key):
        return np.asarray(table)
    data = np.asarray(jax.random.key_data(table))
    return _HostKeys(data, jax.random.key_impl(table), data.shape[-1])


def _to_device(leaf: Tree, place: jax.sharding.Sharding | None) -> Array:
    if isinstance(leaf, _HostKeys):
        data = jax.device_put(np.array(leaf.data), place)
        return jax.random.wrap_key_data(data, impl=leaf.impl)
    if isinstance(leaf, np.ndarray):
        return jax.device_put(np.array(leaf), place)  # a copy of its own, for it alone
    return leaf


def _place_of(table: Array) -> jax.sharding.Sharding | None:
    """The device that a state was put on; `None` if that is the one for everything."""
    place = table.sharding
    is_one = isinstance(place, jax.sharding.SingleDeviceSharding)
    return place if table.committed and is_one else None
