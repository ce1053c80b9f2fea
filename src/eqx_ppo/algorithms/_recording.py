"""Recording: the states that one environment goes through, to draw them or to look at them."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import EnvState, KeyLike, Tree
from eqx_ppo.algorithms._config import LoggingLevel
from eqx_ppo.algorithms._rollout import batched_env
from eqx_ppo.algorithms._step import Stepper, StepState, advance, renew
from eqx_ppo.envs import Env, PooledReset, own_resets
from eqx_ppo.networks import StatefulModule


class Recording(NamedTuple):
    """The steps of one environment, leaves `[T, ...]` without an axis for environments.

    - `env_states`: the states that the network acted in. The first one comes from `reset`, and
        so does the one after each step that is `done`.
    - `actions`: what it did.
    - `rewards`: what each step gave, float32.
    - `done`: which steps ended an episode.
    - `length`: how many of the T steps were taken; what follows them has no meaning.
    """

    env_states: EnvState
    actions: Tree
    rewards: Tree
    done: Bool[Array, " T"]
    length: Int32[Array, ""]


@typed
def record_rollout(
    env: Env,
    network: StatefulModule,
    max_steps: int,
    key: KeyLike,
    *,
    n_episodes: int = 1,
    deterministic: bool = True,
) -> Recording:
    """Runs one environment over some episodes, and keeps every state on the way.

    After an episode's end the environment and the network's carry are reset, as in training.

    **Arguments:**

    - `env`: written for one environment.
    - `network`: outputs a `PPONetworkOutput`; it is not changed.
    - `max_steps`: the number of steps T to make room for; the recording ends with them.
    - `key`: a PRNG key; the same key gives the same recording.
    - `n_episodes`: the recording ends when so many episodes have.
    - `deterministic`: act by the mode of the policy instead of sampling.

    **Raises:** `ValueError` for a number that is not at least 1.
    """
    if max_steps < 1 or n_episodes < 1:
        raise ValueError(
            "`record_rollout` needs at least one step and one episode, but got "
            f"max_steps={max_steps} and n_episodes={n_episodes}."
        )
    reset_key, network_key, step_key = jax.random.split(as_key(key), 3)
    network = eqx.nn.inference_mode(network) if deterministic else network
    stepper, state = _start(env, network, reset_key, network_key)

    def step(state, time):
        state = renew(stepper, state, jax.random.fold_in(step_key, time))
        next_state, transition, _ = advance(stepper, state)
        seen = _single(stepper, stepper.unpack(state).env_state)
        rows = (transition.network_output.actions, transition.rewards, transition.done)
        actions, rewards, done = jax.tree.map(lambda leaf: leaf[0], rows)
        return next_state, Recording(seen, actions, rewards, done, length=time)

    def recording(carry):
        time, n_ended, _, _ = carry
        return (time < max_steps) & (n_ended < n_episodes)

    def record(carry):
        time, n_ended, state, recorded = carry
        state, row = step(state, time)
        recorded = jax.tree.map(lambda rows, one: rows.at[time].set(one), recorded, row)
        return time + 1, n_ended + row.done.astype(jnp.int32), state, recorded

    zero = jnp.zeros((), jnp.int32)
    _, row = jax.eval_shape(step, state, zero)
    empty = jax.tree.map(lambda leaf: jnp.zeros((max_steps, *leaf.shape), leaf.dtype), row)
    length, _, _, recorded = jax.lax.while_loop(recording, record, (zero, zero, state, empty))
    return recorded._replace(length=length)


def _start(
    env: Env, network: StatefulModule, reset_key: Array, network_key: Array
) -> tuple[Stepper, StepState]:
    """The state before all episodes, and what steps it."""
    strategy = own_resets(env, PooledReset())
    network_state = network.initialize_state(1, key=network_key)
    batched = batched_env(env, network, network_state, 1)
    stepper = Stepper(batched, network, strategy, LoggingLevel.NONE)
    return stepper, stepper.pack(stepper.start(network_state, 1, reset_key))


def _single(stepper: Stepper, env_state: EnvState) -> EnvState:
    """The state of the only environment."""
    leaves = zip(jax.tree.leaves(env_state), stepper.env.axes(env_state, 1), strict=True)
    return stepper.env.spec.unflatten([leaf[0] if has_axis else leaf for leaf, has_axis in leaves])
