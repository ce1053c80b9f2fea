"""Several modules on one input."""

from collections.abc import Mapping
from typing import final

from eqx_ppo._typing import Tree
from eqx_ppo.networks._container import Call, Child, Container
from eqx_ppo.networks._module import StatefulModule


@final
class Parallel(Container):
    """Feeds the same input to every child and returns a dict of their outputs.

    ```python
    Parallel(policy=make_mlp([8, 64, 4], key=key1), value=make_mlp([8, 64, 1], key=key2))
    ```
    """

    def __init__(self, children: Mapping[str, Child] | None = None, /, **named: Child):
        """**Arguments:**

        - `children`, or keywords: names to modules, in order.
        """
        super().__init__(merge_names(type(self).__name__, children, named))

    def wire(self, call: Call, x: Tree) -> Tree:
        """Every child sees `x`."""
        return {name: call(name, x) for name in self.names}


def merge_names(
    owner: str,
    children: Mapping[str, StatefulModule] | None,
    named: Mapping[str, StatefulModule],
) -> dict[str, StatefulModule]:
    """Joins children given as a dict and as keywords; each container takes both forms."""
    children = {} if children is None else children
    twice = sorted(children.keys() & named.keys())
    if twice:
        raise ValueError(f"`{owner}` got the names {twice} both in its dict and as keywords.")
    merged = {**children, **named}
    if not merged:
        raise ValueError(f"`{owner}` needs at least one child, but got none.")
    return merged
