"""Vector environments of Gymnasium, which live on the host.

Such an environment is not a function: it keeps its state in Python objects, and is changed
by being stepped. It still takes part in the one compiled rollout, by a callback per step:

- `GymnasiumEnv` has `reset` and `step` for one environment, like any other; under `jax.vmap`
  they become **one** call of the host for the whole batch (`custom_vmap`).
- The calls are `io_callback(ordered=True)`: each is made exactly once, and in the order of
  the program. They can be neither elided nor repeated.
- The state on the device holds what the host answered, and the host's **clock** and count of
  resets. A state that is not the host's latest one is refused, because the host cannot go back
  to it: that of a checkpoint, of another run, or one that a reset strategy has kept. A state
  before all episodes resets the host.
- `HostReset` starts new episodes where the old ones ended.
"""

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, UInt32

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import EnvState, KeyLike, Tree
from eqx_ppo.envs._actions import Actions, action_size
from eqx_ppo.envs._adapters._host import Answer, Host, seed_of
from eqx_ppo.envs._adapters._spaces import actions_of, sizes
from eqx_ppo.envs._batched import BatchedEnv
from eqx_ppo.envs._resets import ResetStrategy
from eqx_ppo.envs._state import State


@final
@dataclasses.dataclass(frozen=True)
class HostReset(ResetStrategy):
    """Starts new episodes on the host, in the environments that ended and in no other.

    For `GymnasiumEnv`, which takes no other strategy: an environment on the host cannot be
    reset in advance, nor brought back to an earlier state. Each reset has a seed of its own,
    which follows from the key, so that a run repeats.
    """

    def start(self, env: BatchedEnv, n_envs: int, key: Key[Array, ""]) -> Tree:
        """How many resets there were on the host."""
        _on_host(env).check_number(n_envs)
        del key
        return jnp.zeros((), jnp.uint32)  # it may be more than none: the first one is of all

    def adopt(self, env: BatchedEnv, states: EnvState, key: Key[Array, ""]) -> Tree:
        """How many there were when the running episodes, which go on, were left."""
        _on_host(env)
        del key
        return jnp.max(states.data[:, 1])

    def deal(
        self, env: BatchedEnv, state: Tree, wanted: Bool[Array, " B"], key: Key[Array, ""]
    ) -> tuple[EnvState, Tree]:
        """Resets the environments in `wanted`; the host is not called if none is."""
        answer = _on_host(env).reset_some(wanted, state, key)
        return env.canonicalize(_state(answer)), jnp.maximum(state, jnp.max(answer.time[:, 1]))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class GymnasiumEnv:
    """A vector environment of Gymnasium, stepped on the host.

    Slower than an environment that is compiled: at each step the device waits for Python.
    Everything else is as everywhere: the true last observation of an episode is seen, its
    time limit (`truncated`) is told apart from its end (`terminated`), and no step is lost
    between two episodes.

    - Numbers of 64 bits have 32 on the device. Observations keep their other dtypes and their
        structure (`Dict`, `Tuple`); Gymnasium's infos are left out.
    - Actions get the dtype and shape of the environment's space. They are not clipped.
    - Wrappers of this library do not apply: use those of Gymnasium, such as `TimeLimit`,
        `FrameStackObservation` or `TransformReward`.
    - `PPOConfig(reset_strategy=HostReset(), n_envs=...)`, with the number of environments
        that there are. Evaluation needs a `GymnasiumEnv` of its own, with as many as
        `EvalConfig.n_envs` says.
    - A run cannot be continued exactly, because the state of the host is not part of the
        training state: see `restart_episodes`. It cannot be vectorized over seeds either.
    - An error in the environment ends the program in which it is raised
        (`jax.errors.JaxRuntimeError`), with its own message.

    **Arguments:**

    - `vector_env`: with `autoreset_mode=AutoresetMode.DISABLED`, and a `reset` that takes the
        option `reset_mask` (as `SyncVectorEnv` and `AsyncVectorEnv` do). `load_gymnasium`
        makes one by name.

    **Raises:** `ImportError` without Gymnasium; `TypeError` for anything but a vector
    environment, and for spaces that have no arrays; `ValueError` for another `autoreset_mode`.
    """

    vector_env: Tree
    _host: Host = dataclasses.field(init=False, repr=False)
    _reset: Callable[..., Answer] = dataclasses.field(init=False, repr=False)
    _step: Callable[..., Answer] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_vector_env(self.vector_env)
        host = Host(self.vector_env)
        object.__setattr__(self, "_host", host)
        object.__setattr__(self, "_reset", host.call_for_each(host.reset))
        object.__setattr__(self, "_step", host.call_for_each(host.step))

    @property
    def n_envs(self) -> int:
        """How many environments there are."""
        return self.vector_env.num_envs

    @property
    def observation_size(self) -> Tree:
        """The length of the observation, or its shape if it is no vector; a dict for a dict."""
        return sizes(self._host.values)

    @property
    def actions(self) -> Actions:
        """Which actions it takes; `make_sampler` has a sampler for them."""
        return actions_of(self.vector_env.single_action_space)

    @property
    def action_size(self) -> Tree:
        """How many numbers an action has; 1 for a choice."""
        return action_size(self.actions)

    @property
    def reset_strategy(self) -> HostReset:
        """The only one that it takes; see `SupportsOwnResets`."""
        return HostReset()

    @typed
    def reset(self, key: KeyLike) -> State:
        """Resets the environment, by a seed that follows from `key`."""
        return _state(self._reset(seed_of(as_key(key))))

    @typed
    def step(self, state: State, action: Tree) -> State:
        """Steps the environment, which must still be where `state` left it."""
        return _state(self._step(state.data, action))

    def reset_some(
        self, mask: Bool[Array, " B"], resets: UInt32[Array, ""], key: Key[Array, ""]
    ) -> Answer:
        """Resets some environments. Rows of the others mean nothing; used by `HostReset`."""
        return self._host.reset_some(mask, resets, jax.random.split(key, mask.shape[0]))

    def check_number(self, n_envs: int) -> None:
        """Raises a `ValueError` unless there are `n_envs` environments."""
        self._host.check_number(n_envs)

    def close(self) -> None:
        """Closes the vector environment."""
        self.vector_env.close()


