"""A fully connected layer."""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from eqx_ppo._keys import as_key
from eqx_ppo._typing import Activation, Extras, Initializer, KeyLike, State
from eqx_ppo.networks._errors import check_features
from eqx_ppo.networks._module import StatefulModuleOutput, StatelessModule
from eqx_ppo.ops import linear


@final
class Dense(StatelessModule):
    """`activation(x @ kernel + bias)`, from `[B, in_features]` to `[B, out_features]`.

    The kernel starts LeCun uniform and the bias zero, as published PPO configurations have
    it (Equinox's `Linear` follows torch).
    """

    kernel: Float[Array, "in_features out_features"]
    bias: Float[Array, " out_features"] | None
    activation: Activation | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation | None = None,
        use_bias: bool = True,
        kernel_init: Initializer | None = None,
        key: KeyLike,
    ):
        """**Arguments:**

        - `in_features`, `out_features`: sizes of the input and the output, at least 1.
        - `activation`: an elementwise function, or `None` for a linear layer.
        - `use_bias`: whether a bias is added.
        - `kernel_init`: a `jax.nn.initializers` function; LeCun uniform by default.
        - `key`: a PRNG key for the kernel.
        """
        if in_features < 1 or out_features < 1:
            raise ValueError(
                f"`Dense` needs sizes of at least 1, but got in_features={in_features} and "
                f"out_features={out_features}."
            )
        kernel_init = jax.nn.initializers.lecun_uniform() if kernel_init is None else kernel_init
        self.kernel = kernel_init(as_key(key), (in_features, out_features), jnp.float32)
        self.bias = jnp.zeros(out_features, jnp.float32) if use_bias else None
        self.activation = activation

    @property
    def in_features(self) -> int:
        """The size of the input."""
        return self.kernel.shape[0]

    @property
    def out_features(self) -> int:
        """The size of the output."""
        return self.kernel.shape[1]

    def __call__(
        self, state: State, x: Shaped[Array, "B ..."], rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Maps `[B, in_features]` to `[B, out_features]`."""
        check_features(self, x, (self.in_features,))
        y = linear(x.astype(self.kernel.dtype), self.kernel)
        if self.bias is not None:
            y = y + self.bias[None]
        if self.activation is not None:
            y = self.activation(y)
        return StatefulModuleOutput(y, state)
