"""Flags from records: a form per configuration record, which the command line fills in.

A form has the fields of its record, with types that a command line can give and with the
record's own documentation. It checks nothing, so that the values of several flags are only
judged together, by the record that is built from the filled form.
"""

import contextlib
import dataclasses
import io
import json
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import LoggingLevel
from eqx_ppo.envs import CachedReset, FreshReset, PooledReset, ResetStrategy
from eqx_ppo.training._cli._errors import CommandError, message_in_box

_T = TypeVar("_T")

_STRATEGIES = {"fresh": FreshReset, "cached": CachedReset, "pooled": PooledReset}
_BULLET = re.compile(r"^- ((?:`\w+`(?:, )?)+): (.*?)(?=^- `|^\*\*|^$|\Z)", re.MULTILINE | re.DOTALL)


def parse(form: Tree, command: str, arguments: Sequence[str], default: Tree = None) -> Tree:
    """Fills in a form.

    **Arguments:**

    - `command`: what the user typed before the arguments.
    - `default`: a filled form, whose values stand where the arguments say nothing.

    **Raises:** `CommandError` for flags or values that do not fit; `SystemExit` after help.
    """
    said = io.StringIO()
    default = tyro.MISSING_NONPROP if default is None else default
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(form, prog=command, args=list(arguments), default=default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    raise CommandError(f"{message_in_box(said.getvalue())}. See `{command} --help`.")


def form_of(
    record: type, *, leave_out: Collection[str] = (), names: Mapping[str, str] | None = None
) -> Tree:
    """The form of a record.

    **Arguments:**

    - `record`: a dataclass, with an `**Arguments:**` section in its docstring.
    - `leave_out`: fields that are not asked for.
    - `names`: what fields are called on the command line, where that differs.
    """
    hints, helps, names = get_type_hints(record), _argument_help(record), names or {}
    fields = []
    for field in dataclasses.fields(record):
        if field.name not in leave_out:
            about = tyro.conf.arg(name=names.get(field.name), help=helps.get(field.name))
            hint = Annotated[_flag_type(hints[field.name]), about]
            fields.append((field.name, hint, _copy_default(field)))
    form = dataclasses.make_dataclass(f"{record.__name__}Form", fields, kw_only=True)
    form.__doc__ = f"Fields of `{record.__name__}`."
    return form


def fill(form: Tree, record: Tree) -> Tree:
    """A form with the values of a record."""
    return form(**{field.name: vars(record)[field.name] for field in dataclasses.fields(form)})


def apply(filled: Tree, record: _T) -> _T:
    """The record with the values of a filled form.

    **Raises:** what the record raises for values that it refuses.
    """
    return dataclasses.replace(record, **vars(filled))  # pyright: ignore[reportArgumentType]


def _copy_default(field: dataclasses.Field) -> Tree:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default=field.default)


def _argument_help(record: type) -> dict[str, str]:
    """What the docstring of a record says about each field."""
    text = re.sub(r"^ +", "", record.__doc__ or "", flags=re.MULTILINE)
    _, _, section = text.partition("**Arguments:**")
    found = {}
    for names, about in _BULLET.findall(section):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = " ".join(about.split())
    return found


def _flag_type(hint: Tree) -> Tree:
    """The type that a command line can give, for a field of that type."""
    if (get_origin(hint) or hint) in _SPECS:
        return Annotated[hint, _SPECS[get_origin(hint) or hint]]
    is_union = get_origin(hint) in (Union, types.UnionType)
    parts = get_args(hint) if is_union else (hint,)
    for part in parts:
        if get_origin(part) is Literal:
            return part
    optional = types.NoneType in parts
    if get_origin(hint) is Sequence:
        return tuple[get_args(hint)[0], ...]
    for kind in (tuple, float, int, str):  # a number also stands for an array or a schedule
        matching = [part for part in parts if (get_origin(part) or part) is kind]
        if matching and kind is not tuple and optional:
            return optional_flag(kind)
        if matching:
            return matching[0] | None if optional else matching[0]
    return hint


def _spec(
    metavar: str, read: Callable[[str], Tree], say: Callable[[Tree], str]
) -> PrimitiveConstructorSpec:
    """How a value is read from one word, and written as one."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [say(value)],
    )


def optional_flag(kind: type) -> Tree:
    """The type of a flag whose value may be `none`."""
    spec = _spec(
        f"{kind.__name__.upper()}|none",
        lambda word: None if word.lower() == "none" else kind(word),
        lambda value: "none" if value is None else str(value),
    )
    return Annotated[kind | None, spec]


def _parse_level(word: str) -> LoggingLevel:
    level = LoggingLevel.NONE
    for name in re.split(r"[,|]", word):
        if name.upper() not in LoggingLevel.__members__:
            known = ", ".join(LoggingLevel.__members__)
            raise ValueError(f"`{name}` is not one of {known}")
        level |= LoggingLevel[name.upper()]
    return level


def _say_level(level: LoggingLevel) -> str:
    return level.name.replace("|", ",") if level.name else "NONE"


def _parse_strategy(word: str) -> ResetStrategy:
    name, *numbers = word.split(":")
    if name not in _STRATEGIES or (numbers and name != "pooled") or len(numbers) > 2:
        raise ValueError(f"`{word}` is not one of fresh, cached, pooled[:SIZE[:REFILL]]")
    return _STRATEGIES[name](*(None if n == "none" else int(n) for n in numbers))


def _say_strategy(strategy: ResetStrategy) -> str:
    if not isinstance(strategy, PooledReset):
        return next(name for name, kind in _STRATEGIES.items() if type(strategy) is kind)
    if strategy.refill is not None:
        return f"pooled:{strategy.size or 'none'}:{strategy.refill}"
    return "pooled" if strategy.size is None else f"pooled:{strategy.size}"


def _parse_settings(words: list[str]) -> dict[str, Tree]:
    settings = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"`{word}` is not of the form NAME=VALUE")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


_SETTINGS = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[NAME=VALUE ...]",
    instance_from_str=_parse_settings,
    is_instance=lambda value: isinstance(value, Mapping),
    str_from_instance=lambda value: [f"{name}={json.dumps(part)}" for name, part in value.items()],
)

_SPECS = {
    LoggingLevel: _spec("LEVEL[,LEVEL...]", _parse_level, _say_level),
    ResetStrategy: _spec("fresh|cached|pooled[:SIZE[:REFILL]]", _parse_strategy, _say_strategy),
    Mapping: _SETTINGS,
}
