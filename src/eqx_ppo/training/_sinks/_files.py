"""Files of rows: appended to without losing anything, and cut back where a run resumes."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

STEPS, SECONDS = "total_steps", "seconds"
"""The first two columns of every row."""

_LIMIT = 64 * 2**20  # bytes that wait for a disk with room


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
