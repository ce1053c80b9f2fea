"""Rules on what the functions take and return: these only trace them."""

import re

import jax

from eqx_ppo._report import first_paragraph
from eqx_ppo._rules import Fault, Faults
from eqx_ppo.envs._conformance._errors import is_about_tracing
from eqx_ppo.envs._conformance._sketch import is_within, sketch
from eqx_ppo.envs._conformance._trial import Trial

_BATCH = 3
_INFO_KEY = re.compile(r"^\.info\['([^']+)'\]")
_FIRST = ("first_obs", "first_state", "first_pipeline_state")


def single_environment(trial: Trial) -> Faults:
    """`reset` takes one typed key and returns the state of one environment."""
    try:
        found = trial.reset_sketch
    except Exception as error:
        takes = None if is_about_tracing(error) else _what_reset_takes(trial)
        if takes is None:
            raise
        yield Fault("", takes)
        return
    done = found.within("done")
    lead = done[0].shape[:1] if len(done) == 1 else ()
    arrays = [leaf for leaf in found.leaves if is_within(leaf.name, "obs", "reward", "done")]
    if lead and lead != (1,) and all(leaf.shape[:1] == lead for leaf in arrays):
        yield Fault(
            "state.done",
            f"`reset(key)` must return the state of one environment, but returns {lead[0]} of "
            f"them: every leaf of `obs`, `reward` and `done` leads with {lead[0]}. {_UNBATCH}",
        )


_UNBATCH = (
    "Write the environment for one instance, or give the one inside of the wrapper that "
    "vectorizes it: the library does that itself."
)


def _what_reset_takes(trial: Trial) -> str | None:
    """What `reset` works with, where that is not one typed key."""
    key = jax.random.key(0)
    others = {
        f"takes a batch of keys, not one. {_UNBATCH}": jax.random.split(key, _BATCH),
        "takes an untyped key only (`jax.random.PRNGKey`), but the library passes typed ones "
        "(`jax.random.key`). Use the functions of `jax.random` on it, which take both, or "
        "begin with `jax.random.key_data(key)`.": jax.random.key_data(key),
        f"takes a batch of untyped keys. {_UNBATCH}": jax.random.key_data(
            jax.random.split(key, _BATCH)
        ),
    }
    for text, given in others.items():
        try:
            sketch(trial.env.reset, given)
        except Exception:
            continue
        return f"`reset` {text}"
    return None


def state(trial: Trial) -> Faults:
    """A state is a record and a pytree, with the fields of the protocol and arrays in it."""
    found = trial.reset_sketch
    if found.missing:
        yield Fault(
            "state",
            f"a `{found.kind}` lacks {listed(found.missing)}. A state has the fields `obs`, "
            "`reward`, `done`, `info` and `metrics` (the last two may be empty dictionaries); "
            "`eqx_ppo.envs.State` is a record of these.",
        )
        return
    if found.treedef == jax.tree.structure(0):
        yield Fault(
            "state",
            f"a `{found.kind}` is not a pytree, so that JAX takes it for one value. Register it "
            "with `jax.tree_util.register_dataclass`, or make it a NamedTuple, an "
            "`equinox.Module`, a `flax.struct` or a `eqx_ppo.envs.State`.",
        )
        return
    if not found.is_record:
        yield Fault(
            "state",
            f"a `{found.kind}` is neither a dataclass nor a NamedTuple, so that wrappers cannot "
            "replace its fields.",
        )
    for field in found.not_dicts:
        yield Fault(f"state.{field}", "must be a dictionary, which may be empty.")
    for name, kind in found.others:
        yield Fault(
            f"state{name}",
            f"must be an array or a number, but is a `{kind}`. Keep it on the environment, or in "
            "a static field of the state.",
        )


def reset_wrappers(trial: Trial) -> Faults:
    """No wrapper inside resets ended episodes; those of brax and Playground leave their mark."""
    within = trial.reset_sketch.within("info")
    found = [match[1] for leaf in within if (match := _INFO_KEY.match(leaf.name))]
    marks = list(dict.fromkeys(name for name in found if name in _FIRST))
    marks = marks if len(marks) > 1 else []
    marks += dict.fromkeys(name for name in found if name.startswith("AutoResetWrapper_"))
    if marks:
        yield Fault(
            f"state.info[{marks[0]!r}]",
            "is what a wrapper keeps that resets ended episodes inside `step`. Give the "
            "environment inside of that wrapper: the library resets, and needs the true last "
            "observation.",
        )


def scalars(trial: Trial) -> Faults:
    """`done`, the time limit flags and every leaf of the reward are scalars."""
    found = trial.reset_sketch
    if len(found.within("done")) != 1:
        yield Fault("state.done", "must be one scalar, not a tree. Combine what ends an episode.")
    flags = [leaf for leaf in found.leaves if is_within(leaf.name, "done")] + found.flags
    for leaf in flags:
        if leaf.shape:
            yield Fault(
                f"state{leaf.name}",
                f"must be a scalar, of any dtype, but is {leaf}. Index it, or reduce it with "
                "`jnp.any`.",
            )
    rewards = found.within("reward")
    if not rewards:
        yield Fault("state.reward", "must be a scalar or a tree of scalars, but has no leaf.")
    for leaf in rewards:
        if leaf.shape:
            yield Fault(
                f"state{leaf.name}",
                f"must be a scalar, but is {leaf}. Sum or index it, or return a dictionary of "
                "scalar rewards.",
            )


def step(trial: Trial) -> Faults:
    """`step` takes one state and one action."""
    try:
        trial.stepped  # noqa: B018 (it is traced here for the first time)
    except Exception as error:
        if is_about_tracing(error):
            raise
        action = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", trial.abstract_action)
        yield Fault(
            "",
            f"`step` could not be run with an action {action}, the kind that `check_env` got from "
            f"`sample_action` or `action_size`. {type(error).__name__}: {first_paragraph(error)}",
        )


def in_place(trial: Trial) -> Faults:
    """`step` does not write into the state that it is given (see the advice for metrics)."""
    written = [name for name in trial.stepped.written if not is_within(name, "metrics")]
    if written:
        yield Fault(
            f"state{written[0]}",
            f"`step` writes {among(written)} into the state that it was given. Make a new "
            "dictionary, `info = {**state.info, ...}`: what holds the old state (a wrapper, a "
            "recording) sees it change.",
        )


def among(names: list[str]) -> str:
    """A few of many names."""
    shown = [name.removeprefix(".") for name in names[:3]]
    return listed(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def listed(names: list[str] | tuple[str, ...]) -> str:
    """Names in a sentence."""
    return ", ".join(f"`{name}`" for name in names)
