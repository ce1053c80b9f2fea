"""Shape and type checks at the library's boundary, and in the code of its users.

Public functions carry jaxtyping annotations and are decorated with `typed`; every
subclass of `StatefulModule` gets the same for its methods (`check_methods`). The checks
run while JAX traces, so compiled code does not pay for them. Those of users' own code can
be switched off with `set_shape_checks`; all of them by jaxtyping's own switch.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar, Union, get_args, get_origin

from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, jaxtyped

# An int may stand for a float, as type checkers have it (PEP 484).
_TYPECHECKER = beartype(conf=BeartypeConf(is_pep484_tower=True))

# The parts of jaxtyping's message that ours is made of.
_IS_RAW = re.compile(r"Type-check error whilst checking the (parameters|return value) of")
_PARAMETER = re.compile(r"typechecking parameter '(\w+)'")
_ACTUAL = re.compile(
    r"^Actual value: (.*?)\nExpected type: (.*?)\.?\n-{5,}", re.MULTILINE | re.DOTALL
)
_KNOWN_AXIS = re.compile(r"^(\w+)=(\S+)$", re.MULTILINE)
_SHAPE = re.compile(r"(\w+\[[\w.]+, )(['\"])([^'\"]*)\2\]")

_P = ParamSpec("_P")
_R = TypeVar("_R")

_switch = {"users": True}


def set_shape_checks(enabled: bool) -> None:
    """Switches the checks of annotated code outside this library on (the default) or off.

    That is functions decorated with `shape_checked`, and the methods of your own subclasses
    of `StatefulModule`. What was traced already stays as it is. The functions and modules of
    the library itself are checked always, because everything goes through them; only
    jaxtyping's own switch, the environment variable `JAXTYPING_DISABLE=1`, silences those
    too.
    """
    _switch["users"] = enabled


def shape_checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Checks the annotated shapes and types of your own function at every traced call.

    Methods of a `StatefulModule` are checked without it. Axis names are bound per call, so
    that `B` is the same number in every argument and in the result; `{self.size}` and
    `{size}` stand for an attribute and an argument.

    ```python
    @shape_checked
    def standardize(x: Float[Array, "B D"], mean: Float[Array, " D"]) -> Float[Array, "B D"]:
        return x - mean
    ```

    Compiled code does not pay for it. See `set_shape_checks` to switch it off.

    **Raises:** `jaxtyping.TypeCheckError` (a `TypeError`), when called with the wrong shape
    or dtype, or returning one.
    """
    checked = typed(function)

    @functools.wraps(function)
    def switchable(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True
        return checked(*args, **kwargs) if _switch["users"] else function(*args, **kwargs)

    return switchable


def typed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Checks the annotated shapes and types of `function` at every (traced) call."""
    checked = jaxtyped(function, typechecker=_TYPECHECKER)

    @functools.wraps(function)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True
        try:
            return checked(*args, **kwargs)
        except TypeCheckError as error:
            _explain(error, function, args, kwargs)
            raise

    return explained


def check_methods(cls: type) -> None:
    """Checks the annotated methods that `cls` itself defines.

    Meant for `__init_subclass__`. `typing.Self` is resolved to `cls`, which beartype
    cannot do for a function that it sees outside its class.
    """
    check = typed if cls.__module__.split(".")[0] == "eqx_ppo" else shape_checked
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and method.__annotations__:
            method.__annotations__ = {
                parameter: _without_self(hint, cls)
                for parameter, hint in method.__annotations__.items()
            }
            setattr(cls, name, check(method))


def _without_self(hint: object, cls: type) -> object:
    """The annotation with `cls` for `Self`, also within a union or a collection."""
    if isinstance(hint, str):
        return cls if hint == "Self" else hint
    if hint is Self:
        return cls
    if isinstance(hint, list):  # the arguments of a `Callable`
        return [_without_self(part, cls) for part in hint]
    parts, origin = get_args(hint), get_origin(hint)
    resolved = tuple(_without_self(part, cls) for part in parts)
    if origin is None or resolved == parts:
        return hint
    return Union[resolved] if origin is types.UnionType else origin[resolved]  # noqa: UP007


def _explain(error: TypeCheckError, function: Callable, args: tuple, kwargs: dict) -> None:
    """Rewrites jaxtyping's message in place: who, what was expected, what came, the way out.

    An error that comes from a function further in has been rewritten there.
    """
    raw = str(error)
    kind, actual = _IS_RAW.match(raw), _ACTUAL.search(raw)
    if kind is None or actual is None:
        return
    parameter = _PARAMETER.search(raw)
    if kind[1] == "parameters" and parameter is None:
        return
    got, expected = actual[1], _plain(actual[2])
    axes = dict(_KNOWN_AXIS.findall(raw[actual.end() :]))
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    resolved = _SHAPE.sub(lambda found: _resolve(found, axes, arguments), expected)
    here = "" if resolved == expected else f", here `{resolved}`,"
    subject = f"expected `{parameter[1]}` to be" if parameter else "should return"
    verb = "got" if parameter else "returned"
    error.args = (
        f"`{_name(function, args)}` {subject} `{expected}`{here} but {verb} {got}. "
        + _way_out(expected, got, is_parameter=parameter is not None),
    )
    error.__cause__ = None
    error.__suppress_context__ = True


def _name(function: Callable, args: tuple) -> str:
    """`Sequential.unroll`, with the class of the object that the method was called on."""
    name = function.__qualname__.rsplit("<locals>.", 1)[-1]
    owner, _, method = name.rpartition(".")
    classes = type(args[0]).__mro__ if args else ()
    is_method = owner in [cls.__name__ for cls in classes]
    return f"{type(args[0]).__name__}.{method}" if is_method else name


def _plain(annotation: str) -> str:
    """An annotation as it is written: `Float[Array, 'B D']`."""
    annotation = re.sub(r"^<class '(.*)'>$", r"\1", annotation, flags=re.DOTALL)
    return re.sub(r"\b[\w.]+\.(Array|PyTree)\b", r"\1", annotation)


def _resolve(found: re.Match, axes: dict[str, str], arguments: dict[str, object]) -> str:
    """The shape with numbers for the axes that are known."""
    sizes = []
    for axis in found[3].split():
        size = axes.get(axis, axis)
        if "{" in axis:
            try:
                size = axis.format(**arguments)
            except (AttributeError, IndexError, KeyError, ValueError):
                size = axis  # an expression, which stands for itself
        sizes.append(size)
    return f"{found[1]}{found[2]}{' '.join(sizes)}{found[2]}]"


def _way_out(expected: str, got: str, *, is_parameter: bool) -> str:
    if "(numpy)" in got:
        return "Turn NumPy arrays into JAX arrays with `jnp.asarray`."
    if is_parameter and "'T B" in expected:
        return "Time comes first, then the batch of environments: [T, B, *feat]."
    if is_parameter:
        return "Compare what feeds it with the sizes and dtypes that it was built for."
    return "Correct what it computes, or its annotation."
