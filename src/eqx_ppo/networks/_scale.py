"""Multiplication by a constant."""

from typing import final

import jax
import jax.numpy as jnp

from eqx_ppo._typing import BatchTree, Extras, State
from eqx_ppo.networks._module import StatefulModuleOutput, StatelessModule


@final
class Scale(StatelessModule):
    """Multiplies every leaf by a fixed factor, which is not trained.

    Floating-point leaves keep their dtype; others become float32.
    """

    factor: float

    def __init__(self, factor: float):
        """**Arguments:**

        - `factor`: a Python number.
        """
        self.factor = float(factor)

    def __call__(
        self, state: State, x: BatchTree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Returns `factor * x`."""

        def scale(leaf):
            leaf = leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(jnp.float32)
            return leaf * self.factor

        return StatefulModuleOutput(jax.tree.map(scale, x), state)
