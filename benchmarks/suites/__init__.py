"""The suites. Each is a function from a plan to what it found."""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks._figures import Figure
from benchmarks._settings import Plan, Setting


class Found(NamedTuple):
    """Figures, and the settings they belong to."""

    figures: list[Figure]
    settings: list[Setting]


Suite = Callable[[Plan], Found]


def all_suites() -> dict[str, Suite]:
    """By name, in the order in which they are run."""
    from benchmarks.suites.breakdown import breakdown
    from benchmarks.suites.compile import compile_time
    from benchmarks.suites.host import host
    from benchmarks.suites.learning import learning
    from benchmarks.suites.memory import memory
    from benchmarks.suites.scaling import scaling
    from benchmarks.suites.throughput import throughput

    return {
        "throughput": throughput,
        "breakdown": breakdown,
        "host": host,
        "compile": compile_time,
        "memory": memory,
        "scaling": scaling,
        "learning": learning,
    }


def say(text: str) -> None:
    """A line of progress."""
    print(f"  {text}", flush=True)
