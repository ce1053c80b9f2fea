"""What a training state looks like, without its numbers."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Self, TypeAlias

import jax
from jaxtyping import Array

from eqx_ppo._typing import Tree, TreeDef
from eqx_ppo.algorithms import TrainingState
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training._checkpoint._fingerprint import (
    Fingerprint,
    array_paths,
    array_text,
    fingerprint,
)

Part: TypeAlias = Literal["network", "optimizer_state", "rollout_state", "key", "counts"]
"""A part of a training state; `network` includes its statistics."""

PARTS: tuple[Part, ...] = ("network", "optimizer_state", "rollout_state", "key", "counts")

Leaf: TypeAlias = Tree
"""An array, or a `jax.ShapeDtypeStruct` in its place."""


class NetworkTemplate(NamedTuple):
    """The structure of a network, and its arrays (or what they look like) in order."""

    fingerprint: Fingerprint
    paths: list[str]
    leaves: list[Leaf]

    @classmethod
    def of(cls, network: StatefulModule, leaves: Sequence[Leaf]) -> Self:
        """**Arguments:**

        - `network`: any network of that structure.
        - `leaves`: its arrays, in the order of `jax.tree.leaves`.
        """
        return cls(fingerprint(network), array_paths(network), list(leaves))


class StateTemplate(NamedTuple):
    """The structure of a training state: that of its network, and of the rest.

    As flat leaves, so that no constructor of an environment's state sees a placeholder.
    """

    network: NetworkTemplate
    paths: list[str]
    leaves: list[Leaf]
    treedef: TreeDef

    @classmethod
    def of(cls, state: TrainingState) -> Self:
        """The structure of a state, and its numbers."""
        network = NetworkTemplate.of(state.network, jax.tree.leaves(state.arrays))
        return cls.split(network, state_paths(state), *jax.tree.flatten(state))

    @classmethod
    def split(
        cls, network: NetworkTemplate, paths: list[str], leaves: Sequence[Leaf], treedef: TreeDef
    ) -> Self:
        """**Arguments:**

        - `paths`, `leaves`, `treedef`: of the whole state, whose first leaves are the network.
        """
        count = len(network.leaves)
        return cls(network, paths[count:], list(leaves[count:]), treedef)

    def with_leaves(self, leaves: Sequence[Leaf]) -> Self:
        """The same structure with other numbers, those of the network first."""
        count = len(self.network.paths)
        network = self.network._replace(leaves=list(leaves[:count]))
        return self._replace(network=network, leaves=list(leaves[count:]))

    @property
    def rest(self) -> dict[str, str]:
        """What is where besides the network."""
        texts = map(array_text, self.leaves)
        return dict(zip(self.paths, texts, strict=True))

    def join(self, network: Sequence[Array], rest: Sequence[Array]) -> TrainingState:
        """The state with these arrays."""
        return jax.tree.unflatten(self.treedef, [*network, *rest])


def state_paths(state: Tree) -> list[str]:
    """The places of all leaves of a training state."""
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return [jax.tree_util.keystr(keys).removeprefix(".") for keys, _ in flat]


def is_in(path: str, parts: Collection[Part]) -> bool:
    """Whether a path from `state_paths` belongs to one of some parts."""
    return path.startswith(tuple(parts))
