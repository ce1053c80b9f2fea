"""Sinks: nothing is lost, nothing comes twice, and none of them can end a run."""

import csv
import errno
import json
import math
import os
import struct
import sys

import numpy as np
import pytest

from eqx_ppo.training import (
    CSVSink,
    JSONLinesSink,
    RunInfo,
    Sink,
    SinkGroup,
    TensorBoardSink,
    WandbSink,
    read_metrics,
)
from eqx_ppo.training._sinks import _files

NEW = RunInfo(total_steps=100)


def resumed(step):
    return RunInfo(total_steps=100, resumed_at=step)


def filled(sink, rows, run=NEW):
    """The sink after a run that wrote rows `(steps, metrics)`."""
    sink.start(run)
    for steps, metrics in rows:
        sink.write(metrics, steps)
    sink.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- JSON Lines -----------------------------------------------------------------------------


def test_json_lines(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    filled(
        JSONLinesSink(path), [(0, {"eval/return": -1.5}), (16, {"loss": 0.1, "total_steps": 16})]
    )
    first, second = lines(path)
    assert list(first) == ["total_steps", "seconds", "eval/return"]
    assert (first["total_steps"], first["eval/return"]) == (0, -1.5)
    assert {**second, "seconds": 0} == {"total_steps": 16, "seconds": 0, "loss": 0.1}
    assert 0 <= first["seconds"] <= second["seconds"] < 60


def test_json_lines_are_json_whatever_the_values(tmp_path):
    """Not the `NaN` and `Infinity` of Python, which other readers refuse."""
    path = tmp_path / "metrics.jsonl"
    bad = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300, "e": 0}
    filled(JSONLinesSink(path), [(1, bad)])

    def refuse(name):
        raise AssertionError(name)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert [row[name] for name in "abcde"] == [None, None, None, 1e300, 0]


def test_rows_are_there_before_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JSONLinesSink(path)
    sink.start(NEW)
    sink.write({"loss": 1.0}, 1)
    assert lines(path)[0]["loss"] == 1.0
    sink.close()


# --- CSV ------------------------------------------------------------------------------------


def test_csv_columns_that_appear_later(tmp_path):
    """Rows before and after keep their cells; the header grows at the end."""
    path = tmp_path / "metrics.csv"
    rows = [(1, {"a": 1.0}), (2, {"b,c": 2.5, "a": 3.0}), (3, {"d": 4.0}), (4, {"a": math.nan})]
    filled(CSVSink(path), rows)
    read = table(path)
    assert list(read[0]) == ["total_steps", "seconds", "a", "b,c", "d"]
    cells = [[row[name] for name in ("total_steps", "a", "b,c", "d")] for row in read]
    assert cells == [
        ["1", "1.0", "", ""],
        ["2", "3.0", "2.5", ""],
        ["3", "", "", "4.0"],
        ["4", "nan", "", ""],
    ]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_csv_keeps_every_digit(tmp_path):
    path, value = tmp_path / "metrics.csv", 0.1 + 0.2
    filled(CSVSink(path), [(1, {"a": value})])
    assert float(table(path)[0]["a"]) == value


# --- Resuming -------------------------------------------------------------------------------

FILES = {"jsonl": (JSONLinesSink, lines), "csv": (CSVSink, table)}


@pytest.fixture(params=FILES)
def kind(request):
    return FILES[request.param]


def numbers(rows, name):
    return [float(row[name]) for row in rows]


def test_a_resumed_run_drops_what_will_come_again(kind, tmp_path):
    """Interrupted at 5 after a checkpoint at 3; a half-written row at the end."""
    make, read = kind
    path = tmp_path / "metrics"
    filled(make(path), [(steps, {"a": steps / 2}) for steps in range(6)])
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[-1][:-2])
    filled(make(path), [(4, {"a": 40.0}), (5, {"a": 50.0, "b": 1.0})], resumed(3))
    rows = read(path)
    assert numbers(rows, "total_steps") == [0, 1, 2, 3, 4, 5]
    assert numbers(rows, "a") == [0.0, 0.5, 1.0, 1.5, 40.0, 50.0]
    seconds = numbers(rows, "seconds")
    assert seconds == sorted(seconds)


