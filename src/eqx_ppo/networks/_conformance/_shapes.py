"""Rules on shapes, kinds and fields: these only trace the module."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp

from eqx_ppo._compare import mismatches, named_leaves
from eqx_ppo._rules import Fault, Faults
from eqx_ppo._typing import Tree
from eqx_ppo.networks._adapter import PPONetworkOutput
from eqx_ppo.networks._conformance._trial import Trial
from eqx_ppo.networks._module import StatefulModuleOutput
from eqx_ppo.networks._samplers import Sample


def returns(trial: Trial) -> Faults:
    """`__call__` returns a `StatefulModuleOutput`."""
    out = _traced_step(trial)
    if not isinstance(out, StatefulModuleOutput):
        yield Fault("", f"a module must return a `StatefulModuleOutput`, not `{type(out)}`.")


def batch_axis(trial: Trial) -> Faults:
    """Every leaf that is returned leads with the batch; a penalty is one value per env."""
    n_envs, out = trial.size.n_envs, _traced_step(trial)
    fields = {
        "state": trial.start,
        "output": out.output,
        "next_state": out.next_state,
        "rollout_extras": out.rollout_extras,
        "metrics": out.metrics,
    }
    for name, tree in fields.items():
        for leaf, value in named_leaves(tree, name):
            if not (eqx.is_array_like(value) or isinstance(value, jax.ShapeDtypeStruct)):
                yield Fault(
                    leaf,
                    f"must be an array that leads with the batch axis, but is a "
                    f"`{type(value).__name__}`. Keep what is not an array on the module.",
                )
            elif jnp.shape(value)[:1] != (n_envs,):
                yield Fault(
                    leaf,
                    f"must lead with the batch axis, ({n_envs},) here, but has shape "
                    f"{list(jnp.shape(value))}. Give each environment its own row.",
                )
    penalty = out.regularization_loss
    if penalty is not None and jnp.shape(penalty) != (n_envs,):
        yield Fault(
            "regularization_loss",
            f"must be one value per environment, [{n_envs}] here, but has shape "
            f"{list(jnp.shape(penalty))}. Sum or average over features only.",
        )


def one_number_per_env(trial: Trial) -> Faults:
    """Log-likelihoods and value estimates are `[B]`, which `[B, 1]` is not."""
    n_envs, output = trial.size.n_envs, _traced_step(trial).output
    for where, record in named_leaves(output, "output", is_leaf=_is_record):
        if not _is_record(record):
            continue
        fields = record._asdict()
        for name in ("log_likelihood", "log_likelihoods", "value_estimates"):
            for leaf, value in named_leaves(fields.get(name), f"{where}.{name}"):
                if value.shape != (n_envs,):
                    yield Fault(
                        leaf,
                        f"must have shape [{n_envs}] here, one number per environment, but has "
                        f"{list(value.shape)}. Sum over action features; take a value head's "
                        "only column.",
                    )


def closed_state(trial: Trial) -> Faults:
    """`next_state` and `reset_state` give the structure, shapes and dtypes of the state."""
    after = {
        "next_state": _traced_step(trial).next_state,
        "reset_state": eqx.filter_eval_shape(trial.module.reset_state, trial.start),
    }
    for name, value in after.items():
        for leaf, text in mismatches(value, trial.start, name):
            yield Fault(
                leaf,
                f"must be of the kind of the incoming state, but is {text}. Cast it, or start "
                "from the right kind in `initialize_state`.",
            )


def static_fields(trial: Trial) -> Faults:
    """Static fields can be hashed; `inference` is not one; no key is stored."""
    for where, node in _modules(trial.module):
        for field in dataclasses.fields(node):
            name = f"{where}.{field.name}".removeprefix(".")
            if not field.metadata.get("static", False):
                continue
            if field.name == "inference":
                yield Fault(
                    name,
                    "must be an ordinary field, not a static one: `eqx.nn.inference_mode` passes "
                    "over static fields.",
                )
            elif not _is_hashable(vars(node)[field.name]):
                yield Fault(
                    name,
                    "is a static field that cannot be hashed, so that a copy may fail or compile "
                    "anew. Make it a tuple, or an ordinary field if it holds arrays (in a "
                    "`Constant` if they are not trained).",
                )
    for name, leaf in named_leaves(trial.module):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            yield Fault(
                name,
                "is a PRNG key stored on the module, which would draw the same numbers for ever. "
                "Keep keys in the carry state, one per environment (see `RandomModule`).",
            )


def _traced_step(trial: Trial) -> StatefulModuleOutput:
    """The shapes of one step from the initial state."""
    return eqx.filter_eval_shape(trial.module, trial.start, trial.x, None)


def _is_record(node: Tree) -> bool:
    return isinstance(node, PPONetworkOutput | Sample)


def _modules(module: Tree) -> list[tuple[str, eqx.Module]]:
    """Every Equinox module in a tree, with its path."""
    found = []

    def visit(tree, prefix):
        flat = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node: node is not tree and isinstance(node, eqx.Module)
        )[0]
        if isinstance(tree, eqx.Module):
            found.append((prefix, tree))
        for path, node in flat:
            if isinstance(node, eqx.Module) and node is not tree:
                visit(node, prefix + jax.tree_util.keystr(path))

    visit(module, "")
    return found


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not eqx.is_array_like(value) or isinstance(value, bool | int | float | complex)
