"""What the gradients of recurrent layers over a sequence have in common."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo.ops._linear import linear

_State = TypeVar("_State")


def state_product(
    state: Float[Array, "*rows H"], kernel: Float[Array, "H O"]
) -> Float[Array, "*rows O"]:
    """`state @ kernel`, in the precision of the kernel."""
    rows = state.reshape(-1, state.shape[-1]).astype(kernel.dtype)
    return linear(rows, kernel).reshape(*state.shape[:-1], kernel.shape[1])


def product_tangent(
    states: Float[Array, "T B H"], kernel: Float[Array, "H O"], tangent: Float[Array, "H O"]
) -> Float[Array, "T B O"]:
    """How the products of all steps change with the kernel alone.

    One product for the whole sequence, and so one for the gradient by the kernel, where a
    scan would add up one per step.
    """
    return jax.jvp(lambda kernel: state_product(states, kernel), (kernel,), (tangent,))[1]


def states_before(first: _State, after: _State, reset: _State, done: Bool[Array, "T B"]) -> _State:
    """The state that each step began with, from those after the steps.

    **Arguments:**

    - `first`: the state of the first step, leaves `[B, H]`.
    - `after`: the state after each step, before any reset, leaves `[T, B, H]`.
    - `reset`: the state after a step that was `done`, leaves `[B, H]`.
    """

    def shift(first, after, reset):
        carried = jnp.where(done[:-1, :, None], reset, after[:-1])
        return jnp.concatenate([first[None], carried])

    return jax.tree.map(shift, first, after, reset)


def masks_like(done: Bool[Array, "T B"], sequence: Float[Array, "T B H"]) -> Bool[Array, "T B H"]:
    """`done` in the shape of a sequence, for a scan that selects with it.

    A scan that had to broadcast it would be split in two by automatic differentiation: one
    for the masks, which need no tangents, and one for the rest.
    """
    return jnp.broadcast_to(done[..., None], sequence.shape)
