"""Standardization by running statistics."""

from typing import Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_ppo._tree import merge_time
from eqx_ppo._typing import BatchTree, Extras, State, TimeBatchTree, Tree
from eqx_ppo.networks._errors import check_features, check_keys
from eqx_ppo.networks._frozen import Statistics
from eqx_ppo.networks._module import StatefulModuleOutput, StatelessModule
from eqx_ppo.ops import Moments, count_as_float, merge_moments, new_moments


@final
class NormalizerStatistics(Statistics):
    """The moments of every input leaf."""

    moments: Tree  # of Moments


@final
class Normalizer(StatelessModule):
    """Standardizes each feature by the mean and deviation of everything seen so far.

    `(x - mean) / std`, in float32 whatever the input's dtype. The statistics live in the
    module and move only through `update_statistics`, by the inputs that the module saw in
    the rollout, which it emits as its extras; so it works at any depth of a network. Before
    the first update the mean is 0 and the deviation `initial_std`. The variance is floored at
    `min_variance`: a constant feature gives 0, and a later departure from it by `d` gives
    `d / sqrt(min_variance)`.
    """

    statistics: NormalizerStatistics
    min_variance: float = eqx.field(static=True)
    initial_std: float = eqx.field(static=True)

    def __init__(self, shape: Tree, *, min_variance: float = 1e-6, initial_std: float = 10.0):
        """**Arguments:**

        - `shape`: feature shape of the input: an int, a tuple, or a pytree of those for a
            structured input, whose leaves are standardized each on its own.
        - `min_variance`: the floor under the variance.
        - `initial_std`: the deviation before the first update.

        **Raises:** `ValueError` for a negative size or a non-positive floor or deviation.
        """
        if not (min_variance > 0 and initial_std > 0):
            raise ValueError(
                "`Normalizer` needs a positive `min_variance` and `initial_std`, but got "
                f"{min_variance} and {initial_std}."
            )
        shapes = jax.tree.map(_as_shape, shape, is_leaf=_is_shape)
        self.statistics = NormalizerStatistics(jax.tree.map(new_moments, shapes, is_leaf=_is_shape))
        self.min_variance = min_variance
        self.initial_std = initial_std

    @property
    def shape(self) -> Tree:
        """The feature shape of every input leaf."""
        return self._per_leaf(lambda moments: moments.mean.shape)

    @property
    def mean(self) -> Tree:
        """The running mean, in the structure and shapes of the input."""
        return self._per_leaf(lambda moments: moments.mean)

    @property
    def std(self) -> Tree:
        """The deviation that inputs are divided by."""
        return self._per_leaf(self._std)

    @property
    def count(self) -> Tree:
        """How many samples each leaf has taken in (exact `Counter`s)."""
        return self._per_leaf(lambda moments: moments.count)

    def __call__(
        self, state: State, x: BatchTree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Standardizes `x` with the statistics as they are, and emits `x`."""
        check_keys(self, x, self._per_leaf(lambda moments: moments.mean))
        normalized = jax.tree_util.tree_map_with_path(
            self._standardize, x, self.statistics.moments, is_leaf=_is_moments
        )
        return StatefulModuleOutput(normalized, state, rollout_extras=x)

    def update_statistics(self, rollout_extras: TimeBatchTree | None) -> Self:
        """Merges the inputs of a rollout, leaves `[T, B, *feat]`, into the statistics.

        `None` (the module was not called) leaves them as they are.
        """
        if rollout_extras is None:
            return self
        moments = jax.tree.map(
            merge_moments,
            self.statistics.moments,
            merge_time(rollout_extras),
            is_leaf=_is_moments,
        )
        return eqx.tree_at(lambda module: module.statistics.moments, self, moments)

    def _standardize(self, path, x: Array, moments: Moments) -> Float[Array, "B ..."]:
        where = f" at `{jax.tree_util.keystr(path)}`" if path else ""
        check_features(self, x, moments.mean.shape, where)
        return (x.astype(jnp.float32) - moments.mean[None]) / self._std(moments)[None]

    def _std(self, moments: Moments) -> Float[Array, "..."]:
        std = jnp.sqrt(jnp.maximum(moments.variance, self.min_variance))
        return jnp.where(count_as_float(moments.count) == 0.0, self.initial_std, std)

    def _per_leaf(self, read) -> Tree:
        return jax.tree.map(read, self.statistics.moments, is_leaf=_is_moments)


def _is_moments(node: object) -> bool:
    return isinstance(node, Moments)


def _is_shape(node: Tree) -> bool:
    """An int or a plain tuple of ints; a NamedTuple of sizes is a structure."""
    return isinstance(node, int) or (
        type(node) is tuple and all(isinstance(size, int) for size in node)
    )


def _as_shape(shape: Tree) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else shape
    if isinstance(shape, bool) or not _is_shape(sizes) or min((*sizes, 0)) < 0:
        raise ValueError(
            f"`Normalizer` takes feature shapes: an int, a tuple of ints of at least 0, or a "
            f"pytree of those. Got `{shape!r}`."
        )
    return sizes
