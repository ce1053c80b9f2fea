"""What one environment step leaves behind."""

from typing import NamedTuple

from jaxtyping import Array, Bool

from eqx_ppo._typing import BatchTree, Extras, Metrics, State, Tree
from eqx_ppo.envs import EnvState
from eqx_ppo.networks import PPONetworkOutput


class Transition(NamedTuple):
    """One step of every environment `[B, ...]`, or a rollout of them `[T, B, ...]`.

    - `obs`: what the network saw.
    - `network_output`: what it returned.
    - `rewards`: one `[B]` float32 array per reward; 0 where not `valid`.
    - `terminated`, `truncated`: how the episode ended, if it did; never both.
    - `done`: either of them; environment and carry were reset before the next step.
    - `valid`: false where the environment's state, observation or reward became
        non-finite. Such a step ends the episode (as a termination), and losses, advantages
        and metrics leave it out.
    - `next_values`: the value of the true next observation, in the tree of the rewards; 0
        at truncated steps of a rollout that masks them (`PPOConfig.truncation`).
    - `rollout_extras`: what the modules emitted, for the replay and the statistics.
    - `metrics`: `{"env": ..., "net": ...}`, each only if it was asked for.
    """

    obs: BatchTree
    network_output: PPONetworkOutput
    rewards: Tree
    terminated: Bool[Array, "*T B"]
    truncated: Bool[Array, "*T B"]
    done: Bool[Array, "*T B"]
    valid: Bool[Array, "*T B"]
    next_values: Tree
    rollout_extras: Extras
    metrics: Metrics


class RolloutState(NamedTuple):
    """Everything that goes from one environment step to the next.

    - `env_state`: leaves `[B, ...]` (or shared). Where `fresh`, the last valid state of the last
        episode, or zeros before the first one.
    - `network_state`: the carry, leaves `[B, ...]`. Where `fresh`, that of the last episode.
    - `reset_state`: what the reset strategy keeps.
    - `fresh`: which environments begin an episode with the next step. It gives them a new state
        and a new carry first.
    - `begun`: whether there have been episodes before.
    """

    env_state: EnvState
    network_state: State
    reset_state: Tree
    fresh: Bool[Array, " B"]
    begun: Bool[Array, ""]


class Rollout(NamedTuple):
    """A rollout, with what the replay of its segments starts from.

    - `transitions`: leaves `[T, B, ...]`.
    - `network_states`: the carry at the start of each segment, leaves `[S, B, ...]`.
    - `fresh`: where an episode begins there, so that the carry has to be made anew.
    """

    transitions: Transition
    network_states: State
    fresh: Bool[Array, "S B"]
