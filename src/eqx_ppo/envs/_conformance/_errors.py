"""What an error says about an environment: which rule it breaks, and what to do."""

import re

import jax

from eqx_ppo._report import Finding, first_paragraph

_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_NOT_BATCHED = re.compile("vmap|[Bb]atching rule")
LEAK = (
    "a call stored an array outside what it returns (on the environment, in a list, a global or a "
    "closure), which is a leaked tracer in compiled code. Keep it in the state (in `info`, or in "
    "fields of your own), or make it in `__init__`."
)


def is_about_tracing(error: Exception) -> bool:
    """Whether an error tells of code that cannot be compiled, or of a leak."""
    return isinstance(error, (*_CONCRETE, jax.errors.UnexpectedTracerError))


def blame(rule: str, path: str, error: Exception) -> Finding:
    """The finding for an error that came while `rule` was tested."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return Finding("purity", path, "", LEAK)
    said = f"{type(error).__name__}: {' '.join(first_paragraph(error).split())}"
    if isinstance(error, _CONCRETE):
        return Finding(
            "jit",
            path,
            "",
            f"it cannot be compiled. {said} Choose by values with `jnp.where` or `jax.lax.cond` "
            "instead of `if`, and compute with `jax.numpy` instead of NumPy or `float()`.",
        )
    if _NOT_BATCHED.search(said):
        return Finding(
            "vmap",
            path,
            "",
            f"it cannot be run in a batch. {said} The library runs many environments by "
            "`jax.vmap`: give a callback its `vmap_method`, and a primitive its batching rule.",
        )
    return Finding(rule, path, "", f"it could not be run. {said}")