def test_time_goes_on_where_it_was(kind, tmp_path):
    make, read = kind
    path = tmp_path / "metrics"
    filled(make(path), [(1, {})])
    path.write_text(path.read_text().replace(str(read(path)[0]["seconds"]), "1000.5"))
    filled(make(path), [(2, {})], resumed(1))
    first, second = numbers(read(path), "seconds")
    assert (first, 1000.5 <= second < 1060) == (1000.5, True)


def test_resuming_before_the_first_row_keeps_nothing(kind, tmp_path):
    make, read = kind
    path = tmp_path / "metrics"
    filled(make(path), [(5, {"a": 1.0})])
    filled(make(path), [(1, {"a": 2.0})], resumed(0))
    assert numbers(read(path), "a") == [2.0]


def test_resuming_without_a_file(kind, tmp_path):
    make, read = kind
    path = tmp_path / "metrics"
    for content in (None, "", '{"total_st' if make is JSONLinesSink else "total_st"):
        if content is not None:
            path.write_text(content)
        filled(make(path), [(4, {"a": 1.0})], resumed(3))
        assert numbers(read(path), "total_steps") == [4]


def test_a_new_run_does_not_touch_another_one(kind, tmp_path):
    make, read = kind
    path = tmp_path / "metrics"
    filled(make(path), [(1, {"a": 1.0})])
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="Resume that run, choose another path, or"):
        make(path).start(NEW)
    assert path.read_bytes() == before
    filled(make(path, overwrite=True), [(2, {"b": 2.0})])
    assert numbers(read(path), "b") == [2.0]


@pytest.mark.parametrize("content", ["a poem\nof two lines\n", '{"step": 3}\n', "[]\n"])
def test_a_foreign_file_stays_as_it_is(kind, tmp_path, content):
    make, _ = kind
    path = tmp_path / "metrics"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"is not a (row|table) of metrics"):
        make(path).start(resumed(0))
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["garbage", "320", "320,soon", "1.5,2.0,3.0"])
def test_a_table_with_a_foreign_line_stays_as_it_is(tmp_path, line):
    path = tmp_path / "metrics.csv"
    content = f"total_steps,seconds,a\n1,0.5,2.0\n{line}\n"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"Line 3 of .*metrics\.csv.* is not a row of metrics"):
        CSVSink(path).start(resumed(400))
    assert path.read_text() == content


def test_a_sink_can_be_used_again(kind, tmp_path):
    """For a second part of the same run, as the loop does with `initial_state`."""
    make, read = kind
    sink = make(tmp_path / "metrics")
    filled(sink, [(1, {"a": 1.0})])
    filled(sink, [(2, {"a": 2.0})], resumed(1))
    assert numbers(read(tmp_path / "metrics"), "total_steps") == [1, 2]
    sink.close()  # once more does no harm
    with pytest.raises(RuntimeError, match="was not started"):
        sink.write({}, 3)


# --- A full disk ----------------------------------------------------------------------------


class Disk:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, file):
        self.file, self.room = file, math.inf

    def write(self, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(bytes(data)[: int(min(self.room, len(data)))])
        self.room -= written
        return written

    def close(self):
        self.file.close()


def test_what_a_full_disk_refuses_is_written_later(kind, tmp_path):
    """Cut in the middle of a row, which is then completed."""
    make, read = kind
    path = tmp_path / "metrics"
    sink = make(path)
    sink.start(NEW)
    sink.write({"a": 1.0}, 1)
    appending = sink._file._file
    disk = appending._file = Disk(appending._file)
    disk.room = 4
    for steps in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            sink.write({"a": float(steps)}, steps)
    disk.room = math.inf
    sink.write({"a": 4.0}, 4)
    sink.close()
    assert numbers(read(path), "a") == [1.0, 2.0, 3.0, 4.0]


def test_what_waits_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "_LIMIT", 100)
    file = _files.Appending(tmp_path / "rows")
    disk = file._file = Disk(file._file)
    disk.room = 0
    for _ in range(30):
        with pytest.raises(OSError, match="No space left"):
            file.append(b"123456789\n")
    disk.room = math.inf
    file.append(b"the end\n")
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"123456789\n" * 10 + b"the end\n"


