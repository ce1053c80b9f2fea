"""What a run shows on the terminal, and in a file."""

import re

import pytest

from eqx_ppo.training import ConsoleSink, RunInfo, _console as module

EVALUATION = {
    "eval/episode_reward/mean": -12.5,
    "eval/episode_reward/std": 3.25,
    "eval/lifespan/mean": 200.0,
    "eval/invalid": 0.0,
}


class Time:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Time()
    monkeypatch.setattr(module, "time", clock)
    return clock


def run(rows, clock, sink, *, total=1_000_000, resumed_at=None):
    """Rows `(seconds since the start, steps, metrics)`."""
    zero = clock.now
    sink.start(RunInfo(total_steps=total, resumed_at=resumed_at))
    for seconds, steps, metrics in rows:
        clock.now = zero + seconds
        sink.write(metrics, steps)
    sink.close()


# --- Without a terminal ---------------------------------------------------------------------


def test_a_line_per_evaluation(clock, capsys):
    rows = [(0, 0, EVALUATION), (5, 250_000, {}), (8, 500_000, EVALUATION)]
    run(rows, clock, ConsoleSink())
    first, second = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "0.0 s 0 steps ( 0 %) return -12.50 +- 3.25 length 200.0"
    assert " ".join(second.split()) == (
        "8.0 s 500,000 steps ( 50 %) return -12.50 +- 3.25 length 200.0 62,500 steps/s"
    )


def test_a_line_where_no_evaluation_comes(clock, capsys):
    """Every 60 seconds, as far as iterations finish."""
    rows = [(30, 1000, {}), (59, 2000, {}), (61, 3000, {}), (100, 4000, {}), (122, 5000, {})]
    run(rows, clock, ConsoleSink())
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r"([\d,]+) steps ", line)[1] for line in lines] == ["3,000", "5,000"]
    assert "return" not in "".join(lines)
    run(rows, clock, ConsoleSink(seconds_between_lines=1000.0))
    assert capsys.readouterr().out == ""


def test_faults_are_mentioned(clock, capsys):
    """Summed over the run: 2 + 3 invalid steps, 1 skipped update; and 5 % of the episodes."""
    fine, bad = {"invalid_steps": 0.0, "skipped_updates": 0.0}, {"eval/invalid": 0.05}
    rows = [
        (1, 10, fine | EVALUATION),
        (2, 20, fine | {"invalid_steps": 2.0}),
        (3, 30, EVALUATION | bad | {"invalid_steps": 3.0, "skipped_updates": 1.0}),
    ]
    run(rows, clock, ConsoleSink())
    first, second = capsys.readouterr().out.splitlines()
    assert "invalid" not in first
    assert second.endswith("5% invalid  10 steps/s  5 invalid steps  1 skipped updates")


def test_the_rate_is_that_of_the_last_seconds(clock, capsys):
    """1000 steps/s for long, then 10 for the last ten seconds; chunks of two rows at once."""
    rows = [(second, 1000 * (second + part), {}) for second in range(20) for part in (0, 1)]
    rows += [(20 + second, 20_000 + 10 * second, {}) for second in range(12)]
    rows += [(32, 20_120, EVALUATION)]
    run(rows, clock, ConsoleSink())
    assert capsys.readouterr().out.splitlines()[-1].endswith("  10 steps/s")


def test_a_resumed_run_counts_from_where_it_was(clock, capsys):
    run([(2, 750_000, EVALUATION)], clock, ConsoleSink(), resumed_at=500_000)
    assert "( 75 %)" in capsys.readouterr().out


def test_nothing_is_printed_for_nothing(capsys):
    sink = ConsoleSink()
    sink.close()
    sink.start(RunInfo(total_steps=0))
    sink.close()
    assert capsys.readouterr().out == ""


# --- On a terminal --------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def plain(text):
    """Without the sequences that move the cursor and color the text."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.usefixtures("terminal")
def test_a_bar_and_the_lines_above_it(clock, capsys):
    rows = [(1, 0, EVALUATION), (2, 400_000, {"invalid_steps": 7.0}), (3, 600_000, {})]
    run(rows, clock, ConsoleSink())
    out = plain(capsys.readouterr().out)
    assert "compiling" in out
    last = out.splitlines()[-1]
    assert re.search(r"training .* 60%", last)
    assert last.rstrip().endswith("300,000 steps/s  7 invalid steps")
    assert len(re.findall(r"return +-12\.50", out)) == 1


@pytest.mark.usefixtures("terminal")
def test_a_second_bar_at_once_is_left_out(clock, capsys):
    """A program may show a bar of its own."""
    from rich.progress import Progress

    with Progress():
        run([(1, 10, EVALUATION)], clock, ConsoleSink())
    assert "return    -12.50" in plain(capsys.readouterr().out)
