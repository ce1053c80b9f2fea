"""Policies as `jax.export` artifacts."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import equinox as eqx
import jax
from jax import export

from eqx_ppo._checks import typed
from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import Policy
from eqx_ppo.training._export._artifact import (
    check_free,
    describe,
    shape_of,
    write_folder,
    zeros_code,
)
from eqx_ppo.training._export._program import BatchSize, make_program

_PLATFORMS = frozenset({"cpu", "cuda", "rocm", "tpu"})


@typed
def export_policy(
    policy: Policy,
    path: str | os.PathLike[str],
    obs: Tree,
    *,
    batch_size: BatchSize = None,
    platforms: Sequence[str] = ("cpu", "cuda"),
) -> None:
    """Writes a policy to a folder that JAX alone can run.

    Of this library, Equinox and Python code of the network the reader needs nothing; no
    pickle is involved. The folder has

    - `init.jax`, `act.jax`, `reset.jax`: functions that `jax.export.deserialize` loads;
    - `policy.json`: shapes and dtypes of everything, versions, and a dozen lines of Python
        that load and run the functions.

    They are the methods of `Policy` with a carry that is a list of arrays. It holds what
    actions depend on and no more: that of a deterministic feed-forward policy is empty.
    A key is `uint32[2]`, `jax.random.key_data(jax.random.key(seed))` or
    `numpy.array([0, seed], "uint32")`. Observations and actions in dicts, lists and tuples
    keep their structure; others become a dict from paths to arrays.

    **Arguments:**

    - `policy`: made by `make_policy`.
    - `path`: a folder, which must not exist.
    - `obs`: an observation of one environment, without batch axis: arrays or
        `jax.ShapeDtypeStruct`s.
    - `batch_size`: `None` for a single environment without a batch axis; a number; or
        `"any"`, where every row is an environment by itself and `init` takes one key for each,
        `uint32[b, 2]`.
    - `platforms`: those that the functions run on, of `"cpu"`, `"cuda"`, `"rocm"` and `"tpu"`.

    **Raises:** `FileExistsError` if there is something at `path`, and `ValueError` for what
    cannot be exported, such as modules that call back into Python; nothing is written then.
    """
    path = Path(path)
    check_free(path)
    _check_platforms(platforms)
    program = make_program(_on_one_device(policy), obs, batch_size)
    files = {
        "init.jax": _serialize("init", program.init, platforms, program.key),
        "act.jax": _serialize("act", program.act, platforms, program.carry, program.obs),
        "reset.jax": _serialize("reset", program.reset, platforms, program.carry, program.done),
    }
    description = {
        "format": "eqx-ppo policy, jax.export",
        **describe(policy, program, batch_size),
        "key": shape_of(program.key),
        "functions": {
            "init": "init(key) -> carry",
            "act": "act(carry, obs) -> (action, carry)",
            "reset": "reset(carry, done) -> carry",
        },
        "platforms": list(platforms),
        "packages": ["jax", "flatbuffers"],
        "usage": _usage(path.name, program.obs, program.done, batch_size),
    }
    write_folder(path, files, description)


def _check_platforms(platforms: Sequence[str]) -> None:
    if isinstance(platforms, str) or not platforms or not _PLATFORMS.issuperset(platforms):
        raise ValueError(
            f"`platforms` must be a sequence of some of {sorted(_PLATFORMS)}, such as "
            f'`("cpu", "cuda")`, but got `{platforms!r}`.'
        )


def _serialize(
    name: str, function: Callable[..., Tree], platforms: Sequence[str], *args: Tree
) -> bytes:
    try:
        exported = export.export(jax.jit(function), platforms=list(platforms))(*args)
        return bytes(exported.serialize())
    except Exception as error:
        raise ValueError(
            f"`{name}` of this policy cannot be exported for {list(platforms)}: {error}\nModules "
            "that call back into Python stay behind; write those with JAX alone, or name "
            "platforms that have all of the policy's operations."
        ) from error


def _on_one_device(policy: Policy) -> Policy:
    """The same policy where an artifact for one device can be made of it."""
    arrays, others = eqx.partition(policy, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, jax.local_devices()[0]), others)


def _usage(name: str, obs: Tree, done: Tree, batch_size: BatchSize) -> list[str]:
    """The dozen lines that load and run the functions."""
    any_size = batch_size == "any"
    key = (
        "np.array([[0, seed] for seed in range(b)], np.uint32)"
        if any_size
        else "np.array([0, 0], np.uint32)"
    )
    return [
        "import pathlib",
        "import jax",
        "import numpy as np",
        "from jax import export",
        f"folder = pathlib.Path({json.dumps(name)})",
        "read = lambda file: bytearray((folder / file).read_bytes())",
        "load = lambda file: jax.jit(export.deserialize(read(file)).call)",
        'init, act, reset = load("init.jax"), load("act.jax"), load("reset.jax")',
        *(["b = 4  # environments"] if any_size else []),
        f"carry = init({key})  # [0, seed]",
        "for step in range(10):",
        f"    obs = {zeros_code(obs)}  # what your environment shows",
        "    action, carry = act(carry, obs)",
        f"    done = {zeros_code(done)}  # true where an episode ended",
        "    carry = reset(carry, done)",
    ]
