"""Several sinks as one, of which none can end a run."""

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from typing import final

from eqx_ppo.training._sinks._sink import RunInfo, Sink


@final
class SinkGroup(Sink):
    """Hands everything to several sinks, and goes on when one of them fails.

    A full disk or a lost connection should not end a run of a day. So an exception of
    `write` or `close` becomes a warning, once for each sink and then again at the end with a
    count; the other sinks get their rows, and the failing one is asked again at the next
    row. Exceptions of `start` are raised: nothing has been trained yet. So are
    `KeyboardInterrupt` and `SystemExit`.
    """

    def __init__(self, sinks: Iterable[Sink]):
        """**Arguments:**

        - `sinks`: in the order in which they are served.

        **Raises:** `TypeError` for something that is not a `Sink`.
        """
        self._sinks = tuple(sinks)
        for sink in self._sinks:
            if not isinstance(sink, Sink):
                raise TypeError(
                    f"`sinks` must be `Sink` objects, but got `{sink!r}`. A function that takes "
                    "metrics and steps is passed as `log_fn`."
                )
        self._failures = [0] * len(self._sinks)
        self._rows = 0

    def start(self, run: RunInfo) -> None:
        """Starts all; if one fails, those that were started before it are closed again."""
        self._failures = [0] * len(self._sinks)
        self._rows = 0
        with contextlib.ExitStack() as started:
            for sink in self._sinks:
                sink.start(run)
                started.callback(sink.close)
            started.pop_all()

    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        """Hands the row to every sink."""
        self._rows += 1
        for index, sink in enumerate(self._sinks):
            try:
                sink.write(metrics, steps)
            except Exception as error:
                self._failed(index, f"could not write the metrics of step {steps:,}", error)

    def close(self) -> None:
        """Closes all, and says which of them failed how often."""
        for index, sink in enumerate(self._sinks):
            failures = self._failures[index]
            try:
                sink.close()
            except Exception as error:
                self._failed(index, "could not be closed", error)
            if failures:
                _warn(f"{sink!r} failed at {failures:,} of {self._rows:,} rows in this run.")
        self._failures = [0] * len(self._sinks)
        self._rows = 0

    def _failed(self, index: int, what: str, error: Exception) -> None:
        self._failures[index] += 1
        if self._failures[index] == 1:
            _warn(
                f"{self._sinks[index]!r} {what}: {type(error).__name__}: {error}. Training goes "
                "on, and the sink is tried again at every row; this is not said again before "
                "the end of the run."
            )


def _warn(message: str) -> None:
    # Not `stacklevel`: the culprit is the sink, which the message names.
    warnings.warn(message, RuntimeWarning, stacklevel=2)
