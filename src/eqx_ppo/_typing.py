"""The vocabulary of axis names and type aliases, and the only home of `Any`.

Axes: `T` time (rollout or segment length), `B` batch (environments), `S` segments of
one rollout, `A` action features. `*feat` stands for the feature axes of one leaf.
Inside a `PyTree` the feature axes are written `...`, because a named axis would have
to agree between leaves.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

Tree: TypeAlias = PyTree
"""Any pytree; used where the structure is the caller's business."""

Batch: TypeAlias = Float[Array, "B ..."]
"""One floating-point array `[B, *feat]`: one step of a batch of environments."""

TimeBatch: TypeAlias = Float[Array, "T B ..."]
"""One floating-point array `[T, B, *feat]`: a sequence of such steps."""

BatchTree: TypeAlias = PyTree[Shaped[Array, "B ..."]]
"""A pytree whose leaves are `[B, *feat]`: one step of a batch of environments."""

TimeBatchTree: TypeAlias = PyTree[Shaped[Array, "T B ..."]]
"""A pytree whose leaves are `[T, B, *feat]`: a sequence of such steps."""

State: TypeAlias = PyTree
"""The carry state of a module: leaves `[B, ...]`, or `()` for none."""

Extras: TypeAlias = PyTree
"""What a module hands from rollout to replay; parallel to its state, `None` for nothing."""

Metrics: TypeAlias = dict[str, Any]
"""Metric names to values (possibly nested)."""

EnvState: TypeAlias = Any
"""The state of a user's environment; see `eqx_ppo.envs.EnvState` for its protocol."""

TreeDef: TypeAlias = Any
"""The structure of a pytree (`jax.tree_util.PyTreeDef`, which is not a type to checkers)."""

Activation: TypeAlias = Callable[[Array], Array]
"""An elementwise function."""

Initializer: TypeAlias = Callable[..., Array]
"""A `jax.nn.initializers` style function `(key, shape, dtype) -> array`."""

if TYPE_CHECKING:
    KeyLike: TypeAlias = PRNGKeyArray
else:
    # Checked by `eqx_ppo._keys.as_key`, whose message says how to make a key.
    KeyLike: TypeAlias = object
"""A PRNG key: typed (`jax.random.key`) or raw (`jax.random.PRNGKey`)."""
