"""Trees without the classes of their nodes, for readers who do not have those classes."""

from typing import NamedTuple, final

import jax

from eqx_ppo._typing import Tree, TreeDef


@final
class PlainTree(NamedTuple):
    """How a tree is written in dicts with string keys, lists and tuples.

    A tree of these stays as it is. Any other becomes one dict, from the path of each leaf
    (such as `goal/position`) to the leaf.
    """

    treedef: TreeDef
    names: tuple[str, ...] | None  # `None` for a tree that stays as it is

    def strip(self, tree: Tree) -> Tree:
        """The plain form of `tree`."""
        if self.names is None:
            return tree
        return dict(zip(self.names, jax.tree.leaves(tree), strict=True))

    def restore(self, plain: Tree) -> Tree:
        """Undoes `strip`."""
        if self.names is None:
            return plain
        return jax.tree.unflatten(self.treedef, [plain[name] for name in self.names])


def plain_tree(tree: Tree) -> PlainTree:
    """How `tree` is written plainly."""
    treedef = jax.tree.structure(tree)
    return PlainTree(treedef, None if _is_plain(treedef) else leaf_names(tree))


def leaf_names(tree: Tree) -> tuple[str, ...]:
    """The path of every leaf, such as `goal/position`.

    **Raises:** `ValueError` if two leaves have one path.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path in paths)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"Two leaves of a tree have the path {repeated} once they are written as text. "
            "Rename one of its keys."
        )
    return names


def _is_plain(treedef: TreeDef) -> bool:
    node = treedef.node_data()
    if node is None:
        return True  # a leaf
    kind, keys = node
    if kind is dict:
        fits = all(isinstance(key, str) for key in keys)
    else:
        fits = kind in (list, tuple, type(None))
    return fits and all(map(_is_plain, treedef.children()))
