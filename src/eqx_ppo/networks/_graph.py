"""A graph of populations, with delays and recurrence."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo._keys import as_key
from eqx_ppo._typing import Activation, Extras, KeyLike, State, TimeBatchTree, Tree
from eqx_ppo.networks._by_key import entries_of
from eqx_ppo.networks._container import Call, Container
from eqx_ppo.networks._delay import DelayState
from eqx_ppo.networks._dense import Dense
from eqx_ppo.networks._errors import at_path, check_features
from eqx_ppo.networks._module import StatefulModule, StatefulModuleOutput


class Population(NamedTuple):
    """A node of a `PopulationGraph`.

    It sums what its incoming connections bring and, with `input_from`, that entry of the
    graph's input; then it applies its activation once.

    - `name`: unique in the graph.
    - `size`: number of units.
    - `activation`: an elementwise function, or `None`.
    - `input_from`: a key of the graph's input, or `None`.
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


@final
class PopulationGraph(StatefulModule):
    """Populations of units and the connections between them.

    The input is a dict, the output a dict of the populations with `output_to`. Connections
    without delay are followed in topological order; one with `delay=k` reads what its source
    was `k` steps ago, zeros if that lies before the start of the episode. So
    `Connection("a", "a", delay=1)` is recurrence.

    Each source has one circular buffer, as long as its longest outgoing delay. State
    `{"populations": {name: DelayState or ()}, "connections": {name: state}}`, with connections
    named `"source->target"`.

    Build one from records, or step by step with `GraphBuilder`.
    """

    populations: tuple[Population, ...] = eqx.field(static=True)
    delays: tuple[int, ...] = eqx.field(static=True)
    connections: "_Wiring"

    def __init__(
        self, populations: Sequence[Population], connections: Sequence[Connection], *, key: KeyLike
    ):
        """**Arguments:**

        - `populations`: the nodes, names unique.
        - `connections`: the edges.
        - `key`: a PRNG key for the default transforms.

        **Raises:** `ValueError` for unknown or repeated names, sizes below 1, negative
        delays, no output, or a cycle of connections without delay, which is named.
        """
        by_name = _check_populations(populations)
        _check_connections(by_name, connections)
        self.populations = tuple(populations)
        self.delays = tuple(
            max((edge.delay for edge in connections if edge.source == name), default=0)
            for name in by_name
        )
        self.connections = _Wiring(by_name, connections, as_key(key))

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> State:
        """Buffers of zeros, and the state of every connection."""
        return {
            "populations": self._empty_buffers(batch_size),
            "connections": self.connections.initialize_state(batch_size, key=key),
        }

    def reset_state(self, prev_state: State) -> State:
        """Buffers of zeros, and the reset state of every connection."""
        return {
            "populations": jax.tree.map(jnp.zeros_like, prev_state["populations"]),
            "connections": self.connections.reset_state(prev_state["connections"]),
        }

    def update_statistics(self, rollout_extras: Extras) -> Self:
        """A new graph in which every connection has taken in its own extras."""
        extras = None if rollout_extras is None else rollout_extras["connections"]
        with at_path(".connections", self.connections):
            updated = self.connections.update_statistics(extras)
        return eqx.tree_at(lambda graph: graph.connections, self, updated)

    def __call__(
        self, state: State, x: Tree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """One step of the whole graph."""
        delayed = {
            name: _read(state["populations"][edge.source], edge.delay)
            for name, edge in self.connections.edges
            if edge.delay > 0
        }
        extras = None if rollout_extras is None else rollout_extras["connections"]
        with at_path(".connections", self.connections):
            out = self.connections(state["connections"], Signals(x, delayed), extras)
        buffers = {
            name: _write(buffer, out.output[name]) if isinstance(buffer, DelayState) else ()
            for name, buffer in state["populations"].items()
        }
        next_state = {"populations": buffers, "connections": out.next_state}
        return self._result(out, next_state)

    def unroll(
        self,
        state: State,
        xs: TimeBatchTree,
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence: a scan, or without delays the connections' own `unroll`s."""
        if any(self.delays):
            return StatefulModule.unroll(self, state, xs, done, rollout_extras)
        extras = None if rollout_extras is None else rollout_extras["connections"]
        with at_path(".connections", self.connections):
            out = self.connections.unroll(state["connections"], Signals(xs, {}), done, extras)
        next_state = {"populations": state["populations"], "connections": out.next_state}
        return self._result(out, next_state)

    def __repr__(self) -> str:
        nodes = [
            f"  {node.name} [{node.size}]"
            + (f" <- input[{node.input_from!r}]" if node.input_from is not None else "")
            + (f" -> output[{node.output_to!r}]" if node.output_to is not None else "")
            for node in self.populations
        ]
        edges = [
            f"  {name}: {type(self.connections[name]).__name__}"
            + (f", delay {edge.delay}" if edge.delay else "")
            for name, edge in self.connections.edges
        ]
        return "\n".join(["PopulationGraph(", *nodes, *edges, ")"])

    def _result(self, out: StatefulModuleOutput, next_state: State) -> StatefulModuleOutput:
        output = {
            node.output_to: out.output[node.name]
            for node in self.populations
            if node.output_to is not None
        }
        extras = {"populations": None, "connections": out.rollout_extras}
        return out._replace(output=output, next_state=next_state, rollout_extras=extras)

    def _empty_buffers(self, batch_size: int) -> dict[str, DelayState | tuple[()]]:
        return {
            node.name: DelayState(
                jnp.zeros((batch_size, delay, node.size), jnp.float32),
                jnp.zeros(batch_size, jnp.int32),
            )
            if delay
            else ()
            for node, delay in zip(self.populations, self.delays, strict=True)
        }


@final
class GraphBuilder:
    """Describes a `PopulationGraph` step by step.

    ```python
    builder = GraphBuilder()
    builder.add_input("sensors", 8, input_from="proprio")
    builder.add_population("hidden", 32, activation=jax.nn.tanh)
    builder.add_output("motor", 4, output_to="action")
    builder.connect("sensors", "hidden")
    builder.connect("hidden", "hidden", delay=1)
    builder.connect("hidden", "motor", delay=2)
    graph = builder.build(key=jax.random.key(0))
    ```
    """

    def __init__(self) -> None:
        self._populations: list[Population] = []
        self._connections: list[Connection] = []

    def add_input(
        self, name: str, size: int, *, input_from: str, activation: Activation | None = None
    ) -> None:
        """Adds a population that reads the entry `input_from` of the graph's input."""
        self._populations.append(Population(name, size, activation, input_from=input_from))

    def add_population(self, name: str, size: int, *, activation: Activation | None = None) -> None:
        """Adds a population inside the graph."""
        self._populations.append(Population(name, size, activation))

    def add_output(
        self,
        name: str,
        size: int,
        *,
        output_to: str | None = None,
        activation: Activation | None = None,
    ) -> None:
        """Adds a population that appears in the output under `output_to` (or its name)."""
        key = name if output_to is None else output_to
        self._populations.append(Population(name, size, activation, output_to=key))

    def connect(
        self,
        src: str,
        dst: str,
        transform: StatefulModule | None = None,
        delay: int = 0,
        *,
        reciprocal: bool = False,
    ) -> None:
        """Adds a connection, and with `reciprocal` one back, of the same delay.

        **Raises:** `ValueError` for a transform together with `reciprocal`: it fits one
        direction only.
        """
        if reciprocal and transform is not None:
            raise ValueError(
                "`connect(reciprocal=True)` makes default transforms in both directions. Make two "
                "calls to give each direction a transform of its own."
            )
        self._connections.append(Connection(src, dst, transform, delay))
        if reciprocal:
            self._connections.append(Connection(dst, src, None, delay))

    def build(self, *, key: KeyLike) -> PopulationGraph:
        """The graph; see `PopulationGraph` for what is refused."""
        return PopulationGraph(self._populations, self._connections, key=key)


class Signals(NamedTuple):
    """What one step of the wiring reads: the graph's input, and the delayed sources."""

    inputs: Mapping[str, Tree]
    delayed: Mapping[str, Array]


@final
class _Wiring(Container):
    """The connections of a graph, as a container without delays of its own."""

    nodes: tuple[Population, ...] = eqx.field(static=True)  # in topological order
    edges: tuple[tuple[str, Connection], ...] = eqx.field(static=True)

    def __init__(self, by_name: Mapping[str, Population], edges: Sequence[Connection], key: Array):
        keys = jax.random.split(key, max(len(edges), 1))
        names = _edge_names(edges)
        children = {}
        for name, edge, edge_key in zip(names, edges, keys, strict=False):
            sizes = by_name[edge.source].size, by_name[edge.target].size
            children[name] = (
                Dense(*sizes, key=edge_key) if edge.transform is None else edge.transform
            )
        super().__init__(children)
        bare = [edge._replace(transform=None) for edge in edges]
        self.nodes = tuple(by_name[name] for name in _topological_order(by_name, edges))
        self.edges = tuple(zip(names, bare, strict=True))

    def wire(self, call: Call, x: Signals) -> dict[str, Array]:
        """The activation of every population."""
        wanted = tuple(node.input_from for node in self.nodes if node.input_from is not None)
        inputs = entries_of("PopulationGraph", x.inputs, wanted)
        activations: dict[str, Array] = {}
        for node in self.nodes:
            terms = [] if node.input_from is None else [inputs[node.input_from]]
            for name, edge in self.edges:
                if edge.target == node.name:
                    source = x.delayed[name] if edge.delay else activations[edge.source]
                    terms.append(call(name, source))
            activations[node.name] = call.local(_integrator(self, node), x, terms)
        return activations


def _integrator(module: _Wiring, node: Population) -> Callable[[Signals, list[Array]], Array]:
    """Sums what reaches a population and applies its activation; leaves `[B, *feat]`."""

    def integrate(signals: Signals, terms: list[Array]) -> Array:
        n_envs = jax.tree.leaves(signals)[0].shape[0]
        total = jnp.zeros((n_envs, node.size), jnp.float32)
        for term in terms:
            check_features(module, term, (node.size,), f" to the population `{node.name}`")
            total = total + term.astype(jnp.float32)
        return total if node.activation is None else node.activation(total)

    return integrate


def _read(buffer: DelayState, delay: int) -> Float[Array, "B size"]:
    index = (buffer.position - delay) % buffer.buffer.shape[1]
    return buffer.buffer[jnp.arange(index.shape[0]), index]


def _write(buffer: DelayState, value: Float[Array, "B size"]) -> DelayState:
    env = jnp.arange(value.shape[0])
    position = (buffer.position + 1) % buffer.buffer.shape[1]
    return DelayState(buffer.buffer.at[env, buffer.position].set(value), position)


def _edge_names(edges: Sequence[Connection]) -> list[str]:
    names: list[str] = []
    for edge in edges:
        plain = name = f"{edge.source}->{edge.target}"
        repeat = 1
        while name in names:
            repeat += 1
            name = f"{plain}#{repeat}"
        names.append(name)
    return names


def _check_populations(populations: Sequence[Population]) -> dict[str, Population]:
    by_name: dict[str, Population] = {}
    outputs: set[str] = set()
    for node in populations:
        if node.name in by_name:
            raise ValueError(f"`PopulationGraph` got two populations named `{node.name}`.")
        if node.size < 1:
            raise ValueError(f"The population `{node.name}` needs a size of at least 1.")
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


def _check_connections(by_name: Mapping[str, Population], edges: Sequence[Connection]) -> None:
    for edge in edges:
        for name in (edge.source, edge.target):
            if name not in by_name:
                raise ValueError(
                    f"The connection `{edge.source}->{edge.target}` names the population "
                    f"`{name}`, which is not there; there are {list(by_name)}."
                )
        if isinstance(edge.delay, bool) or not isinstance(edge.delay, int) or edge.delay < 0:
            raise ValueError(
                f"The connection `{edge.source}->{edge.target}` needs a delay that is an int of at "
                f"least 0, but got {edge.delay!r}."
            )


def _topological_order(by_name: Mapping[str, Population], edges: Sequence[Connection]) -> list[str]:
    """The populations, each after all that it reads in the same step."""
    sources = {name: [] for name in by_name}
    for edge in edges:
        if edge.delay == 0:
            sources[edge.target].append(edge.source)
    order: list[str] = []
    path: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        if name in path:
            cycle = " <- ".join([*path[path.index(name) :], name])
            raise ValueError(
                f"`PopulationGraph` has a cycle of connections without delay: {cycle}. Give one "
                "of them `delay=1`."
            )
        path.append(name)
        for source in sources[name]:
            visit(source)
        path.pop()
        order.append(name)

    for name in by_name:
        visit(name)
    return order