def test_a_table_that_cannot_be_widened_waits(tmp_path, monkeypatch):
    """No room for the longer copy: the old file stays, and the rows come when there is room."""
    path = tmp_path / "metrics.csv"
    sink = CSVSink(path)
    sink.start(NEW)
    sink.write({"a": 1.0}, 1)
    before = path.read_text()
    with monkeypatch.context() as patch:

        def full(*paths):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "replace", full)
        for steps in (2, 3):
            with pytest.raises(OSError, match="No space left"):
                sink.write({"b": float(steps)}, steps)
        assert path.read_text() == before
        assert os.listdir(tmp_path) == ["metrics.csv"]
    sink.write({"a": 4.0}, 4)
    sink.close()
    assert [row["a"] + row["b"] for row in table(path)] == ["1.0", "2.0", "3.0", "4.0"]


# --- Several at once ------------------------------------------------------------------------


class Recorder(Sink):
    """Keeps what it is told; fails where a test says so."""

    def __init__(self, *, fails_at=(), error=None, fails_to=()):
        self.rows, self.calls = [], []
        self.fails_at, self.fails_to = fails_at, fails_to
        self.error = error or OSError("disk full")

    def start(self, run):
        self.calls.append("start")
        if "start" in self.fails_to:
            raise self.error

    def write(self, metrics, steps):
        if steps in self.fails_at:
            raise self.error
        self.rows.append((steps, dict(metrics)))

    def close(self):
        self.calls.append("close")
        if "close" in self.fails_to:
            raise self.error

    def __repr__(self):
        return "Recorder()"


ROWS = [(steps, {"a": float(steps)}) for steps in range(1, 6)]


def test_one_failing_sink_stops_nobody():
    good, bad, other = Recorder(), Recorder(fails_at=(2, 3, 5)), Recorder()
    with pytest.warns(RuntimeWarning) as warned:
        filled(SinkGroup([good, bad, other]), ROWS)
    assert good.rows == other.rows == ROWS
    assert [steps for steps, _ in bad.rows] == [1, 4]  # tried again each time
    first, last = [str(warning.message) for warning in warned]
    assert "Recorder() could not write the metrics of step 2: OSError: disk full" in first
    assert "Recorder() failed at 3 of 5 rows" in last
    assert [sink.calls for sink in (good, bad, other)] == [["start", "close"]] * 3


def test_one_that_cannot_be_closed_stops_nobody():
    good, bad = Recorder(), Recorder(fails_to=("close",))
    with pytest.warns(RuntimeWarning, match=r"Recorder\(\) could not be closed: OSError"):
        filled(SinkGroup([bad, good]), ROWS)
    assert good.calls == ["start", "close"]


def test_one_that_cannot_be_started_ends_the_run():
    """Before anything is trained; those that were started are closed."""
    before, bad, after = Recorder(), Recorder(fails_to=("start",)), Recorder()
    with pytest.raises(OSError, match="disk full"):
        SinkGroup([before, bad, after]).start(NEW)
    assert [sink.calls for sink in (before, bad, after)] == [["start", "close"], ["start"], []]


def test_an_interruption_passes():
    group = SinkGroup([Recorder(fails_at=(2,), error=KeyboardInterrupt())])
    group.start(NEW)
    with pytest.raises(KeyboardInterrupt):
        group.write({}, 2)


def test_functions_are_no_sinks():
    with pytest.raises(TypeError, match="is passed as `log_fn`"):
        SinkGroup([print])


# --- TensorBoard ----------------------------------------------------------------------------


def crc32c(data):
    """Bit by bit, from the definition (reflected polynomial 0x1EDC6F41)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events(path):
    """The events of a file, record by record: length, checksum, content, checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        content = data[12 : 12 + length]
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked(content)
        found.append(event_pb2.Event.FromString(content))
        data = data[16 + length :]
    return found


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    run = RunInfo(total_steps=9, config={"ppo": {"n_envs": 4}})
    rows = [(2**33, {"a/b": 1.5, "total_steps": 2**33}), (2**33 + 1, {"a/b": math.nan, "c": 2.0})]
    filled(TensorBoardSink(tmp_path / "tb"), rows, run)
    (path,) = (tmp_path / "tb").iterdir()
    head, text, first, second = events(path)
    assert head.file_version == "brain.Event:2"
    assert '"n_envs": 4' in text.summary.value[0].tensor.string_val[0].decode()
    assert [(value.tag, value.simple_value) for value in first.summary.value] == [("a/b", 1.5)]
    assert [first.step, second.step] == [2**33, 2**33 + 1]
    assert math.isnan(second.summary.value[0].simple_value)


