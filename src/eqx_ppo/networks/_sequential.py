"""One module after another."""

from collections.abc import Sequence
from typing import TypeVar, final

from eqx_ppo._typing import Tree
from eqx_ppo.networks._container import Call, Child, Container
from eqx_ppo.networks._module import StatefulModule

_Value = TypeVar("_Value")


@final
class Sequential(Container):
    """Feeds each layer's output to the next.

    `network.layers[i]` and `network[i]` are the layers; state and extras are lists. An empty
    sequence is the identity.
    """

    def __init__(self, layers: Sequence[Child]):
        """**Arguments:**

        - `layers`: the modules, first to last.
        """
        super().__init__({str(index): layer for index, layer in enumerate(layers)})

    @property
    def layers(self) -> tuple[StatefulModule, ...]:
        """The modules, first to last."""
        return self.modules

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, index: int | str | slice) -> StatefulModule:
        """The layer at a position (negative ones count from the end), or a part as a new one."""
        if isinstance(index, slice):
            return Sequential(self.modules[index])
        return self.modules[int(index)]

    def wire(self, call: Call, x: Tree) -> Tree:
        """Each layer's output is the next one's input."""
        for name in self.names:
            x = call(name, x)
        return x

    def pack(self, values: dict[str, _Value]) -> list[_Value]:
        """One entry per layer, in order."""
        return list(values.values())

    def segment(self, name: str) -> str:
        """`.layers[i]`."""
        return f".layers[{name}]"
