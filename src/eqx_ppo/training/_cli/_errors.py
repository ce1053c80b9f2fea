"""What the command line says when it cannot do what it was asked to."""

import contextlib
import re
from collections.abc import Iterator
from typing import final

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_BOX = re.compile(r"^[│╭╰]\s?|\s*[│╮╯]$|^─+$")


@final
class CommandError(Exception):
    """Something is wrong with what the user gave; the message is one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


@contextlib.contextmanager
def told_in_one_line() -> Iterator[None]:
    """Turns errors that are about what the user gave into a `CommandError`."""
    try:
        yield
    except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        raise CommandError(str(message)) from error


def message_in_box(text: str) -> str:
    """What a box of tyro's says, without its title, its frame and what it says about help."""
    lines = [line for line in _ANSI.sub("", text).splitlines() if not line.startswith(("╭", "╰"))]
    lines = [_BOX.sub("", _BOX.sub("", line)).strip() for line in lines]
    words = " ".join(line for line in lines if line.strip("─"))
    return re.split(r"For full helptext|Argument helptext:|Got errors:", words)[0].strip(" .")
