"""From a network's two ports to what PPO reads."""

from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_ppo._typing import Tree
from eqx_ppo.networks._container import Call, Child, Container
from eqx_ppo.networks._module import StatefulModule
from eqx_ppo.networks._samplers import Sample


class PPONetworkOutput(NamedTuple):
    """The output of an actor-critic network.

    - `actions`: the actions, leaves `[B, A]`.
    - `log_likelihoods`: one `[B]` array per sampler, in the tree that the samplers form.
    - `value_estimates`: one `[B]` array per reward.
    """

    actions: Tree
    log_likelihoods: Tree
    value_estimates: Tree


@final
class PPOAdapter(Container):
    """Runs an action port and a value port on one input and packages both for PPO.

    ```python
    PPOAdapter(
        action=Sequential([*actor_layers, NormalTanhSampler(entropy_weight=1e-2)]),
        value=critic,
    )
    ```
    """

    def __init__(self, action: Child, value: Child):
        """**Arguments:**

        - `action`: outputs a `Sample`, or a tree of them (one per part of a structured
            action).
        - `value`: outputs `[B, 1]` or `[B]`, or a tree of those in the structure of the
            rewards.
        """
        super().__init__({"action": action, "value": value})

    @property
    def action(self) -> StatefulModule:
        """The action port."""
        return self.modules[0]

    @property
    def value(self) -> StatefulModule:
        """The value port."""
        return self.modules[1]

    def segment(self, name: str) -> str:
        """`.action` or `.value`."""
        return f".{name}"

    def wire(self, call: Call, x: Tree) -> PPONetworkOutput:
        """Both ports see `x`."""
        samples = call("action", x)
        values = call("value", x)
        for sample in jax.tree.leaves(samples, is_leaf=_is_sample):
            if not _is_sample(sample):
                raise TypeError(
                    "The action port of `PPOAdapter` must output a `Sample`, or a tree of them, "
                    f"but a leaf is a `{type(sample).__name__}`. End it with a sampler such as "
                    "`NormalTanhSampler`."
                )
        return PPONetworkOutput(
            actions=jax.tree.map(lambda sample: sample.action, samples, is_leaf=_is_sample),
            log_likelihoods=jax.tree.map(
                lambda sample: call.local(_per_env, sample.log_likelihood),
                samples,
                is_leaf=_is_sample,
            ),
            value_estimates=jax.tree.map(lambda value: call.local(_as_scalar, value), values),
        )


def _is_sample(node: object) -> bool:
    return isinstance(node, Sample)


def _per_env(log_likelihood: Array) -> Array:
    if log_likelihood.ndim != 1:
        raise ValueError(
            "A sampler must give one log-likelihood per environment, [B], but gave "
            f"{list(log_likelihood.shape)}. Sum it over the features of the action."
        )
    return log_likelihood.astype(jnp.float32)


def _as_scalar(value: Array) -> Array:
    """`[B, 1]` to `[B]`, by rank; `[B]` stays, also for B = 1. Always float32."""
    if value.ndim == 1:
        return value.astype(jnp.float32)
    if value.ndim == 2 and value.shape[1] == 1:
        return value[:, 0].astype(jnp.float32)
    raise ValueError(
        f"The value port of `PPOAdapter` must output [B, 1] or [B] per reward, but got "
        f"{list(value.shape)}. Give the critic one output."
    )