@typed
def load_gymnasium(
    name: str,
    n_envs: int,
    *,
    parallel: bool = False,
    wrappers: Sequence[Callable[[Tree], Tree]] = (),
    **options: Tree,
) -> GymnasiumEnv:
    """Makes a vector environment of Gymnasium by name.

    **Arguments:**

    - `name`: for example `"CartPole-v1"`.
    - `n_envs`: the number of environments.
    - `parallel`: step each in a process of its own (`AsyncVectorEnv`), which pays where a step
        takes much longer than a millisecond. The processes are spawned, so the script that
        calls this needs `if __name__ == "__main__":`.
    - `wrappers`: of Gymnasium, applied to each environment.
    - keywords: go to the environment's constructor.

    **Raises:** `ImportError` without Gymnasium, and Gymnasium's own errors, for an unknown name.
    """
    gymnasium = _gymnasium()
    vector_kwargs = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    if parallel:
        vector_kwargs["context"] = "spawn"  # a fork of a process with JAX may hang
    return GymnasiumEnv(
        gymnasium.make_vec(
            name,
            num_envs=n_envs,
            vectorization_mode="async" if parallel else "sync",
            vector_kwargs=vector_kwargs,
            wrappers=list(wrappers),
            **options,
        )
    )


def _state(answer: Answer) -> State:
    """A termination wins over a time limit in the same step."""
    truncated = answer.truncated & ~answer.terminated
    return State(
        answer.obs,
        answer.reward,
        done=answer.terminated | answer.truncated,
        info={"truncation": truncated},
        metrics={},
        data=answer.time,
    )


def _on_host(env: BatchedEnv) -> GymnasiumEnv:
    if not isinstance(env.env, GymnasiumEnv):
        raise TypeError(
            "`HostReset` resets a `GymnasiumEnv`, but the environment is a "
            f"`{type(env.env).__name__}`. Other environments take `PooledReset`; and around a "
            "`GymnasiumEnv` there can be no wrapper of this library: use those of Gymnasium."
        )
    return env.env


def _check_vector_env(vector_env: Tree) -> None:
    vector = _gymnasium().vector
    if not isinstance(vector_env, vector.VectorEnv):
        raise TypeError(
            "`GymnasiumEnv` takes a vector environment (a `gymnasium.vector.VectorEnv`), but got a "
            f"`{type(vector_env).__name__}`. `load_gymnasium(name, n_envs)` makes one."
        )
    mode = _autoreset_mode(vector_env)
    if mode != vector.AutoresetMode.DISABLED:
        raise ValueError(
            "The vector environment must not reset itself: expected "
            f"`autoreset_mode=AutoresetMode.DISABLED`, but got `{mode}`. Make it with "
            "`load_gymnasium(name, n_envs)`, or with `gymnasium.make_vec(name, n_envs, "
            'vectorization_mode="sync", vector_kwargs={"autoreset_mode": '
            "AutoresetMode.DISABLED})`."
        )
    actions_of(vector_env.single_action_space)


def _autoreset_mode(vector_env: Tree) -> Tree:
    """Gymnasium's own say it themselves; their metadata may be shared with other ones."""
    vector = _gymnasium().vector
    if isinstance(vector_env.unwrapped, vector.SyncVectorEnv | vector.AsyncVectorEnv):
        return vector_env.unwrapped.autoreset_mode
    return vector_env.metadata.get("autoreset_mode")


def _gymnasium() -> ModuleType:
    try:
        import gymnasium
        import gymnasium.vector
    except ImportError as error:
        raise ImportError(
            'Gymnasium could not be imported. Install it with `pip install "eqx-ppo[gymnasium]"`.'
        ) from error
    return gymnasium
