"""The folder that an exported policy is written to, and the page that describes it."""

import json
import re
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import final

import jax

from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import Policy
from eqx_ppo.training._export._program import BatchSize, Program

DESCRIPTION = "policy.json"
_FORMAT_VERSION = 1


def describe(policy: Policy, program: Program, batch_size: BatchSize) -> dict[str, object]:
    """What a reader without this library has to know, as JSON takes it."""
    return {
        "format_version": _FORMAT_VERSION,
        "deterministic": policy.deterministic,
        "batch_size": batch_size,
        "versions": {name: version(name) for name in ("eqx-ppo", "equinox", "jax", "jaxlib")},
        "obs": shape_of(program.obs),
        "action": shape_of(program.action),
        "done": shape_of(program.done),
        "carry": _carry(program),
    }


def _carry(program: Program) -> Tree:
    """The entries of the carry; those that are the words of PRNG keys name the generator."""
    entries = zip(program.names, program.carry, program.generators, strict=True)
    return [
        {"name": name, **shape_of(leaf)} | ({"generator": generator} if generator else {})
        for name, leaf, generator in entries
    ]


def shape_of(tree: Tree) -> Tree:
    """A plain tree with `{"shape": ..., "dtype": ...}` for its leaves."""
    return jax.tree.map(
        lambda leaf: {
            "shape": [size if isinstance(size, int) else str(size) for size in leaf.shape],
            "dtype": str(leaf.dtype),
        },
        tree,
    )


def zeros_code(tree: Tree) -> str:
    """The source text of a plain tree of NumPy zeros; any batch size is written `b`."""

    def text(leaf):
        sizes = ", ".join(map(str, leaf.shape)) + ("," if len(leaf.shape) == 1 else "")
        return _Source(f'np.zeros(({sizes}), "{leaf.dtype}")')

    return repr(jax.tree.map(text, tree))


@final
class _Source(str):
    """Text that is shown without quotes."""

    __slots__ = ()

    __repr__ = str.__str__


def _readable(description: dict[str, object]) -> str:
    """JSON with every shape on one line."""
    item = r'(?:\d+|"b")'
    shape = re.compile(rf"\[\s+({item}(?:,\s+{item})*)\s+\]")
    text = json.dumps(description, indent=2)
    return shape.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def check_free(path: Path) -> None:
    """Refuses a path at which something is already."""
    if path.exists():
        raise FileExistsError(
            f"`{path}` exists already. An exported policy is a folder of its own: give a path "
            "where nothing is, or remove what is there."
        )


def write_folder(path: Path, files: dict[str, bytes], description: dict[str, object]) -> None:
    """Writes a whole folder, which appears under its name once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        (unfinished / DESCRIPTION).write_text(_readable(description))
        unfinished.chmod(0o755)  # as `mkdir` makes it; `mkdtemp` makes it private
        check_free(path)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
