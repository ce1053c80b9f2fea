import dataclasses

import pytest

from benchmarks._figures import Figure
from benchmarks._process import from_json, to_json
from benchmarks._report import Report, load_report, make_report, this_machine
from benchmarks._settings import CARTPOLE_LSTM, LARGE, Plan
from benchmarks._tables import readable, table


def report() -> Report:
    figures = [
        Figure("throughput", "s", "a", "speed", "steps/s", "higher", (1.5, 2.5)),
        Figure("scaling", "s", "b", "time", "s", "lower", (0.1,), at=64.0),
    ]
    settings = {setting.name: dataclasses.asdict(setting) for setting in (CARTPOLE_LSTM, LARGE)}
    return make_report(figures, Plan(envs=("A",)), settings, "2030-01-02T03:04:05", "command")


def test_json_round_trip(tmp_path):
    first = report()
    first.save(tmp_path / "deep" / "r.json")
    again = load_report(tmp_path / "deep" / "r.json")
    assert again == first
    assert again.to_json() == first.to_json()


def test_report_says_where_it_comes_from():
    made = report()
    assert made.versions["jax"]
    assert made.machine == this_machine()
    assert made.plan["envs"] == ["A"]
    assert made.settings[LARGE.name]["n_envs"] == 4096


def test_report_without_figures_round_trips():
    empty = dataclasses.replace(report(), figures=())
    assert Report.from_json(empty.to_json()) == empty


def test_other_schemas_are_refused():
    other = dataclasses.replace(report(), schema=0)
    with pytest.raises(ValueError, match="schema 0, but this version reads 1"):
        Report.from_json(other.to_json())


def test_settings_survive_the_way_to_another_process():
    assert from_json(to_json(CARTPOLE_LSTM)) == CARTPOLE_LSTM


def test_table_is_markdown_with_numbers_on_the_right():
    assert table(("name", "value"), [("a", "1"), ("bcdef", "20")]) == (
        "| name  | value |\n| ----- | ----: |\n| a     |     1 |\n| bcdef |    20 |"
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.01234, "s", "12.3 ms"),
        (12.34, "s", "12.3 s"),
        (65432.1, "steps/s", "65,432 steps/s"),
        (1.2345, "x", "1.23 x"),
        (1_234_567_890.0, "bytes", "1,234.6 MB"),
        (0.5, "", "0.5"),
    ],
)
def test_numbers_are_readable(value, unit, text):
    assert readable(value, unit) == text
