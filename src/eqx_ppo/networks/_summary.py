"""A table of a network: what every module in it returns, and how large it is."""

import dataclasses
from collections import Counter
from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp

from eqx_ppo._checks import typed
from eqx_ppo._typing import Tree
from eqx_ppo.networks._connections import Connections
from eqx_ppo.networks._frozen import trainable
from eqx_ppo.networks._module import StatefulModule
from eqx_ppo.networks._probes import (
    KeyPath,
    Notes,
    Place,
    Size,
    children_of,
    places_of,
    with_probes,
)
from eqx_ppo.networks._table import Column, format_table

_BATCH = 2  # any number will do: nothing is computed


class ModuleSummary(NamedTuple):
    """One module of a network; numbers are its own, without those of modules inside it.

    - `path`: its place, as error messages give it, such as `network.layers[1].action`.
    - `type`: the name of its class.
    - `output`: what it returns for one sample, a tree of `jax.ShapeDtypeStruct` with shapes
        `[*feat]`; `None` if it was not called.
    - `parameters`: how many numbers are trained.
    - `frozen`: how many numbers are in its other arrays: statistics, constants, integers.
    - `state`: how many numbers it carries per environment; a PRNG key counts as its words.
    - `state_bytes`: their size in bytes.
    """

    path: str
    type: str
    output: Tree
    parameters: int
    frozen: int
    state: int
    state_bytes: int


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The modules of a network, outermost first; `str` gives a table.

    `summary["network.layers[1]"]` is the row of one module.
    """

    rows: tuple[ModuleSummary, ...]

    @property
    def parameters(self) -> int:
        """How many numbers of the network are trained."""
        return sum(row.parameters for row in self.rows)

    @property
    def frozen(self) -> int:
        """How many numbers of the network are not trained."""
        return sum(row.frozen for row in self.rows)

    @property
    def state(self) -> int:
        """How many numbers the network carries per environment."""
        return sum(row.state for row in self.rows)

    @property
    def state_bytes(self) -> int:
        """The bytes that the network carries per environment."""
        return sum(row.state_bytes for row in self.rows)

    def __getitem__(self, path: str) -> ModuleSummary:
        """The row of the module at `path`."""
        for row in self.rows:
            if row.path == path:
                return row
        raise ValueError(
            f"There is no module at `{path}`; there are {[r.path for r in self.rows]}."
        )

    def __str__(self) -> str:
        header = ("Module", "Type", "Output", "Parameters", "State/env", "Frozen")
        text, word, number = Column
        columns = (text, word, text, number, number, number)
        cells = [
            (
                [row.path],
                [row.type],
                _output_lines(row.output),
                [f"{row.parameters:,}" if row.parameters else ""],
                [_state_text(row) if row.state else ""],
                [f"{row.frozen:,}" if row.frozen else ""],
            )
            for row in self.rows
        ]
        total = ("Total", "", "", f"{self.parameters:,}", _state_text(self), f"{self.frozen:,}")
        return format_table(header, cells, total, columns)

    __repr__ = __str__


@typed
def summarize(network: StatefulModule, sample_input: Tree) -> Summary:
    """Lists every module of a network with its output shape and its numbers.

    ```python
    print(summarize(network, jax.eval_shape(env.reset, key).obs))
    ```

    **Arguments:**

    - `network`: any module; modules inside it are found in its fields, at any depth.
    - `sample_input`: one input without batch axes, as arrays, NumPy arrays or
        `jax.ShapeDtypeStruct`s.

    **Returns:** a `Summary`, whose `str` is a table of up to 100 columns, or wider if the
    numbers need it. In the table the dtype of an output is left out if it is float32, and
    zeros are left blank. Every leaf of the network counts once, with the innermost module
    that holds it. An array that is in two places of the network counts twice, as it is
    trained: each place gets a gradient of its own.

    **Raises:** what the network raises for such an input, with the place of the module.
    """
    places = list(places_of(network, "network", ()))
    notes = Notes({}, {})
    noting = with_probes(network, "network", notes)
    sample = jax.eval_shape(lambda: sample_input)

    def run() -> Tree:
        x = jax.tree.map(lambda leaf: jnp.zeros((_BATCH, *leaf.shape), leaf.dtype), sample)
        state = noting.initialize_state(_BATCH, key=jax.random.key(0))
        return noting(state, x).output

    jax.eval_shape(run)
    trained, fixed = _count_arrays(network, places)
    states = _own_states(places, notes.states)
    return Summary(
        tuple(
            ModuleSummary(
                path=place.path,
                type=type(place.module).__name__,
                output=notes.outputs.get(place.path),
                parameters=trained[place.keys],
                frozen=fixed[place.keys],
                state=states[place.path].numbers,
                state_bytes=states[place.path].bytes,
            )
            for place in places
            if not isinstance(place.module, Connections)  # a part of its graph, empty by itself
        )
    )


# --- Numbers ------------------------------------------------------------------------------


def _count_arrays(
    network: StatefulModule, places: list[Place]
) -> tuple[Counter[KeyPath], Counter[KeyPath]]:
    """How many numbers each module itself holds, trained and not."""
    modules = {place.keys for place in places}
    trained, fixed = Counter(), Counter()
    leaves = jax.tree_util.tree_flatten_with_path(network)[0]
    for (keys, leaf), is_trained in zip(leaves, jax.tree.leaves(trainable(network)), strict=True):
        if eqx.is_array(leaf):
            owner = next(keys[:end] for end in range(len(keys), -1, -1) if keys[:end] in modules)
            (trained if is_trained else fixed)[owner] += leaf.size
    return trained, fixed


def _own_states(places: list[Place], sizes: dict[str, Size]) -> dict[str, Size]:
    """The size of each module's state without that of the modules inside it."""
    none = Size(0, 0)
    own = {}
    for place in places:
        inside = [sizes.get(place.path + child.path, none) for child in children_of(place.module)]
        total = sizes.get(place.path, none)
        own[place.path] = Size(
            max(total.numbers - sum(size.numbers for size in inside), 0),
            max(total.bytes - sum(size.bytes for size in inside), 0),
        )
    return own


# --- Text ---------------------------------------------------------------------------------


def _state_text(summary: ModuleSummary | Summary) -> str:
    return f"{summary.state:,} ({summary.state_bytes:,} B)"


def _output_lines(output: Tree) -> list[str]:
    """One line per leaf: its place, if there is more than one, and its shape."""
    if output is None:
        return ["not called"]
    leaves = jax.tree_util.tree_flatten_with_path(output)[0]
    lines = []
    for keys, leaf in leaves:
        dtype = "" if leaf.dtype == jnp.float32 else str(leaf.dtype)
        where = jax.tree_util.keystr(keys).removeprefix(".") + ": " if keys else ""
        lines.append(f"{where}{dtype}{list(leaf.shape)}")
    return lines or ["nothing"]
