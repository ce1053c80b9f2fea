"""An environment's functions as JAX sees them, and whether two of those are the same."""

import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from eqx_ppo._compare import as_numpy
from eqx_ppo._typing import Tree

Programs: TypeAlias = dict[str, ClosedJaxpr]
"""`reset` and `step`."""


def program_of(function: Callable, *args: Tree) -> ClosedJaxpr:
    """Traces `function` anew."""

    def again(*given):  # JAX knows a function that it has traced
        return function(*given)

    return jax.make_jaxpr(again)(*args)


def n_operations(program: ClosedJaxpr) -> int:
    """How many operations it has, those in loops counted once."""
    return sum(len(part.eqns) for part, _ in _parts(program))


def is_same_program(one: ClosedJaxpr, two: ClosedJaxpr) -> bool:
    """Whether two programs do the same with the same constants."""
    first, second = _constants(one), _constants(two)
    return (
        _text(one) == _text(two) and len(first) == len(second) and all(map(_is_same, first, second))
    )


def holds_tracer(program: ClosedJaxpr) -> bool:
    """Whether it uses something from an earlier tracing."""
    return any(isinstance(constant, Tracer) for constant in _constants(program))


def _text(program: ClosedJaxpr) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr))  # without addresses


def _constants(program: ClosedJaxpr) -> list[Tree]:
    return [constant for _, constants in _parts(program) for constant in constants]


def _is_same(one: Tree, two: Tree) -> bool:
    if not isinstance(one, jax.Array | np.ndarray):
        return True  # the text shows it
    a, b = map(as_numpy, map(jax.numpy.asarray, (one, two)))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _parts(program: ClosedJaxpr | Jaxpr) -> Iterator[tuple[Jaxpr, list[Tree]]]:
    """A program and those inside of it, with their constants."""
    is_closed = isinstance(program, ClosedJaxpr)
    jaxpr = program.jaxpr if is_closed else program
    yield jaxpr, list(program.consts) if is_closed else []
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from _parts(value)


def _is_program(value: Tree) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)
