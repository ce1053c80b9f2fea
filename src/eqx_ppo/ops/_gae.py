"""Generalized advantage estimation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

from eqx_ppo._checks import typed


@typed
def gae(
    rewards: Float[Array, "T B"],
    values: Float[Array, "T B"],
    next_values: Float[Array, "T B"],
    terminated: Bool[Array, "T B"],
    truncated: Bool[Array, "T B"],
    *,
    gamma: ScalarLike,
    lambda_: ScalarLike,
    valid: Bool[Array, "T B"] | None = None,
) -> Float[Array, "T B"]:
    r"""Generalized advantage estimates.

    $$
    \delta_t = r_t + \gamma V(s'_t) (1 - \mathrm{terminated}_t) - V(s_t), \qquad
    A_t = \delta_t + \gamma \lambda (1 - \mathrm{ended}_t) A_{t+1},
    $$

    where `ended` is `terminated | truncated`. A truncated step (a time limit) bootstraps from
    the value of the observation that the episode was cut at; a terminated one from nothing.
    Where both flags are set, termination wins.

    **Arguments:**

    - `rewards`, `values`: $r_t$ and $V(s_t)$.
    - `next_values`: $V(s'_t)$, the value of the true next observation, before any reset.
        It is not used where `terminated`.
    - `terminated`, `truncated`: how the step ended its episode, if it did.
    - `gamma`: discount factor, in [0, 1].
    - `lambda_`: trace decay, in [0, 1].
    - `valid`: where false, the temporal difference $\delta_t$ counts as 0.

    **Returns:** the advantages $A_t$. The value targets are `values + advantages`.

    **Source:** Schulman et al., "High-Dimensional Continuous Control Using Generalized
    Advantage Estimation" (2016), equations 11 to 16; Pardo et al., "Time Limits in
    Reinforcement Learning" (2018), for truncation.
    """
    bootstraps = jnp.where(terminated, 0.0, next_values)
    deltas = rewards + gamma * bootstraps - values
    if valid is not None:
        deltas = jnp.where(valid, deltas, 0.0)
    decays = jnp.where(terminated | truncated, 0.0, gamma * lambda_)

    def accumulate(next_advantage, delta_and_decay):
        delta, decay = delta_and_decay
        advantage = delta + decay * next_advantage
        return advantage, advantage

    if deltas.shape[0] == 0:
        return deltas
    start = jnp.zeros_like(deltas[0])
    _, advantages = jax.lax.scan(accumulate, start, (deltas, decays), reverse=True)
    return advantages
