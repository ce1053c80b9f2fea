"""What a population graph is described by, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eqx_ppo._typing import Activation
from eqx_ppo.networks._module import StatefulModule


class Population(NamedTuple):
    """A node of a `PopulationGraph`.

    It sums what its incoming connections bring and, with `input_from`, that entry of the
    graph's input; then it applies its activation once. One that nothing reaches sums to 0.

    - `name`: unique in the graph.
    - `size`: number of units.
    - `activation`: an elementwise function, or `None`.
    - `input_from`: a key of the graph's input, whose entry is `[B, size]`, or `None`.
    - `output_to`: the key of the graph's output under which it appears, or `None`.
    """

    name: str
    size: int
    activation: Activation | None = None
    input_from: str | None = None
    output_to: str | None = None


class Connection(NamedTuple):
    """An edge of a `PopulationGraph`.

    - `source`, `target`: names of populations; they may be the same if `delay > 0`.
    - `transform`: any module from `[B, source size]` to `[B, target size]`; `None` for a
        linear `Dense`.
    - `delay`: reads the source as it was this many steps ago; 0 for the same step.
    """

    source: str
    target: str
    transform: StatefulModule | None = None
    delay: int = 0


def connection_names(connections: Sequence[Connection]) -> tuple[str, ...]:
    """`"source->target"` for each; a pair that is connected again gets `#2`, `#3`, ..."""
    names: list[str] = []
    for edge in connections:
        plain = name = f"{edge.source}->{edge.target}"
        repeat = 1
        while name in names:
            repeat += 1
            name = f"{plain}#{repeat}"
        names.append(name)
    return tuple(names)


def check_populations(populations: Sequence[Population]) -> dict[str, Population]:
    """The populations by name, once they are known to be sound."""
    by_name: dict[str, Population] = {}
    outputs: set[str] = set()
    for node in populations:
        if node.name in by_name:
            raise ValueError(f"`PopulationGraph` got two populations named `{node.name}`.")
        if isinstance(node.size, bool) or not isinstance(node.size, int) or node.size < 1:
            raise ValueError(
                f"The population `{node.name}` needs a size that is an int of at least 1, but "
                f"got {node.size!r}."
            )
        if node.output_to in outputs:
            raise ValueError(f"Two populations go to the output `{node.output_to}`.")
        if node.output_to is not None:
            outputs.add(node.output_to)
        by_name[node.name] = node
    if not outputs:
        raise ValueError(
            "`PopulationGraph` needs a population with `output_to`, or it would return nothing."
        )
    return by_name


def check_connections(by_name: Mapping[str, Population], connections: Sequence[Connection]) -> None:
    """Checks that connections join populations that are there, by a transform, some steps later."""
    for edge in connections:
        name = f"{edge.source}->{edge.target}"
        for end in (edge.source, edge.target):
            if end not in by_name:
                raise ValueError(
                    f"The connection `{name}` names the population `{end}`, which is not there; "
                    f"there are {list(by_name)}."
                )
        if isinstance(edge.delay, bool) or not isinstance(edge.delay, int) or edge.delay < 0:
            raise ValueError(
                f"The connection `{name}` needs a delay that is an int of at least 0, but got "
                f"{edge.delay!r}."
            )
        if edge.transform is not None and not isinstance(edge.transform, StatefulModule):
            raise TypeError(
                f"The transform of the connection `{name}` must be a `StatefulModule`, but is a "
                f"`{type(edge.transform).__name__}`. Wrap a plain Equinox layer or function of "
                "one sample as `Lift(layer)`."
            )


class Order(NamedTuple):
    """In which order populations are evaluated.

    - `nodes`: the populations, each after all that it reads in the same step; without a
        cycle also after all that it reads with a delay.
    - `has_cycle`: whether a population reaches itself, by connections with a delay.
    """

    nodes: tuple[Population, ...]
    has_cycle: bool


def evaluation_order(by_name: Mapping[str, Population], connections: Sequence[Connection]) -> Order:
    """The order of evaluation.

    **Raises:** `ValueError` for a cycle of connections without delay, which is named.
    """
    same_step = [edge for edge in connections if edge.delay == 0]
    order, cycle = _sort(by_name, same_step)
    if cycle:
        raise ValueError(
            f"`PopulationGraph` has a cycle of connections without delay: {' <- '.join(cycle)}. "
            "Give one of them `delay=1`."
        )
    in_full, cycle = _sort(by_name, connections)
    names = order if cycle else in_full
    return Order(tuple(by_name[name] for name in names), bool(cycle))


def _sort(
    names: Mapping[str, Population], connections: Sequence[Connection]
) -> tuple[list[str], list[str]]:
    """`names` with every source before its targets, and a cycle, if there is one."""
    order: list[str] = []
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in order:
            return []
        path.append(name)
        for edge in connections:
            if edge.target == name:
                cycle = visit(edge.source)
                if cycle:
                    return cycle
        path.pop()
        order.append(name)
        return []

    for name in names:
        cycle = visit(name)
        if cycle:
            return order, cycle
    return order, []
