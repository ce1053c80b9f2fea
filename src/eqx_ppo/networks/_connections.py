"""The connections of a population graph: what one step or one sequence runs through."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_ppo._typing import Extras, State, Tree
from eqx_ppo.networks._by_key import entries_of
from eqx_ppo.networks._container import Call, Container
from eqx_ppo.networks._dense import Dense
from eqx_ppo.networks._module import StatefulModuleOutput
from eqx_ppo.networks._populations import Connection, Population, connection_names

Activations: TypeAlias = dict[str, Array]  # by population, [B, size] or [T, B, size]


class Signals(NamedTuple):
    """What the connections are run on, for one step or one sequence.

    - `inputs`: the graph's input.
    - `delayed`: gives what a delayed connection reads, from the activations so far.
    - `lead`: `(B,)` or `(T, B)`.
    - `done`: after which steps an episode ended, `[T, B]`; `None` for one step.
    """

    inputs: Mapping[str, Tree]
    delayed: Callable[[Connection, Activations], Array]
    lead: tuple[int, ...]
    done: Bool[Array, "T B"] | None


@final
class Connections(Container):
    """The connections of a graph, as a container; what a delay brings is given to it."""

    nodes: tuple[Population, ...] = eqx.field(static=True)  # in the order of evaluation
    edges: tuple[tuple[str, Connection], ...] = eqx.field(static=True)

    def __init__(self, nodes: tuple[Population, ...], edges: Sequence[Connection], key: Array):
        names = connection_names(edges)
        size = {node.name: node.size for node in nodes}
        keys = jax.random.split(key, max(len(edges), 1))
        children = {}
        for name, edge, edge_key in zip(names, edges, keys, strict=False):
            sizes = size[edge.source], size[edge.target]
            default = edge.transform is None
            children[name] = Dense(*sizes, key=edge_key) if default else edge.transform
        super().__init__(children)
        bare = [edge._replace(transform=None) for edge in edges]
        self.nodes = nodes
        self.edges = tuple(zip(names, bare, strict=True))

    def run(self, signals: Signals, state: State, extras: Extras) -> StatefulModuleOutput:
        """One step, or one sequence."""
        states, slots = self._unpack(state), self._unpack(extras)
        call = Call(self, states, slots, signals.lead, signals.done)
        return call.finish(self.wire(call, signals))

    def wire(self, call: Call, x: Signals) -> Activations:
        """The activation of every population."""
        wanted = tuple(node.input_from for node in self.nodes if node.input_from is not None)
        inputs = entries_of("PopulationGraph", x.inputs, wanted)
        activations: Activations = {}
        for node in self.nodes:
            terms = {}
            if node.input_from is not None:
                terms[f"The input's entry {node.input_from!r}"] = inputs[node.input_from]
            for name, edge in self.edges:
                if edge.target == node.name:
                    delayed = edge.delay > 0
                    source = x.delayed(edge, activations) if delayed else activations[edge.source]
                    terms[f"The connection `{name}`"] = call(name, source)
            for origin, term in terms.items():
                _check_term(origin, term, node, x.lead)
            start = jnp.zeros((*x.lead, node.size), jnp.float32)
            activations[node.name] = call.local(_integrator(node), start, *terms.values())
        return activations


def _check_term(origin: str, term: Tree, node: Population, lead: tuple[int, ...]) -> None:
    """Checks that what reaches a population has its size."""
    expected = [*lead, node.size]
    got = list(jnp.shape(term)) if eqx.is_array_like(term) else f"a `{type(term).__name__}`"
    if got != expected:
        raise ValueError(
            f"{origin} must bring one array of shape {expected} to the population "
            f"`{node.name}`, which has {node.size} unit(s), but brings {got}. Give them the same "
            "size."
        )


def _integrator(node: Population) -> Callable[..., Array]:
    """Sums what reaches a population and applies its activation; leaves `[B, size]`."""

    def integrate(total: Array, *terms: Array) -> Array:
        for term in terms:
            total = total + term.astype(jnp.float32)
        if node.activation is None:
            return total
        activation = node.activation(total)
        if jnp.shape(activation) != total.shape:
            raise ValueError(
                f"The activation of the population `{node.name}` must be elementwise, but made "
                f"{list(jnp.shape(activation))} of {list(total.shape)}."
            )
        return activation.astype(jnp.float32)

    return integrate
