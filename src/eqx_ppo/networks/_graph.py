"""A graph of populations, with delays and recurrence."""

from collections.abc import Mapping, Sequence
from typing import Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo._keys import as_key
from eqx_ppo._typing import Activation, Extras, KeyLike, State, TimeBatchTree, Tree
from eqx_ppo.networks._connections import Activations, Connections, Signals
from eqx_ppo.networks._container import batch_of
from eqx_ppo.networks._delay import Delay, DelayState
from eqx_ppo.networks._errors import at_path
from eqx_ppo.networks._module import StatefulModule, StatefulModuleOutput
from eqx_ppo.networks._populations import (
    Connection,
    Population,
    check_connections,
    check_populations,
    evaluation_order,
)


@final
class PopulationGraph(StatefulModule):
    """Populations of units and the connections between them.

    The input is a dict, of which entries that no population reads are ignored; the output is
    a dict of the populations with `output_to`. Connections without delay are followed in
    topological order; one with `delay=k` reads what its source was `k` steps ago, zeros if
    that lies before the start of the episode. So `Connection("a", "a", delay=1)` is
    recurrence.

    Each source has one circular buffer, as long as its longest outgoing delay. State
    `{"populations": {name: DelayState or ()}, "connections": {name: state}}`, with connections
    named `"source->target"`, and `"source->target#2"` for a second one.

    Build one from records, or step by step with `GraphBuilder`.
    """

    populations: tuple[Population, ...] = eqx.field(static=True)
    delays: tuple[int, ...] = eqx.field(static=True)
    has_cycle: bool = eqx.field(static=True)
    connections: Connections

    def __init__(
        self, populations: Sequence[Population], connections: Sequence[Connection], *, key: KeyLike
    ):
        """**Arguments:**

        - `populations`: the nodes, names unique.
        - `connections`: the edges.
        - `key`: a PRNG key for the default transforms.

        **Raises:** `ValueError` for unknown or repeated names, sizes below 1, negative
        delays, no output, or a cycle of connections without delay, which is named;
        `TypeError` for a transform that is not a `StatefulModule`.
        """
        by_name = check_populations(populations)
        check_connections(by_name, connections)
        order = evaluation_order(by_name, connections)
        self.populations = tuple(populations)
        self.delays = tuple(
            max((edge.delay for edge in connections if edge.source == name), default=0)
            for name in by_name
        )
        self.has_cycle = order.has_cycle
        self.connections = Connections(order.nodes, connections, as_key(key))

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> State:
        """Buffers of zeros, and the state of every connection."""
        with at_path(".connections", self.connections):
            connections = self.connections.initialize_state(batch_size, key=key)
        buffers = {
            name: buffer.initialize_state(batch_size, key=key) if buffer else ()
            for name, buffer in self._buffers().items()
        }
        return {"populations": buffers, "connections": connections}

    def reset_state(self, prev_state: State) -> State:
        """Buffers of zeros, and the reset state of every connection."""
        with at_path(".connections", self.connections):
            connections = self.connections.reset_state(prev_state["connections"])
        buffers = jax.tree.map(jnp.zeros_like, prev_state["populations"])
        return {"populations": buffers, "connections": connections}

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
        self._check_state(state)

        def delayed(edge: Connection, _: Activations) -> Array:
            return _read(state["populations"][edge.source], edge.delay)

        signals = Signals(x, delayed, batch_of(state, x), None)
        return self._run(signals, state, rollout_extras)

    def unroll(
        self,
        state: State,
        xs: TimeBatchTree,
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence.

        Where no population reaches itself, the whole sequence goes through one connection
        after the other, delayed or not; a graph with recurrence is scanned.
        """
        if self.has_cycle:
            return StatefulModule.unroll(self, state, xs, done, rollout_extras)
        self._check_state(state)

        def delayed(edge: Connection, activations: Activations) -> Array:
            source = activations[edge.source]
            window = _newest(state["populations"][edge.source], edge.delay)
            return _buffer(source.shape[-1], edge.delay).unroll(window, source, done).output

        signals = Signals(xs, delayed, done.shape, done)
        return self._run(signals, state, rollout_extras)

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

    def _run(self, signals: Signals, state: State, rollout_extras: Extras) -> StatefulModuleOutput:
        extras = None if rollout_extras is None else rollout_extras["connections"]
        with at_path(".connections", self.connections):
            out = self.connections.run(signals, state["connections"], extras)
        buffers = {
            name: _after(buffer, state["populations"][name], out.output[name], signals.done)
            if buffer
            else ()
            for name, buffer in self._buffers().items()
        }
        output = {
            node.output_to: out.output[node.name]
            for node in self.populations
            if node.output_to is not None
        }
        return out._replace(
            output=output,
            next_state={"populations": buffers, "connections": out.next_state},
            rollout_extras={"populations": None, "connections": out.rollout_extras},
        )

    def _buffers(self) -> dict[str, Delay | None]:
        """The buffer of each source, and `None` for those without a delayed connection."""
        return {
            node.name: _buffer(node.size, delay) if delay else None
            for node, delay in zip(self.populations, self.delays, strict=True)
        }

    def _check_state(self, state: State) -> None:
        """Checks the buffers; those of another graph would be read at other delays."""
        sizes = {
            node.name: (delay, node.size) if delay else None
            for node, delay in zip(self.populations, self.delays, strict=True)
        }
        found = None
        if isinstance(state, Mapping) and set(state) == {"populations", "connections"}:
            found = {
                name: jnp.shape(buffer.buffer)[1:] if isinstance(buffer, DelayState) else None
                for name, buffer in state["populations"].items()
            }
        if found != sizes:
            raise ValueError(
                "`PopulationGraph` expected the state "
                '`{"populations": ..., "connections": ...}` with buffers of (steps, units) '
                f"{sizes}, but got {'another structure' if found is None else found}. Make the "
                "state with `initialize_state` of this graph."
            )


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


def _buffer(size: int, delay: int) -> Delay:
    return Delay(jax.ShapeDtypeStruct((size,), jnp.float32), delay)


def _read(state: DelayState, delay: int) -> Float[Array, "B size"]:
    """The value of `delay` steps ago."""
    index = (state.position - delay) % state.buffer.shape[1]
    return state.buffer[jnp.arange(index.shape[0]), index]


def _newest(state: DelayState, delay: int) -> DelayState:
    """The last `delay` values, as the state of a buffer of that length."""
    ages = jnp.arange(delay, dtype=jnp.int32)[None] - delay
    slots = (state.position[:, None] + ages) % state.buffer.shape[1]
    env = jnp.arange(slots.shape[0])[:, None]
    return DelayState(state.buffer[env, slots], jnp.zeros_like(state.position))


def _after(
    buffer: Delay, state: DelayState, activation: Array, done: Bool[Array, "T B"] | None
) -> DelayState:
    """The state of a buffer once a step or a sequence has been written to it."""
    if done is None:
        return buffer(state, activation).next_state
    return buffer.unroll(state, activation, done).next_state
