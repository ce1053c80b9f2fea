"""The spaces of Gymnasium: what their values look like on the device and on the host."""

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._typing import Tree
from eqx_ppo.envs._actions import (
    Actions,
    DiscreteActions,
    MultiDiscreteActions,
    continuous_actions,
)


def device_values(space: Tree) -> Tree:
    """What a value of `space` looks like on the device: `jax.ShapeDtypeStruct` leaves.

    64-bit numbers have 32 bits there.

    **Raises:** `TypeError` for a space whose values are not arrays of one shape.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: device_values(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(device_values, space.spaces))
    arrays = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(space, arrays):
        raise TypeError(
            f"Values of `{space}` are not arrays of one shape, as compiled code needs. Expected "
            "`Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or a `Dict` or `Tuple` of those. "
            "Turn them into such a space with a wrapper of Gymnasium."
        )
    dtype = np.dtype(space.dtype)
    dtype = np.dtype(np.float32) if dtype == np.float64 else jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(space.shape), dtype)


def sizes(values: Tree) -> Tree:
    """The length of every vector in `values`, and the shape of what is none."""
    return jax.tree.map(lambda x: x.shape[0] if len(x.shape) == 1 else x.shape, values)


def actions_of(space: Tree) -> Actions:
    """Which actions a space holds.

    **Raises:** `TypeError` for a space that no sampler has values for.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: actions_of(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return DiscreteActions(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscreteActions(tuple(int(n) for n in space.nvec.reshape(-1)))
    if isinstance(space, spaces.MultiBinary):
        return MultiDiscreteActions((2,) * int(np.prod(space.shape)))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return continuous_actions(space.low, space.high, tuple(space.shape))
    raise TypeError(
        f"No sampler draws actions from `{space}`. Expected a `Box` of floating-point numbers, "
        "`Discrete`, `MultiDiscrete`, `MultiBinary`, or a `Dict` of those. Turn the actions into "
        "such a space with a wrapper of Gymnasium."
    )


def host_actions(space: Tree, actions: Tree) -> Tree:
    """A batch of actions as the space has them: its dtype and shape, choices from its start."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: host_actions(part, actions[name]) for name, part in space.spaces.items()}
    array = np.asarray(actions).reshape(-1, *space.shape).astype(space.dtype)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        array = array + np.asarray(space.start, space.dtype)
    return array


def device_batch(values: Tree, batch: Tree) -> Tree:
    """A batch from the host, in the dtypes of the device."""
    if isinstance(values, dict):
        return {name: device_batch(part, batch[name]) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(map(device_batch, values, batch))
    return np.asarray(batch, values.dtype)


def zeros(values: Tree, n: int) -> Tree:
    """`n` rows of zeros."""
    return jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), values)
