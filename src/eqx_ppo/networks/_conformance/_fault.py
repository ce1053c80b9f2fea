"""What a rule finds."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias


class Fault(NamedTuple):
    """A leaf that breaks a rule, and how."""

    leaf: str
    message: str


Faults: TypeAlias = Iterator[Fault]
