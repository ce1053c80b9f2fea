"""Files of rows: appended to without losing anything, and cut back where a run resumes."""

import abc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, final

from eqx_ppo.training._sinks._sink import RunInfo, Sink

STEPS, SECONDS = "total_steps", "seconds"
"""The first two columns of every row."""

_LIMIT = 64 * 2**20  # bytes that wait for a disk with room


class RowFile(Protocol):
    """An open file of rows; one that could not be written waits, and is written later."""

    def append(self, row: dict[str, float]) -> None:
        """Writes a row, after all that still wait."""
        ...

    def close(self) -> None:
        """Writes what waits and closes the file."""
        ...


class FileSink(Sink):
    """What sinks with a file of rows share; a subclass says how such a file is opened."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False):
        """**Arguments:**

        - `path`: of the file; missing folders are made.
        - `overwrite`: lets a new run empty a file that holds another one's metrics. A run
            that is resumed never needs it.
        """
        self._path = Path(path)
        self._overwrite = overwrite
        self._file: RowFile | None = None
        self._clock = Clock()

    @abc.abstractmethod
    def _open(self, path: Path, resumed_at: int | None) -> tuple[RowFile, float]:
        """The file without the rows behind the resumed step, and the seconds so far."""

    def start(self, run: RunInfo) -> None:
        """Opens the file; for a resumed run, drops the rows behind the resumed step.

        **Raises:** `FileExistsError` if a new run would mix with the rows of another one;
        `ValueError` if the file holds something else than such rows (it stays untouched).
        """
        make_room(self._path, resumed=run.resumed_at is not None, overwrite=self._overwrite)
        self._file, already = self._open(
            self._path, run.resumed_at if self._path.exists() else None
        )
        self._clock = Clock(already)

    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        """Appends a row, after all that could not be written before."""
        if self._file is None:
            raise RuntimeError(f"{self!r} was not started.")
        self._file.append(self._clock.row(metrics, steps))

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"


@final
class Appending:
    """A file to append to; what could not be written waits, and is written later.

    Every write reaches the operating system before it returns, so that it survives the end
    of the process.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._waiting = bytearray()

    def append(self, data: bytes) -> None:
        """Writes, after all that still waits.

        **Raises:** `OSError` if not everything could be written. The rest waits, unless
        64 MiB do so already.
        """
        if len(self._waiting) + len(data) > _LIMIT:
            self.flush()
        self._waiting += data
        self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        while self._waiting:
            written = self._file.write(self._waiting)
            del self._waiting[:written]

    def close(self) -> None:
        """Writes what waits and closes the file."""
        try:
            self.flush()
        finally:
            self._file.close()


@final
class Clock:
    """Seconds of a run, continued over its parts."""

    def __init__(self, already: float = 0.0):
        """**Arguments:**

        - `already`: seconds of the earlier parts.
        """
        self._zero = time.perf_counter() - already

    def row(self, metrics: Mapping[str, float], steps: int) -> dict[str, float]:
        """The metrics behind the columns that every row has."""
        seconds = round(time.perf_counter() - self._zero, 3)
        return {STEPS: steps, SECONDS: seconds} | dict(metrics) | {STEPS: steps}


def make_room(path: Path, *, resumed: bool, overwrite: bool) -> None:
    """Makes the folder of a file, and refuses a file with rows that a new run would mix with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if resumed or not path.exists() or path.stat().st_size == 0:
        return
    if not overwrite:
        raise FileExistsError(
            f"`{path}` holds the metrics of another run. Resume that run, choose another path, or "
            "say `overwrite=True` to lose them."
        )
    os.truncate(path, 0)
