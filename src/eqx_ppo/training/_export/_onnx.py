"""Policies as ONNX models, by `jax2onnx`."""

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array

from eqx_ppo._checks import typed
from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import Policy
from eqx_ppo.training._export._artifact import check_free, describe, write_folder, zeros_code
from eqx_ppo.training._export._jaxpr import without_dead_code
from eqx_ppo.training._export._plain import leaf_names
from eqx_ppo.training._export._program import Program, make_program


@typed
def export_onnx(
    policy: Policy,
    path: str | os.PathLike[str],
    obs: Tree,
    *,
    batch_size: int | None = None,
) -> None:
    """Writes a deterministic policy to a folder of ONNX models.

    Needs the extra `onnx`. The folder has `act.onnx`, `policy.json` as `export_policy` writes
    it, and for a policy with a carry `init.onnx` and `reset.onnx`. Inputs and outputs are
    called `obs`, `done`, `action`, `carry_0`, `carry_1`, ... and, where a carry comes out,
    `next_carry_0`, ...; the leaves of a structured observation or action `obs/goal`. `init`
    has no input.

    Each model is run once by ONNX Runtime and compared with the policy before anything is
    written.

    **Arguments:**

    - `policy`: made by `make_policy(network)`, deterministic.
    - `path`: a folder, which must not exist.
    - `obs`: as for `export_policy`.
    - `batch_size`: a number, or `None` for a single environment without a batch axis.

    **Raises:** `FileExistsError` if there is something at `path`; `ImportError` without the
    extra; `ValueError` for a policy that draws random numbers, or has an operation that ONNX
    or the converter does not have, which is named.
    """
    path = Path(path)
    check_free(path)
    _check_installed()
    program = make_program(policy, obs, batch_size)
    _check_deterministic(program)
    models = _models(program)
    files = {f"{model.name}.onnx": _convert(model) for model in models}
    description = {
        "format": "eqx-ppo policy, ONNX",
        **describe(policy, program, batch_size),
        "models": {
            model.name: {"inputs": list(model.inputs), "outputs": model.outputs} for model in models
        },
        "packages": ["onnxruntime"],
        "usage": _usage(path.name, models),
    }
    write_folder(path, files, description)


