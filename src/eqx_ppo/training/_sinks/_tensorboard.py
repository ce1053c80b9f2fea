"""Event files for TensorBoard."""

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from eqx_ppo._typing import Tree
from eqx_ppo.training._sinks._files import STEPS, Appending
from eqx_ppo.training._sinks._sink import RunInfo, Sink

_PATTERN = "events.out.tfevents.*"


@final
class TensorBoardSink(Sink):
    """Writes scalars for TensorBoard; needs the extra `tensorboard`.

    ```text
    tensorboard --logdir runs
    ```

    The settings of the run are a text named `config`. A resumed run begins a new event file in
    the same folder, and TensorBoard hides what the earlier ones have behind the resumed step.
    Every row reaches the operating system before training goes on.
    """

    def __init__(self, directory: str | os.PathLike[str], *, overwrite: bool = False):
        """**Arguments:**

        - `directory`: for the event files; missing folders are made.
        - `overwrite`: lets a new run delete the event files of another one.
        """
        self._directory = Path(directory)
        self._overwrite = overwrite
        self._file: Appending | None = None

    def start(self, run: RunInfo) -> None:
        """Begins an event file.

        **Raises:** `ImportError` without tensorboardX; `FileExistsError` if a new run would mix
        with the event files of another one.
        """
        head = _head()
        self._directory.mkdir(parents=True, exist_ok=True)
        if run.resumed_at is None:
            self._refuse_or_delete_others()
        self._file = Appending(self._directory / f"events.out.tfevents.{_unique()}")
        self._file.append(head)
        if run.resumed_at is not None:
            self._file.append(_purge(run.resumed_at + 1))
        elif run.config:
            self._file.append(_text("config", json.dumps(dict(run.config), indent=2)))

    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        """Appends an event with all scalars of a step."""
        if self._file is None:
            raise RuntimeError(f"{self!r} was not started.")
        scalars = {name: value for name, value in metrics.items() if name != STEPS}
        self._file.append(_scalars(scalars, steps))

    def close(self) -> None:
        """Closes the event file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __repr__(self) -> str:
        return f"TensorBoardSink({str(self._directory)!r})"

    def _refuse_or_delete_others(self) -> None:
        others = sorted(self._directory.glob(_PATTERN))
        if others and not self._overwrite:
            raise FileExistsError(
                f"`{self._directory}` holds the events of another run. Resume that run, choose "
                "another folder, or say `overwrite=True` to lose them."
            )
        for other in others:
            other.unlink()


def _unique() -> str:
    """What tells event files apart; TensorBoard reads them in the order of their names."""
    return f"{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"


def _messages() -> Tree:
    """The message types of event files.

    **Raises:** `ImportError` without tensorboardX.
    """
    try:
        from tensorboardX.proto import event_pb2, summary_pb2
    except ImportError as error:
        raise ImportError(
            "`TensorBoardSink` needs the package `tensorboardX`: "
            '`pip install "eqx-ppo[tensorboard]"`.'
        ) from error
    return event_pb2, summary_pb2


def _head() -> bytes:
    """The event that every file begins with."""
    events, _ = _messages()
    return _record(events.Event(wall_time=time.time(), file_version="brain.Event:2"))


def _purge(step: int) -> bytes:
    """Hides the events of earlier files from a step on."""
    events, _ = _messages()
    start = events.SessionLog(status=events.SessionLog.START)
    return _record(events.Event(wall_time=time.time(), step=step, session_log=start))


def _text(name: str, text: str) -> bytes:
    """A text, shown as preformatted."""
    from tensorboardX.summary import text as text_summary

    events, _ = _messages()
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    summary = text_summary(name, indented)
    return _record(events.Event(wall_time=time.time(), step=0, summary=summary))


def _scalars(scalars: Mapping[str, float], step: int) -> bytes:
    """All scalars of a step in one event."""
    events, summaries = _messages()
    values = [summaries.Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()]
    summary = summaries.Summary(value=values)
    return _record(events.Event(wall_time=time.time(), step=step, summary=summary))


def _record(event: Tree) -> bytes:
    """An event as a record of TensorFlow: length and content, each with its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checksums[0] + data + checksums[1]
