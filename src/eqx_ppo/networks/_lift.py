"""Equinox layers as modules of a network."""

from collections.abc import Callable
from typing import final

import equinox as eqx
import jax

from eqx_ppo._typing import BatchTree, Extras, State, Tree
from eqx_ppo.networks._module import StatefulModuleOutput, StatelessModule


@final
class Lift(StatelessModule):
    """Applies a function of one sample, such as an Equinox layer, to each of a batch.

    ```python
    Lift(eqx.nn.LayerNorm(64))
    Lift(eqx.nn.MLP(8, 2, 64, 2, key=key))
    ```
    """

    layer: Callable[[Tree], Tree]

    def __init__(self, layer: Callable[[Tree], Tree]):
        """**Arguments:**

        - `layer`: maps one sample (leaves `[*feat]`) to an output. Its arrays are trained.

        **Raises:** `TypeError` for a layer that needs `eqx.nn.State` or a key at each call.
        """
        for node in jax.tree.leaves(layer, is_leaf=_is_refused):
            if _is_refused(node):
                need = "draws a key" if isinstance(node, eqx.nn.Dropout) else "needs `eqx.nn.State`"
                raise TypeError(
                    f"`Lift` takes plain functions of one sample, but `{type(layer).__name__}` "
                    f"contains a `{type(node).__name__}`, which {need} at each call. Write a "
                    "`StatefulModule` (or `RandomModule`) instead: its state is explicit and is "
                    "replayed exactly."
                )
        self.layer = layer

    def __call__(
        self, state: State, x: BatchTree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Maps the layer over the batch axis."""
        return StatefulModuleOutput(jax.vmap(self.layer)(x), state)


def _is_refused(node: object) -> bool:
    if isinstance(node, eqx.nn.StatefulLayer):
        return node.is_stateful()  # an `eqx.nn.Sequential` is, or is not, by what it contains
    if isinstance(node, eqx.nn.Dropout):
        return not (isinstance(node.p, int | float) and node.p == 0)
    return isinstance(node, eqx.nn.StateIndex)
