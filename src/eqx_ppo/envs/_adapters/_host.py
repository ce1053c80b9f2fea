"""The host side of a vector environment: what compiled code calls, and when it may.

See `_gymnasium.py` for what this is a part of.
"""

from collections.abc import Callable
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Key, UInt32

from eqx_ppo._typing import Tree
from eqx_ppo.envs._adapters._spaces import device_batch, device_values, host_actions, zeros


class Answer(NamedTuple):
    """What the host says about one environment, or about a batch.

    `time` is two numbers per environment: the host's clock, and its count of resets.
    """

    obs: Tree
    reward: Tree
    terminated: Tree
    truncated: Tree
    time: Tree


@final
class Host:
    """The vector environment, its clock, and the functions that the device calls.

    A step moves the clock, and so does a call that fails, so that no state fits any more. The
    resets of a part of the environments do not; they are counted.
    """

    def __init__(self, vector_env: Tree):
        self.vector_env = vector_env
        self.n_envs: int = vector_env.num_envs
        self.values = device_values(vector_env.single_observation_space)
        self.clock = 0
        self.resets = 0
        self.ended = np.zeros(self.n_envs, np.bool_)

    # --- On the host ----------------------------------------------------------------------

    def reset(self, seeds: np.ndarray) -> Answer:
        """Resets every environment."""
        self.check_number(len(seeds))
        self.clock += 1
        self.resets += 1
        obs, _ = self.vector_env.reset(seed=_python_ints(seeds))
        self.ended = np.zeros(self.n_envs, np.bool_)
        return self._answer(obs)

    def reset_masked(self, mask: np.ndarray, resets: np.ndarray, seeds: np.ndarray) -> Answer:
        """Resets the environments in `mask`; rows of the others mean nothing.

        There must have been `resets` so far, unless that is 0: before the first episodes, all of
        which begin.
        """
        mask = np.array(mask, np.bool_)
        if resets not in (0, self.resets):
            raise self._wrong_time(f"after {resets} resets, but there were {self.resets}")
        if mask.all():
            return self.reset(seeds)
        clock = self.clock
        self.clock += 1
        self.resets += 1
        obs, _ = self.vector_env.reset(seed=_python_ints(seeds), options={"reset_mask": mask})
        self.clock = clock
        self.ended = self.ended & ~mask
        return self._answer(obs)

    def step(self, times: np.ndarray, actions: Tree) -> Answer:
        """Steps every environment."""
        clocks = np.asarray(times)[:, 0]
        self.check_number(len(clocks))
        if self.ended.any() or (clocks != self.clock).any():
            raise self._wrong_time(f"at {_span(clocks)} on its clock, which is at {self.clock}")
        self.clock += 1
        obs, rewards, terminated, truncated, _ = self.vector_env.step(
            host_actions(self.vector_env.single_action_space, actions)
        )
        self.ended = np.asarray(terminated | truncated)
        return self._answer(obs, rewards, terminated, truncated)

    def _answer(
        self, obs: Tree, rewards: Tree = 0.0, terminated: Tree = False, truncated: Tree = False
    ) -> Answer:
        def row(values, dtype):
            return np.array(np.broadcast_to(values, self.n_envs), dtype)

        return Answer(
            device_batch(self.values, obs),
            row(rewards, np.float32),
            row(terminated, np.bool_),
            row(truncated, np.bool_),
            np.full((self.n_envs, 2), (self.clock, self.resets), np.uint32),
        )

    def check_number(self, n_envs: int) -> None:
        """Raises a `ValueError` unless there are `n_envs` environments."""
        if n_envs != self.n_envs:
            raise ValueError(_wrong_number(n_envs, self.n_envs))

    def _wrong_time(self, state: str) -> RuntimeError:
        return RuntimeError(
            "The state is not the one that the environments on the host are in "
            f"({state}; {int(self.ended.sum())} of them ended and were not reset). They cannot go "
            "back. Use each state once. Give `PPOConfig(reset_strategy=HostReset())`. Evaluate in "
            "a `GymnasiumEnv` of its own, as `train_ppo(..., eval_env=...)`. To continue from "
            "a checkpoint, or after a reset elsewhere, begin new episodes with "
            "`restart_episodes`."
        )

    # --- On the device --------------------------------------------------------------------

    def call_for_each(self, function: Callable[..., Answer]) -> Callable[..., Answer]:
        """A function for one environment, which calls the host once for a whole batch."""

        def call(n_rows, *args):
            return io_callback(function, self._shapes(n_rows), *args, ordered=True)

        @custom_vmap
        def for_one(*args):
            rows = call(1, *jax.tree.map(lambda x: jnp.asarray(x)[None], args))
            return jax.tree.map(lambda x: x[0], rows)

        @for_one.def_vmap
        def for_all(n_rows, in_batched, *args):
            self.check_number(n_rows)

            def rows(x, is_batched):
                return x if is_batched else jnp.broadcast_to(x, (n_rows, *jnp.shape(x)))

            answer = call(n_rows, *jax.tree.map(rows, args, tuple(in_batched)))
            return answer, jax.tree.map(lambda _: True, answer)

        return for_one

    def reset_some(
        self, mask: Bool[Array, " B"], resets: UInt32[Array, ""], keys: Key[Array, " B"]
    ) -> Answer:
        """Calls the host if any environment is in `mask`."""
        n_rows = mask.shape[0]
        self.check_number(n_rows)
        args = (mask, resets, jax.vmap(seed_of)(keys))
        return jax.lax.cond(
            jnp.any(mask),
            lambda: io_callback(self.reset_masked, self._shapes(n_rows), *args, ordered=True),
            lambda: zeros(self._shapes(None), n_rows),
        )

    def _shapes(self, n_rows: int | None) -> Answer:
        """What an answer looks like, for one environment (`None`) or a batch."""
        leading = () if n_rows is None else (n_rows,)

        def shape(x):
            return jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype)

        scalars = [jax.ShapeDtypeStruct((), x) for x in (jnp.float32, jnp.bool_, jnp.bool_)]
        time = jax.ShapeDtypeStruct((2,), jnp.uint32)
        return Answer(*jax.tree.map(shape, (self.values, *scalars, time)))


def seed_of(key: Key[Array, ""]) -> UInt32[Array, ""]:
    """The seed of a reset on the host."""
    return jax.random.bits(key, (), jnp.uint32)


def _python_ints(seeds: np.ndarray) -> list[int]:
    return [int(seed) for seed in np.asarray(seeds)]


def _span(clocks: np.ndarray) -> str:
    low, high = int(clocks.min()), int(clocks.max())
    return str(low) if low == high else f"{low} to {high}"


def _wrong_number(got: int, expected: int) -> str:
    return (
        f"The vector environment has {expected} environments, but {got} were asked for. Set "
        f"`n_envs={expected}` in `PPOConfig` (in `EvalConfig`, for the environment of evaluations) "
        "or make it with another number. If the numbers agree, set "
        "`PPOConfig(reset_strategy=HostReset())`: no other strategy works on the host."
    )
