"""The state of training as it goes from one compiled call to the next.

A physics state has some hundred small leaves. Each of them would be a kernel that takes it
out of its table after the last step of a call, to be compiled before training begins and run
after each call. So the states of the environments stay rows of tables until somebody looks.
"""

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
    """Undoes `pack_state` on the host, where nothing has to be compiled; waits for the state."""
    rows = _rows(packed)
    on_host = rows._replace(tables=[_on_host(table) for table in rows.tables])
    batched = BatchedEnv(env, packed.env_spec)
    leaves = [jnp.array(leaf) for leaf in batched.leaves(on_host)]  # no buffer is shared
    return _with_env_state(packed, packed.env_spec.unflatten(leaves))


def _rows(packed: TrainingState) -> PackedStates:
    rows: Tree = packed.rollout_state.env_state
    return rows


def _with_env_state(state: TrainingState, env_state: Tree) -> TrainingState:
    return replace(state, rollout_state=state.rollout_state._replace(env_state=env_state))


def _on_host(table: Array) -> Array | np.ndarray:
    is_opaque = jnp.issubdtype(table.dtype, jax.dtypes.extended)  # keys
    return table if is_opaque else np.asarray(table)
