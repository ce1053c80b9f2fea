"""One JSON object per line."""

import json
import math
import os
from pathlib import Path
from typing import final

from eqx_ppo.training._sinks._files import SECONDS, STEPS, Appending, FileSink, RowFile


@final
class JSONLinesSink(FileSink):
    """Appends one JSON object per iteration to a file.

    ```text
    {"total_steps": 5120, "seconds": 8.213, "losses/actor": -0.0021, "losses/critic": 0.31}
    ```

    `seconds` is the time since the start of the run, summed over its parts if it was resumed.
    A value that is NaN or infinite is `null`, because JSON knows neither; a name that was not
    logged in that iteration is absent. Every row is handed to the operating system before
    training goes on, so that it survives the end of the process. What a full disk refuses is
    written when there is room again (up to 64 MiB). `read_metrics` reads the file.
    """

    def _open(self, path: Path, resumed_at: int | None) -> tuple[RowFile, float]:
        already = 0.0 if resumed_at is None else _keep_until(path, resumed_at)
        return _Lines(path), already


@final
class _Lines:
    """An open file with a line per row."""

    def __init__(self, path: Path):
        self._file = Appending(path)

    def append(self, row: dict[str, float]) -> None:
        self._file.append(_line(row))

    def close(self) -> None:
        self._file.close()


def parse_row(line: bytes, number: int, path: Path) -> dict[str, float | None]:
    """The row in a complete line.

    **Raises:** `ValueError` if it is none.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get(STEPS), int):
        raise ValueError(
            f"Line {number} of `{path}` is not a row of metrics: expected a JSON object with "
            f"a whole number `{STEPS}`, but got {line[:60]!r}."
        )
    for name, value in row.items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(
                f"Line {number} of `{path}` is not a row of metrics: expected a number or `null` "
                f"for `{name}`, but got {json.dumps(value)[:60]}."
            )
    return row


def _line(row: dict[str, float]) -> bytes:
    try:
        text = json.dumps(row, allow_nan=False)
    except ValueError:  # rare, and looking at every value first would cost every row
        finite = {name: x if math.isfinite(x) else None for name, x in row.items()}
        text = json.dumps(finite, allow_nan=False)
    return text.encode() + b"\n"


def _keep_until(path: Path, step: int) -> float:
    """Cuts off rows after a step and a half-written last line; the seconds of what stays."""
    end, seconds = 0, 0.0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            row = parse_row(line, number, path)
            if (row[STEPS] or 0) > step:
                break
            end += len(line)
            seconds = row.get(SECONDS) or seconds
    os.truncate(path, end)
    return seconds