def test_tensorboard_resumes(tmp_path):
    """A second file says from which step on the first one no longer counts."""
    pytest.importorskip("tensorboardX")
    filled(TensorBoardSink(tmp_path), ROWS)
    (first,) = tmp_path.iterdir()
    with pytest.raises(FileExistsError, match="holds the events of another run"):
        TensorBoardSink(tmp_path).start(NEW)
    filled(TensorBoardSink(tmp_path), ROWS[3:], resumed(3))
    earlier, later = sorted(tmp_path.iterdir())
    assert earlier == first
    head, purge, *rest = events(later)
    assert head.file_version == "brain.Event:2"
    assert (purge.session_log.status, purge.step) == (purge.session_log.START, 4)
    assert [event.step for event in rest] == [4, 5]
    filled(TensorBoardSink(tmp_path, overwrite=True), ROWS)
    assert len(list(tmp_path.iterdir())) == 1


# --- Weights & Biases -----------------------------------------------------------------------


def test_wandb_offline(tmp_path, monkeypatch):
    """What it will send is on the disk; a resumed run has the id of the first part."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunInfo(total_steps=9, config={"ppo": {"n_envs": 4}})
    sink = WandbSink("a-project", directory=tmp_path)
    sink.start(run)
    first = sink._run.id
    assert sink._run.config["ppo"] == {"n_envs": 4}
    for steps, metrics in ROWS:
        sink.write(metrics | {"b": math.nan}, steps)
    sink.close()
    sink.close()
    wandb.teardown()  # waits for the process that writes
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert history(next(folder.glob("*.wandb"))) == [(s, m["a"]) for s, m in ROWS]
    again = WandbSink("a-project", directory=tmp_path)
    again.start(resumed(3))
    assert again._run.id == first
    again.close()
    wandb.teardown()


def history(path):
    """Steps and values of `a` in a file that wandb wrote: a log of LevelDB, here one block."""
    pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, found = path.read_bytes()[7:], []
    while data:
        _, length, whole = struct.unpack("<IHB", data[:7])
        assert whole == 1
        record = pb2.Record.FromString(data[7 : 7 + length])
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: item for item in record.history.item}
            found.append(tuple(json.loads(items[name].value_json) for name in ("_step", "a")))
        data = data[7 + length :]
    return found


@pytest.mark.parametrize(
    ("make", "package"), [(TensorBoardSink, "tensorboardX"), (WandbSink, "wandb")]
)
def test_a_package_that_is_not_there(tmp_path, monkeypatch, make, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.proto", None)
    with pytest.raises(ImportError, match=rf"needs the package `{package}`: `pip install"):
        make(str(tmp_path / "new")).start(NEW)
    assert not (tmp_path / "new").exists()


# --- Reading --------------------------------------------------------------------------------


def test_metrics_are_read_as_columns(tmp_path):
    """Of two rows for one step, the later value of each name."""
    rows = [(0, {"a": 1.0, "b": 5.0}), (3, {"a": math.nan}), (7, {"c": 2.0}), (7, {"c": 4.0})]
    filled(JSONLinesSink(tmp_path / "metrics.jsonl"), rows)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"total_steps": 9, "a"')  # it is being written
    columns = read_metrics(tmp_path)
    assert columns.keys() == {"total_steps", "seconds", "a", "b", "c"}
    assert columns["total_steps"].tolist() == [0, 3, 7]
    assert columns["total_steps"].dtype == np.int64
    np.testing.assert_array_equal(columns["a"], [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(columns["c"], [np.nan, np.nan, 4.0])
    assert read_metrics(tmp_path / "metrics.jsonl").keys() == columns.keys()


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"Give the folder of a run with a `metrics\.jsonl`"
    ):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"total_steps": 1}\nnonsense\n{"total_steps": 2}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .* is not a row of metrics"):
        read_metrics(tmp_path)
    for value in ('"abc"', "[1.0, 2.0]"):
        row = f'{{"total_steps": 1, "a": {value}}}\n'
        (tmp_path / "metrics.jsonl").write_text('{"total_steps": 0}\n' + row)
        with pytest.raises(
            ValueError, match=r"Line 2 of .*metrics\.jsonl.* number or `null` for `a`"
        ):
            read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[" * 200_000 + "\n")
    with pytest.raises(ValueError, match="Line 1 of"):
        read_metrics(tmp_path)
