"""Timing things that take turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

import jax

from benchmarks.peers import Runner


@final
class CallRunner:
    """A `Runner` of a compiled function: an iteration is one call, always on the same input."""

    def __init__(self, fn: Callable, *args: object):
        self.chunk = 1
        self._fn = fn
        self._args = args

    def run(self, n_iterations: int) -> None:
        result = None
        for _ in range(n_iterations):
            result = self._fn(*self._args)
        jax.block_until_ready(result)

    def close(self) -> None:
        self._args = ()


@final
class LoopRunner:
    """A `Runner` of a compiled loop: `fn(state, count)` returns the state after `count` rounds.

    The state may be donated.
    """

    def __init__(self, fn: Callable, state: object):
        self.chunk = 1
        self._fn = fn
        self._state = state

    def run(self, n_iterations: int) -> None:
        self._state = jax.block_until_ready(self._fn(self._state, n_iterations))

    def close(self) -> None:
        self._state = None


@final
class SuccessiveRunner:
    """A `Runner` that runs each of its parts as often as asked, one part after the other."""

    def __init__(self, parts: Sequence[Runner]):
        self.chunk = 1
        self._parts = parts

    def run(self, n_iterations: int) -> None:
        for part in self._parts:
            part.run(n_iterations)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def interleave(
    runners: Mapping[str, Runner], repeats: int, seconds: float
) -> dict[str, tuple[float, ...]]:
    """Seconds per iteration of each runner, one value per repeat.

    First everything is compiled and run three times. Then, in every repeat, each takes its turn;
    who begins moves on from repeat to repeat. A timing covers as many iterations as take
    about `seconds` (and at least the runner's chunk).
    """
    counts = {}
    for name, runner in runners.items():
        runner.run(runner.chunk)  # compiles
        runner.run(runner.chunk)  # some libraries compile again for their own results
        counts[name] = runner.chunk * chunks_for(_seconds(runner, runner.chunk), seconds)
    times: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for repeat in range(repeats):
        start = repeat % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(_seconds(runners[name], counts[name]) / counts[name])
    return {name: tuple(values) for name, values in times.items()}


def chunks_for(seconds_per_chunk: float, seconds: float) -> int:
    """How many chunks take about `seconds`; at least one."""
    return max(1, round(seconds / max(seconds_per_chunk, 1e-9)))


def _seconds(runner: Runner, n_iterations: int) -> float:
    start = time.perf_counter()
    runner.run(n_iterations)
    return time.perf_counter() - start