def _check_installed() -> None:
    missing = [name for name in ("jax2onnx", "onnxruntime") if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(
            f"`export_onnx` needs {' and '.join(missing)}. Install the extra: "
            '`pip install "eqx-ppo[onnx]"`.'
        )


def _check_deterministic(program: Program) -> None:
    entries = zip(program.names, program.generators, strict=True)
    random = [name for name, generator in entries if generator is not None]
    if random:
        raise ValueError(
            "ONNX has no counterpart of JAX's random numbers, but the actions of this policy "
            f"depend on the keys {random}. Make the policy with "
            "`make_policy(network, deterministic=True)`, and let modules of your own leave out "
            "their noise where `inference` is set."
        )


@final
class _Model(NamedTuple):
    """One function of the policy, its arguments by name, and names for what it returns.

    The arguments are concrete, so that the model can be tried on them.
    """

    name: str
    function: Callable[..., tuple[Array, ...]]
    inputs: dict[str, np.ndarray]
    outputs: list[str]


def _models(program: Program) -> list[_Model]:
    """The models of a policy: one, and two more if it has a carry."""
    n_carry = len(program.carry)
    obs_leaves, obs_tree = jax.tree.flatten(program.obs)

    def init():
        return tuple(program.init(jnp.zeros(program.key.shape, program.key.dtype)))

    def act(*arrays):
        obs = jax.tree.unflatten(obs_tree, arrays[n_carry:])
        action, carry = program.act(list(arrays[:n_carry]), obs)
        return (*jax.tree.leaves(action), *carry)

    def reset(*arrays):
        return tuple(program.reset(list(arrays[:-1]), arrays[-1]))

    noise = np.random.default_rng(0)
    obs = dict(
        zip(_names("obs", program.obs), [_drawn(noise, leaf) for leaf in obs_leaves], strict=True)
    )
    carry_names = [f"carry_{index}" for index in range(n_carry)]
    after = [f"next_{name}" for name in carry_names]
    started = [np.asarray(leaf) for leaf in jax.jit(init)()]
    carry = dict(zip(carry_names, started, strict=True))
    done = np.ones(program.done.shape, np.bool_)
    models = [_Model("act", act, carry | obs, [*_names("action", program.action), *after])]
    if n_carry:
        models.append(_Model("init", init, {}, carry_names))
        models.append(_Model("reset", reset, carry | {"done": done}, after))
    return models


def _names(root: str, tree: Tree) -> list[str]:
    """`obs` for one array, `obs/goal` for a leaf of a tree."""
    return [f"{root}/{name}" if name else root for name in leaf_names(tree)]


def _drawn(noise: np.random.Generator, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return np.asarray(
        noise.standard_normal(leaf.shape) if floating else np.zeros(leaf.shape), leaf.dtype
    )


def _convert(model: _Model) -> bytes:
    """The model as a file, which was tried."""
    # By name, because the converter pins its dependencies and may be absent where this is
    # developed.
    to_onnx = importlib.import_module("jax2onnx").to_onnx
    arguments = list(model.inputs.values())
    # Traced here, because the converter replaces functions of JAX while it traces.
    traced = without_dead_code(jax.make_jaxpr(model.function)(*arguments))
    run = core.jaxpr_as_fun(traced)
    try:
        converted = to_onnx(
            lambda *arrays: tuple(run(*arrays)),
            inputs=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments],
            input_names=list(model.inputs),
            output_names=model.outputs,
            model_name=model.name,
        )
        content = converted.SerializeToString()
        got = _run(content, model.inputs)
    except Exception as error:
        raise ValueError(
            f"`{model.name}` of this policy has an operation that cannot be carried to ONNX: "
            f"{error}\nWrite the module that uses it with other operations, or use "
            "`export_policy`, which carries all of JAX."
        ) from error
    _check_equal(model, got)
    return content


def _run(content: bytes, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; unused initializers are not worth a line each
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, inputs)]


def _check_equal(model: _Model, got: list[np.ndarray]) -> None:
    """Compares a run of the converted model with the function that it was made from."""
    expected = jax.jit(model.function)(*model.inputs.values())
    for name, ours, theirs in zip(model.outputs, expected, got, strict=True):
        if not np.allclose(theirs, np.asarray(ours), rtol=1e-4, atol=1e-5):
            raise ValueError(
                f"The ONNX model of `{model.name}` gives another `{name}` than the policy: "
                f"{theirs} instead of {ours}. The converter (`jax2onnx`) got an operation wrong; "
                "use `export_policy`."
            )


def _usage(name: str, models: list[_Model]) -> list[str]:
    """The lines that load and run the models."""
    act = models[0]
    n_actions = sum(not output.startswith("next_") for output in act.outputs)
    obs = {key: array for key, array in act.inputs.items() if not key.startswith("carry_")}
    start = [
        "import pathlib",
        "import numpy as np",
        "import onnxruntime",
        f"folder = pathlib.Path({json.dumps(name)})",
        "load = lambda file: onnxruntime.InferenceSession(folder / file)",
    ]
    if len(models) == 1:
        return [
            *start,
            'act = load("act.onnx")',
            f"obs = {zeros_code(obs)}  # what your environment shows",
            "action = act.run(None, obs)",
        ]
    done = models[-1].inputs["done"]
    return [
        *start,
        'init, act, reset = load("init.onnx"), load("act.onnx"), load("reset.onnx")',
        'named = lambda carry: {f"carry_{i}": leaf for i, leaf in enumerate(carry)}',
        "carry = init.run(None, {})",
        "for step in range(10):",
        f"    obs = {zeros_code(obs)}  # what your environment shows",
        "    outputs = act.run(None, named(carry) | obs)",
        f"    action, carry = outputs[:{n_actions}], outputs[{n_actions}:]",
        f"    done = {zeros_code(done)}  # true where an episode ended",
        '    carry = reset.run(None, named(carry) | {"done": done})',
    ]
