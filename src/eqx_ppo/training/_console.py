"""Progress on the terminal: a bar, and a line per evaluation."""

import time
from collections import deque
from collections.abc import Mapping
from typing import final

from eqx_ppo._typing import Tree
from eqx_ppo.training._sinks import RunInfo, Sink

_WINDOW = 10.0  # seconds over which the rate is taken
_TOGETHER = 0.05  # seconds within which rows count as arrived together
_REFRESHES = 2.0  # of the bar, per second
_RETURN = "eval/episode_reward/mean"
_FAULTS = {"invalid_steps": "invalid steps", "skipped_updates": "skipped updates"}


@final
class ConsoleSink(Sink):
    """Prints how training goes: a line per evaluation, and on a terminal a bar below them.

    The rate is that of the last ten seconds, with everything that took time in them. Where
    the output is no terminal (a file, a pipe) there are lines alone, and one every
    `seconds_between_lines` if no evaluation comes sooner. Invalid steps and skipped updates
    are mentioned as soon as there are any.
    """

    def __init__(self, *, seconds_between_lines: float = 60.0):
        """**Arguments:**

        - `seconds_between_lines`: without a terminal, the longest time without a line, as far
            as iterations finish.
        """
        self._patience = seconds_between_lines
        self._bar: Tree = None
        self._task: Tree = None
        self._total = self._steps = 0
        self._faults = dict.fromkeys(_FAULTS, 0)
        self._history: deque[tuple[float, int]] = deque()
        self._started = self._printed = self._shown = 0.0

    def start(self, run: RunInfo) -> None:
        """Shows the bar, where there is a terminal."""
        self._total, self._steps = run.total_steps, run.resumed_at or 0
        self._faults = dict.fromkeys(_FAULTS, 0)
        self._history.clear()
        self._started = self._printed = self._shown = time.perf_counter()
        self._bar = _bar()
        if self._bar is not None:
            self._task = self._bar.add_task(
                "compiling", total=max(self._total, 1), completed=self._steps, status=""
            )

    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        """Moves the bar; prints a line for an evaluation, or if there was none for long."""
        now = time.perf_counter()
        self._steps = steps
        for name in _FAULTS:
            if name in metrics:
                self._faults[name] += int(metrics[name])
        self._remember(now, steps)
        if self._bar is not None and now - self._shown > 1.0 / _REFRESHES:
            self._show(now)
        if _RETURN in metrics:
            self._print(f"{self._line(now)}{_outcome(metrics)}  {self._status()}", now)
        elif self._bar is None and now - self._printed > self._patience:
            self._print(f"{self._line(now)}  {self._status()}", now)

    def close(self) -> None:
        """Ends the bar and leaves it as it is."""
        if self._bar is None:
            return
        self._show(time.perf_counter())
        bar, self._bar = self._bar, None
        bar.stop()

    def __repr__(self) -> str:
        return "ConsoleSink()"

    def _remember(self, now: float, steps: int) -> None:
        """Notes where the run stands; iterations that arrive together count as one."""
        if self._history and now - self._history[-1][0] < _TOGETHER:
            now, _ = self._history.pop()
        self._history.append((now, steps))
        while now - self._history[0][0] > _WINDOW and len(self._history) > 2:
            self._history.popleft()

    def _show(self, now: float) -> None:
        self._shown = now
        self._bar.update(
            self._task, description="training", completed=self._steps, status=self._status()
        )

    def _line(self, now: float) -> str:
        share = min(100.0, 100.0 * self._steps / max(self._total, 1))
        return f"{now - self._started:>8.1f} s {self._steps:>12,} steps ({share:3.0f} %)"

    def _status(self) -> str:
        """The rate, and what went wrong so far."""
        parts = []
        if len(self._history) > 1:
            (first, done_then), (last, done) = self._history[0], self._history[-1]
            parts.append(f"{(done - done_then) / (last - first):,.0f} steps/s")
        parts += [f"{count:,} {_FAULTS[name]}" for name, count in self._faults.items() if count]
        return "  ".join(parts)

    def _print(self, line: str, now: float) -> None:
        self._printed = now
        if self._bar is None:
            print(line.rstrip(), flush=True)
        else:
            self._bar.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _outcome(metrics: Mapping[str, float]) -> str:
    """What an evaluation found."""
    spread = metrics["eval/episode_reward/std"]
    text = f"  return {metrics[_RETURN]:>9.2f} +- {spread:<8.2f}"
    text += f"  length {metrics['eval/lifespan/mean']:>7.1f}"
    invalid = metrics.get("eval/invalid", 0.0)
    return f"{text}  {invalid:.0%} invalid" if invalid else text


def _bar() -> Tree:
    """A running progress bar; `None` where the output is no terminal, or has a bar already."""
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console()
    if not (console.is_terminal or console.is_jupyter):
        return None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=console,
        refresh_per_second=_REFRESHES,
    )
    try:
        bar.start()
    except LiveError:
        return None
    return bar
