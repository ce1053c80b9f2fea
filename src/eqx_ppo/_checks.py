"""Shape and type checks at the library's boundary.

Public functions carry jaxtyping annotations and are decorated with `typed`; every
subclass of `StatefulModule` gets the same for its methods (`check_methods`). The checks
run while JAX traces, so compiled code does not pay for them. They are switched off with
the environment variable `JAXTYPING_DISABLE=1`, or with
`jaxtyping.config.update("jaxtyping_disable", True)`.
"""

import inspect
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

# An int may stand for a float, as type checkers have it (PEP 484).
_TYPECHECKER = beartype(conf=BeartypeConf(is_pep484_tower=True))

_P = ParamSpec("_P")
_R = TypeVar("_R")


def typed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Checks the annotated shapes and types of `function` at every (traced) call."""
    return jaxtyped(function, typechecker=_TYPECHECKER)


def check_methods(cls: type) -> None:
    """Applies `typed` to the annotated methods that `cls` itself defines.

    Meant for `__init_subclass__`. `typing.Self` is resolved to `cls`, which beartype
    cannot do for a function that it sees outside its class.
    """
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and method.__annotations__:
            method.__annotations__ = {
                parameter: cls if hint in (Self, "Self") else hint
                for parameter, hint in method.__annotations__.items()
            }
            setattr(cls, name, typed(method))
