"""What a sampler is: one call for all of them, over a distribution of their own.

The rollout stores the sample in `rollout_extras`; the replay reads it back and evaluates it
under the current weights. That is written here, once.
"""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key, Shaped

from eqx_ppo._checks import check_methods
from eqx_ppo._typing import BatchTree, Extras, Metrics
from eqx_ppo.networks._module import (
    RandomModule,
    RandomState,
    StatefulModuleOutput,
    advance,
    draw_keys,
)


class Sample(NamedTuple):
    """What a sampler outputs: an action `[B, *feat]` and its log-likelihood `[B]`."""

    action: Array
    log_likelihood: Array


class ActionDistribution(eqx.Module):
    """A distribution of actions for every environment of a batch.

    A sampler makes one from its input at every call. Its *raw* value is what is drawn, stored
    in the rollout and evaluated in the replay; the action is a function of it. Choose a raw
    value from which the log-likelihood follows without loss: the value before a squashing,
    not the squashed and rounded one.

    Fields are arrays that lead with `[B]`. Everything is per sample, and float32 except for
    integer actions.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(cls)

    @abc.abstractmethod
    def draw(self, keys: Key[Array, " B"]) -> Shaped[Array, "B ..."]:
        """A raw value, each environment's from its own key. It carries no gradient."""

    @abc.abstractmethod
    def mode(self) -> Shaped[Array, "B ..."]:
        """The raw value of the deterministic action."""

    @abc.abstractmethod
    def action(self, raw: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
        """The action of a raw value."""

    @abc.abstractmethod
    def log_likelihood(self, raw: Shaped[Array, "B ..."]) -> Float[Array, " B"]:
        """The log-density (or log-probability) of the *action* of a raw value.

        Summed over the features of the action.
        """

    @abc.abstractmethod
    def entropy(self) -> Float[Array, " B"]:
        """The entropy in nats, summed over the features of the action."""

    @abc.abstractmethod
    def metrics(self) -> Metrics:
        """What to log besides the entropy: names to arrays `[B, ...]`."""


class ActionSampler(RandomModule):
    """From distribution parameters to a `Sample`; subclass it for a distribution of your own.

    A subclass has the fields `entropy_weight` and `inference` and says what its distribution
    is; the rest is written here. The raw value that was drawn is the rollout extra, and the
    replay evaluates it under the current weights. The entropy bonus is the penalty
    `-entropy_weight * H`, whose H is the metric `entropy`: in nats, and for continuous actions
    a differential entropy, which may be negative. The gradient goes through the
    log-likelihood and the entropy, never through the sample. With `inference=True` (see
    `equinox.nn.inference_mode`) the action is the mode of the distribution.
    """

    entropy_weight: eqx.AbstractVar[float]
    inference: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def distribution(self, x: BatchTree) -> ActionDistribution:
        """The distribution with the parameters `x`, leaves `[B, ...]`."""

    @abc.abstractmethod
    def input_size(self, action_size: int) -> int:
        """How many parameters an action of `action_size` numbers takes.

        **Raises:** `ValueError` if the sampler is made for another `action_size`.
        """

    @property
    @abc.abstractmethod
    def bounds(self) -> tuple[ArrayLike, ArrayLike] | None:
        """Between which numbers the action lies, or one pair of them per feature.

        `None` for actions that are unbounded, or integers.
        """

    def __call__(
        self, state: RandomState, x: BatchTree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Samples in rollout and inference; evaluates the stored sample in replay."""
        distribution = self.distribution(x)
        if rollout_extras is not None:
            raw = rollout_extras
        elif self.inference:
            raw = distribution.mode()
        else:
            raw = jax.lax.stop_gradient(distribution.draw(draw_keys(state)))
        log_likelihood = distribution.log_likelihood(raw)
        entropy = distribution.entropy()
        _check_per_env(distribution, state, log_likelihood=log_likelihood, entropy=entropy)
        return StatefulModuleOutput(
            output=Sample(distribution.action(raw), log_likelihood),
            next_state=advance(state),
            rollout_extras=raw,
            regularization_loss=-self.entropy_weight * entropy,
            metrics={**distribution.metrics(), "entropy": entropy},
        )


def check_entropy_weight(sampler: ActionSampler) -> None:
    """Checks that the weight of the entropy bonus is not negative (or NaN)."""
    if not sampler.entropy_weight >= 0:
        raise ValueError(
            f"`{type(sampler).__name__}` needs entropy_weight >= 0, but got "
            f"{sampler.entropy_weight}."
        )


def split_parameters(
    sampler: ActionSampler, x: Shaped[Array, "B ..."], what: str
) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
    """The two halves of an input `[B, 2 * A]`, in float32; `what` names them in the error."""
    if x.ndim != 2 or x.shape[1] % 2 != 0 or x.shape[1] == 0:
        raise ValueError(
            f"`{type(sampler).__name__}` expected an input [B, 2 * A] of {what}, but got "
            f"{list(x.shape)}. Give the layer before it 2 outputs per action."
        )
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return first, second


def check_action_size(sampler: ActionSampler, got: int, expected: int, why: str) -> None:
    """Checks the size of the action against the one that the sampler was built for."""
    if got != expected:
        raise ValueError(
            f"`{type(sampler).__name__}` has actions of size {expected} ({why}), but "
            f"`action_size` is {got}. Give the size that fits, or another sampler."
        )


def _check_per_env(
    distribution: ActionDistribution, state: RandomState, **values: Float[Array, "..."]
) -> None:
    for name, value in values.items():
        if jnp.shape(value) != state.draws.shape:
            raise ValueError(
                f"`{type(distribution).__name__}.{name}` must give one value per environment, "
                f"shape {state.draws.shape}, but gave {jnp.shape(value)}. Sum it over the "
                "features of the action."
            )
