"""Containers that work key by key: `Map`, `Concat` and `Merge`."""

from collections.abc import Mapping
from typing import final

import jax.numpy as jnp
from jaxtyping import Array

from eqx_ppo._typing import Tree
from eqx_ppo.networks._container import Call, Child, Container
from eqx_ppo.networks._parallel import merge_names


@final
class Map(Container):
    """Feeds each entry of a dict to the child of its name and returns a dict of the outputs.

    Entries without a child are dropped. With samplers as children it is a multi-part policy:
    `Map(arm=NormalTanhSampler(...), leg=NormalTanhSampler(...))`.
    """

    def __init__(self, children: Mapping[str, Child] | None = None, /, **named: Child):
        """**Arguments:**

        - `children`, or keywords: keys of the input to modules.
        """
        super().__init__(merge_names("Map", children, named))

    def wire(self, call: Call, x: Tree) -> dict[str, Tree]:
        """One child per key."""
        entries = entries_of("Map", x, self.names)
        return {name: call(name, entries[name]) for name in self.names}


@final
class Concat(Container):
    """Feeds each entry of a dict to the child of its name and concatenates the outputs.

    The outputs are joined on their last axis, in the order in which the children were given.
    """

    def __init__(self, children: Mapping[str, Child] | None = None, /, **named: Child):
        """**Arguments:**

        - `children`, or keywords: keys of the input to modules, in the order of the output.
        """
        super().__init__(merge_names("Concat", children, named))

    def wire(self, call: Call, x: Tree) -> Array:
        """One child per key, then one concatenation."""
        entries = entries_of("Concat", x, self.names)
        parts = [call(name, entries[name]) for name in self.names]
        return call.local(lambda *arrays: jnp.concatenate(arrays, axis=-1), *parts)


@final
class Merge(Container):
    """Feeds the same input to every child and merges the dicts that they return.

    **Raises:** when called, `TypeError` for a child that does not return a dict and
    `ValueError` for a key that two children return.
    """

    def __init__(self, children: Mapping[str, Child] | None = None, /, **named: Child):
        """**Arguments:**

        - `children`, or keywords: names to modules that return dicts.
        """
        super().__init__(merge_names("Merge", children, named))

    def wire(self, call: Call, x: Tree) -> dict[str, Tree]:
        """Every child sees `x`."""
        merged = {}
        origin = {}
        for name in self.names:
            output = call(name, x)
            if not isinstance(output, Mapping):
                raise TypeError(
                    f"Each child of `Merge` must return a dict, but `{name}` returned a "
                    f"`{type(output).__name__}`. Use `Parallel` to name the outputs."
                )
            for key, value in output.items():
                if key in merged:
                    raise ValueError(
                        f"`Merge` got the key {key!r} from both `{origin[key]}` and `{name}`. "
                        "Each key may come from one child."
                    )
                merged[key], origin[key] = value, name
        return merged


def entries_of(owner: str, x: Tree, names: tuple[str, ...]) -> Mapping[str, Tree]:
    """`x` itself, once it is known to be a mapping with all of `names`."""
    if not isinstance(x, Mapping):
        raise TypeError(
            f"`{owner}` takes a dict with the keys {list(names)}, but got a "
            f"`{type(x).__name__}`. Put a `Filter`, `Splitter` or `Parallel` before it."
        )
    missing = [name for name in names if name not in x]
    if missing:
        raise ValueError(
            f"`{owner}` needs the keys {list(names)}, but {missing} are missing; got {list(x)}."
        )
    return x
