"""Bytes: what must be held, what a compiled function needs, what a process took."""

import itertools
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks._environments import Sizes
from benchmarks._floors import layer_sizes
from benchmarks._handwritten import Experience, experience_shapes
from benchmarks._settings import Setting


class Compiled(NamedTuple):
    """Bytes of a compiled function, as XLA reports them.

    `total` is what lives while it runs: arguments, results that do not take over a donated
    argument, and temporaries.
    """

    arguments: int
    results: int
    temporaries: int
    total: int


def compiled_bytes(fn: Callable, *args: object, donate: tuple[int, ...] = ()) -> Compiled:
    """Compiles `fn` for abstract arguments and asks XLA."""
    return bytes_of(jax.jit(fn, donate_argnums=donate).lower(*args).compile())


def bytes_of(compiled: jax.stages.Compiled) -> Compiled:
    """Asks XLA."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    arguments, results = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    total = arguments + results - analysis.alias_size_in_bytes + temporaries
    return Compiled(arguments, results, temporaries, total)


def tree_bytes(tree: object) -> int:
    """Of all arrays, or of their abstract shapes."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


class Needed(NamedTuple):
    """Bytes that an update has to hold at once.

    - `rollout`: every number of it, once.
    - `activations`: the outputs of all layers for one minibatch, for the way back.
    - `weights`: parameters, their gradient and Adam's two moments.
    """

    rollout: int
    activations: int
    weights: int

    @property
    def total(self) -> int:
        return sum(self)


def needed_bytes(setting: Setting, sizes: Sizes) -> Needed:
    """From the sizes alone, for an MLP."""
    rollout: Experience = experience_shapes(setting, sizes)
    widths = layer_sizes(setting, sizes)
    samples = setting.counts.samples_per_gradient
    outputs = sum(sum(layers[1:]) for layers in widths.values())
    n_params = sum(
        (inner + 1) * outer
        for layers in widths.values()
        for inner, outer in itertools.pairwise(layers)
    )
    return Needed(tree_bytes(rollout), 4 * samples * outputs, 4 * 4 * n_params)


def peak_resident_bytes() -> int:
    """The largest resident size of this process so far.

    Linux counts the parent's size into the child's `ru_maxrss`, but not into `VmHWM`.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def peak_device_bytes() -> int | None:
    """The most that JAX held on the device, where it counts that (not on a CPU)."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
