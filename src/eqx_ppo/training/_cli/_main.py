"""From what was typed to a command, and from what went wrong to one line."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eqx_ppo.training._checkpoint import CheckpointError
from eqx_ppo.training._cli._commands import INTERRUPTED, eval_, list_, plot, train, video
from eqx_ppo.training._cli._errors import CommandError
from eqx_ppo.training._stops import TrainingDivergedError

_PROGRAM = "eqx-ppo"
_WRONG_USE = 2
_STATUS = {
    CommandError: _WRONG_USE,
    CheckpointError: _WRONG_USE,
    TrainingDivergedError: 1,
    KeyboardInterrupt: INTERRUPTED,
}


class _Command(NamedTuple):
    """A command and what it is for."""

    run: Callable[[str, Sequence[str]], int]
    usage: str
    about: str


_COMMANDS = {
    "train": _Command(train, "ENV [flags]", "train a policy, and leave a run folder"),
    "eval": _Command(eval_, "RUN [flags]", "evaluate the policy of a run"),
    "plot": _Command(plot, "RUN... [flags]", "draw the learning curves of runs"),
    "video": _Command(video, "RUN [flags]", "make a video of the policy of a run"),
    "list": _Command(list_, "", "list the environments and presets"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    **Arguments:**

    - `arguments`: what follows the name of the program; that of this process by default.

    **Returns:** the exit status: 0, 2 for something wrong with the arguments, 1 for a run that
    failed, 130 for one that was interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(list(arguments))
    except SystemExit as stop:  # help was asked for
        return stop.code if isinstance(stop.code, int) else 0
    except tuple(_STATUS) as error:
        return _fail(error)
    except BrokenPipeError:  # who reads has seen enough, as in `eqx-ppo list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else _WRONG_USE
    name, *rest = arguments
    if name not in _COMMANDS:
        raise CommandError(
            f"`{name}` is no command. There are {', '.join(_COMMANDS)}; see `{_PROGRAM} --help`."
        )
    return _COMMANDS[name].run(f"{_PROGRAM} {name}", rest)


def _overview() -> str:
    lines = [f"usage: {_PROGRAM} COMMAND ...", "", "PPO for stateful networks.", ""]
    for name, command in _COMMANDS.items():
        lines.append(f"  {_PROGRAM} {name + ' ' + command.usage:<22} {command.about}")
    return "\n".join([*lines, "", f"See `{_PROGRAM} COMMAND --help` for the flags of each."])


def _fail(error: BaseException) -> int:
    """Says what went wrong, in one line; each difference of a checkpoint is a line before."""
    first, *others = str(error).splitlines() or ["interrupted"]
    message = " ".join([first, "; ".join(line.strip() for line in others)]).strip()
    print(f"{_PROGRAM}: error: {message}", file=sys.stderr)
    return next(status for kind, status in _STATUS.items() if isinstance(error, kind))
