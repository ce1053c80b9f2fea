"""Stateless modules that only rearrange their input: `Splitter`, `Flattener`, `Filter`."""

from collections.abc import Callable, Mapping
from typing import TypeAlias, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from eqx_ppo._typing import BatchTree, Extras, State, Tree
from eqx_ppo.networks._errors import check_features
from eqx_ppo.networks._module import StatefulModuleOutput, StatelessModule

Selector: TypeAlias = str | tuple[str | int, ...] | Callable[[Tree], Tree]
"""What `Filter` takes for one output: a key, a path of keys and indices, or a function."""


@final
class Splitter(StatelessModule):
    """Cuts the last axis into named slices.

    ```python
    Splitter(position=3, velocity=3)  # [B, 6] -> {"position": [B, 3], "velocity": [B, 3]}
    ```
    """

    names: tuple[str, ...] = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, **sizes: int):
        """**Arguments:**

        - keywords: names to sizes (at least 0), in the order of the slices.
        """
        if not sizes:
            raise ValueError("`Splitter` needs at least one slice, such as `Splitter(a=3, b=2)`.")
        for name, size in sizes.items():
            if isinstance(size, bool) or size < 0:
                raise ValueError(f"`Splitter` takes sizes of at least 0, but got {name}={size!r}.")
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())

    def __call__(
        self, state: State, x: Shaped[Array, "B ..."], rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Maps `[B, sum of sizes]` to a dict of `[B, size]`."""
        check_features(self, x, (sum(self.sizes),))
        output, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            output[name] = x[:, start : start + size]
            start += size
        return StatefulModuleOutput(output, state)


@final
class Flattener(StatelessModule):
    """Flattens each leaf to `[B, -1]` and concatenates them on the last axis.

    Leaves come in the order of the pytree, dict entries sorted by key, eager and compiled
    alike. Leaves of different dtypes are joined as float32.

    ```python
    Flattener(preserve_levels=1)  # {"a": tree, "b": tree} -> {"a": [B, n], "b": [B, m]}
    ```
    """

    preserve_levels: int = eqx.field(static=True)

    def __init__(self, preserve_levels: int = 0):
        """**Arguments:**

        - `preserve_levels`: how many levels of dicts, lists and tuples are kept on top.
        """
        if isinstance(preserve_levels, bool) or preserve_levels < 0:
            raise ValueError(
                f"`Flattener` needs `preserve_levels` of at least 0, but got {preserve_levels!r}."
            )
        self.preserve_levels = preserve_levels

    def __call__(
        self, state: State, x: BatchTree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Flattens what lies below the preserved levels."""
        return StatefulModuleOutput(_flatten_below(x, self.preserve_levels), state)


@final
class Filter(StatelessModule):
    """Picks parts of a pytree and names them.

    ```python
    Filter({"goal": "goal", "joints": ("proprio", "joints", 0), "speed": lambda x: x["v"][:, :1]})
    ```
    """

    names: tuple[str, ...] = eqx.field(static=True)
    selectors: tuple[Selector, ...] = eqx.field(static=True)

    def __init__(self, spec: Mapping[str, Tree]):
        """**Arguments:**

        - `spec`: names of outputs to a key, a path of keys and indices, or a function of
            the whole input (leaves `[B, *feat]`).

        **Raises:** `TypeError` for a selector of another kind.
        """
        for name, selector in spec.items():
            if not isinstance(selector, str | tuple) and not callable(selector):
                raise TypeError(
                    f"`Filter` takes a key, a tuple of keys and indices, or a function for each "
                    f"output, but `{name}` is a `{type(selector).__name__}`."
                )
        self.names = tuple(spec)
        self.selectors = tuple(spec.values())

    def __call__(
        self, state: State, x: BatchTree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Returns a dict with the selected parts."""
        output = {
            name: _select(name, selector, x)
            for name, selector in zip(self.names, self.selectors, strict=True)
        }
        return StatefulModuleOutput(output, state)


def _flatten_below(x: Tree, levels: int) -> Tree:
    if levels == 0:
        leaves = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(x)]
        if not leaves:
            raise ValueError("`Flattener` got an empty tree; there is nothing to concatenate.")
        if len({leaf.dtype for leaf in leaves}) > 1:
            leaves = [leaf.astype(jnp.float32) for leaf in leaves]
        return jnp.concatenate(leaves, axis=-1)
    if isinstance(x, Mapping):
        return {key: _flatten_below(value, levels - 1) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return [_flatten_below(value, levels - 1) for value in x]
    raise TypeError(
        f"`Flattener` should keep {levels} more level(s) of dicts, lists or tuples, but came to "
        f"a `{type(x).__name__}`. Lower `preserve_levels`."
    )


def _select(name: str, selector: Selector, x: Tree) -> Tree:
    if isinstance(selector, str):
        selector = (selector,)
    if not isinstance(selector, tuple):
        return selector(x)
    for depth, part in enumerate(selector):
        try:
            x = x[part]
        except (KeyError, IndexError, TypeError) as error:
            available = list(x) if isinstance(x, Mapping) else f"a `{type(x).__name__}`"
            raise ValueError(
                f"`Filter` cannot find {part!r} (part {depth} of {selector}) for its output "
                f"`{name}`; there is {available}."
            ) from error
    return x
