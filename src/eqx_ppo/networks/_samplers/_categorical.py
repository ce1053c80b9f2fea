"""Discrete actions, and masks of what is allowed."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from eqx_ppo._typing import BatchTree, Metrics
from eqx_ppo.networks._errors import check_features
from eqx_ppo.networks._samplers._sampler import (
    ActionDistribution,
    ActionSampler,
    check_action_size,
    check_entropy_weight,
)
from eqx_ppo.ops import (
    IMPOSSIBLE,
    categorical_entropy,
    categorical_log_likelihood,
    masked_log_probabilities,
)


class MaskedLogits(NamedTuple):
    """The input of a categorical sampler that may choose only some of the actions.

    ```python
    Lift(lambda x: MaskedLogits(x["logits"], x["mask"]))
    ```

    - `logits`: `[B, n]`.
    - `mask`: bool `[B, n]`, true where an action is allowed. Such an action alone has a
        probability, is drawn or is the mode, and gets a gradient. In a row where nothing is
        allowed every action is equally likely, whatever the logits.
    """

    logits: Array
    mask: Array


@final
class Categorical(ActionDistribution):
    """One choice, or one for each of several components; the raw value is the action."""

    log_probabilities: Float[Array, "B *components n"]

    def draw(self, keys: Key[Array, " B"]) -> Int32[Array, "B *components"]:
        draw = jax.vmap(lambda key, logits: jax.random.categorical(key, logits, axis=-1))
        return draw(keys, self.log_probabilities).astype(jnp.int32)

    def mode(self) -> Int32[Array, "B *components"]:
        return jnp.argmax(self.log_probabilities, axis=-1).astype(jnp.int32)

    def action(self, raw: Int32[Array, "B *components"]) -> Int32[Array, "B *components"]:
        return raw

    def log_likelihood(self, raw: Int32[Array, "B *components"]) -> Float[Array, " B"]:
        return _sum_components(categorical_log_likelihood(raw, self.log_probabilities))

    def entropy(self) -> Float[Array, " B"]:
        return _sum_components(categorical_entropy(self.log_probabilities))

    def metrics(self) -> Metrics:
        return {"largest_probability": jnp.exp(jnp.max(self.log_probabilities, axis=-1))}


@final
class CategoricalSampler(ActionSampler):
    """One of `n` actions, 0 to n - 1.

    Input: logits `[B, n]`, or `MaskedLogits` of that shape. Output `Sample(action int32 [B],
    log_likelihood [B])`. Probabilities are float32.

    The action is the rollout extra. Its entropy lies between 0 and log n. With
    `inference=True` the action is the likeliest one, the first of several.
    """

    n: int = eqx.field(static=True)
    entropy_weight: float
    inference: bool

    def __init__(self, n: int, *, entropy_weight: float, inference: bool = False):
        """**Arguments:**

        - `n`: the number of actions to choose from, at least 1.
        - `entropy_weight`: weight of the entropy bonus, at least 0.
        - `inference`: whether to return the mode instead of a sample.
        """
        self.entropy_weight = entropy_weight
        check_entropy_weight(self)
        _check_sizes(self, (n,))
        self.n = n
        self.inference = inference

    @property
    def bounds(self) -> None:
        """`None`: actions are integers."""
        return

    def input_size(self, action_size: int) -> int:
        """The number of actions to choose from, `n`; an action is one number."""
        check_action_size(self, action_size, 1, f"one choice, of {self.n}")
        return self.n

    def distribution(self, x: BatchTree) -> Categorical:
        """The distribution with the logits `x`."""
        logits, mask = _split_mask(self, x, self.n)
        return Categorical(masked_log_probabilities(logits, mask))


@final
class MultiCategoricalSampler(ActionSampler):
    """Several independent choices at once, component `i` out of `sizes[i]`.

    Input: logits `[B, sum(sizes)]`, those of the first component first, or `MaskedLogits` of
    that shape. Output `Sample(action int32 [B, len(sizes)], log_likelihood [B])`, summed over
    the components like the entropy. Otherwise as `CategoricalSampler`.
    """

    sizes: tuple[int, ...] = eqx.field(static=True)
    entropy_weight: float
    inference: bool

    def __init__(self, sizes: Sequence[int], *, entropy_weight: float, inference: bool = False):
        """**Arguments:**

        - `sizes`: the number of actions to choose from, for each component.
        - `entropy_weight`: weight of the entropy bonus, at least 0.
        - `inference`: whether to return the mode instead of a sample.
        """
        self.entropy_weight = entropy_weight
        check_entropy_weight(self)
        self.sizes = tuple(sizes)
        _check_sizes(self, self.sizes)
        self.inference = inference

    @property
    def bounds(self) -> None:
        """`None`: actions are integers."""
        return

    def input_size(self, action_size: int) -> int:
        """The number of actions to choose from, over all components."""
        n_components = len(self.sizes)
        check_action_size(self, action_size, n_components, f"one choice for each of {self.sizes}")
        return sum(self.sizes)

    def distribution(self, x: BatchTree) -> Categorical:
        """The distribution with the logits `x`; shorter components are filled up."""
        logits, mask = _split_mask(self, x, sum(self.sizes))
        longest = max(self.sizes)
        components = []
        for size, stop in zip(self.sizes, itertools.accumulate(self.sizes), strict=True):
            own = slice(stop - size, stop)
            part = masked_log_probabilities(logits[:, own], None if mask is None else mask[:, own])
            filling = ((0, 0), (0, longest - size))
            components.append(jnp.pad(part, filling, constant_values=IMPOSSIBLE))
        return Categorical(jnp.stack(components, axis=1))


def _sum_components(values: Float[Array, "B *components"]) -> Float[Array, " B"]:
    return values.reshape(values.shape[0], math.prod(values.shape[1:])).sum(axis=-1)


def _check_sizes(sampler: ActionSampler, sizes: tuple[int, ...]) -> None:
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"`{type(sampler).__name__}` needs at least one action to choose from, but got "
            f"{list(sizes)}."
        )


def _split_mask(
    sampler: ActionSampler, x: BatchTree, size: int
) -> tuple[Float[Array, "B n"], Bool[Array, "B n"] | None]:
    """The logits in float32, and the mask if there is one."""
    logits, mask = x if isinstance(x, MaskedLogits) else (x, None)
    if not isinstance(logits, jax.Array):
        raise TypeError(
            f"`{type(sampler).__name__}` takes an array of logits, or `MaskedLogits(logits, "
            f"mask)`, but got a `{type(x).__name__}`. Put a `Lift` before it that makes them."
        )
    check_features(sampler, logits, (size,))
    if mask is not None:
        check_features(sampler, mask, (size,), " `mask`")
        if mask.dtype != jnp.bool_:
            raise TypeError(
                f"`{type(sampler).__name__}` expected a mask of bool, true where an action is "
                f"allowed, but got {mask.dtype}. Compare it, as in `mask > 0`."
            )
    return logits.astype(jnp.float32), mask
