"""A table with one row per iteration."""

import csv
import io
import os
from pathlib import Path
from typing import final

from eqx_ppo.training._sinks._files import SECONDS, STEPS, Appending, FileSink, RowFile

_MAX_WAITING = 10_000  # rows that wait for a disk with room


@final
class CSVSink(FileSink):
    """Appends one line per iteration to a table of comma-separated values.

    The columns are `total_steps`, `seconds` (see `JSONLinesSink`) and every metric in the
    order in which they first appeared. When one appears later (those of evaluations do), the
    file is written anew with a longer header, once. A cell is empty where nothing was logged;
    `nan`, `inf` and `-inf` are values.
    """

    def _open(self, path: Path, resumed_at: int | None) -> tuple[RowFile, float]:
        columns, already = ([], 0.0) if resumed_at is None else _keep_until(path, resumed_at)
        return _Table(path, columns), already


@final
class _Table:
    """An open file with a header; rows that could not be written wait."""

    def __init__(self, path: Path, columns: list[str]):
        self._path = path
        self._file = Appending(path)
        self._columns = columns
        self._known = set(columns)
        self._rows: list[dict[str, float]] = []

    def append(self, row: dict[str, float]) -> None:
        if len(self._rows) >= _MAX_WAITING:
            self._write()
        self._rows.append(row)
        self._write()

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        while self._rows:
            row = self._rows[0]
            if not row.keys() <= self._known:
                self._widen([name for name in row if name not in self._known])
            del self._rows[0]
            self._file.append(_line([row.get(name, "") for name in self._columns]))

    def _widen(self, new: list[str]) -> None:
        """Puts a file with more columns in the place of the present one."""
        self._file.flush()
        columns = [*self._columns, *new]
        _rewrite(self._path, columns, len(new))
        old, self._file = self._file, Appending(self._path)
        self._columns, self._known = columns, set(columns)
        old.close()


def _line(cells: list) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _rewrite(path: Path, columns: list[str], n_new: int) -> None:
    """Writes the header anew and pads the rows; the old file stays until the new one is whole."""
    wider = path.with_name(path.name + ".tmp")
    try:
        with path.open("rb") as old, wider.open("wb") as new:
            new.write(_line(columns))
            old.readline()  # the header
            for line in old:
                new.write(line.rstrip(b"\n") + b"," * n_new + b"\n")
        os.replace(wider, path)
    except OSError:
        wider.unlink(missing_ok=True)
        raise


def _keep_until(path: Path, step: int) -> tuple[list[str], float]:
    """Cuts off rows after a step and a half-written last line; columns, and seconds so far."""
    with path.open("rb") as file:
        header = file.readline()
        text = header.decode(errors="replace")
        columns = next(csv.reader([text]), []) if header.endswith(b"\n") else []
        if columns[:2] != [STEPS, SECONDS] and header.endswith(b"\n"):
            raise ValueError(
                f"`{path}` is not a table of metrics: expected a header that begins with "
                f"`{STEPS},{SECONDS}`, but got {header[:60]!r}."
            )
        end, seconds = len(header) if columns else 0, 0.0
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                break
            steps, now = _first_cells(line, number, path)
            if steps > step:
                break
            end, seconds = end + len(line), now
    os.truncate(path, end)
    return columns, seconds


def _first_cells(line: bytes, number: int, path: Path) -> tuple[int, float]:
    """Steps and seconds of a complete line."""
    try:
        steps, seconds = line.split(b",", 2)[:2]
        return int(steps), float(seconds)
    except ValueError as error:
        raise ValueError(
            f"Line {number} of `{path}` is not a row of metrics: expected it to begin with a whole "
            f"number `{STEPS}` and a number `{SECONDS}`, but got {line[:60]!r}."
        ) from error
