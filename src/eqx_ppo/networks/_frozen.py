"""Which arrays of a network are trained, and which are not."""

from typing import final

import equinox as eqx
import jax

from eqx_ppo._typing import Tree


class Frozen(eqx.Module):
    """Base of arrays that are part of a network but are not trained.

    Gradients, optimizer state, weight decay, gradient norms and weight logging leave out
    every array below a node of this type. Subclass it, or `Statistics`, for arrays with a
    meaning of their own; `Constant` serves for a plain table.
    """


class Statistics(Frozen):
    """Base of running statistics, which move only through `update_statistics`."""


@final
class Constant(Frozen):
    """A pytree of fixed arrays, for example a mask or a table.

    ```python
    class Masked(StatelessModule):
        mask: Constant

        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(x * self.mask.value, state)
    ```
    """

    value: Tree


def trainable(network: Tree) -> Tree:
    """The mask of what is trained: floating-point arrays outside `Frozen` nodes.

    **Returns:** a tree of the structure of `network` with a boolean at every leaf, as
    `equinox.partition` and `optax.masked` take it.
    """

    def mask(node):
        if isinstance(node, Frozen):
            return jax.tree.map(lambda _: False, node)
        return eqx.is_inexact_array(node)

    return jax.tree.map(mask, network, is_leaf=lambda node: isinstance(node, Frozen))


def holds_statistics(module: Tree) -> bool:
    """Whether any node of `module` is a `Statistics`."""
    nodes = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, Statistics))
    return any(isinstance(node, Statistics) for node in nodes)
