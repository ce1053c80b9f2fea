"""How XLA is to compile training."""

import functools
import os

import jax
import jax.numpy as jnp

_LIBRARY_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
_KERNEL = "__ynn_fusion"  # what a call of the library is named in a compiled program


def compiler_options() -> dict[str, str | bool]:
    """The options of XLA that `train_ppo` compiles with, for a `jax.jit` of one's own.

    ```python
    step = jax.jit(lambda state: ppo_step(env, state, config), compiler_options=compiler_options())
    ```

    On a CPU, XLA hands not only matrix products but every sum over more than a few thousand
    numbers to a library of kernels (YNNPACK). A call of that takes some ten microseconds, a
    loop of XLA's own about one, and physics is made of such sums: with the library left to
    the products, CheetahRun with 64 environments trains 1.4 times as fast.

    **Returns:** no options on other devices, for versions of XLA that do not do so or do not have
    the option, and where `XLA_FLAGS` says something about it.
    """
    if jax.default_backend() != "cpu" or _LIBRARY_FUSIONS in os.environ.get("XLA_FLAGS", ""):
        return {}
    return dict(_products_alone())


@functools.cache
def _products_alone() -> dict[str, str | bool]:
    if _KERNEL not in _sums_compiled_with({}):
        return {}
    options: dict[str, str | bool] = {_LIBRARY_FUSIONS: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    try:
        compiled = _sums_compiled_with(options)
    except jax.errors.JaxRuntimeError:  # no such option, or no such value
        return {}
    return {} if _KERNEL in compiled else options


def _sums_compiled_with(options: dict[str, str | bool]) -> str:
    """The program that XLA makes of some sums."""
    numbers = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    return jax.jit(lambda x: x.sum(1)).lower(numbers).compile(options).as_text() or ""
