import dataclasses

import pytest

from benchmarks.__main__ import main
from benchmarks._compare import compare, comparison_table, exit_status, machines_differ
from benchmarks._figures import Figure
from benchmarks._report import Report, make_report
from benchmarks._settings import Plan


def figure(value: float, better: str = "higher", **changes) -> Figure:
    made = Figure("throughput", "s", "a", "speed", "steps/s", better, (value,))
    return made._replace(**changes)


def report(*figures: Figure) -> Report:
    return make_report(list(figures), Plan(), {}, "2030-01-02T03:04:05", "command")


@pytest.mark.parametrize(
    ("better", "old", "new", "verdict"),
    [
        ("higher", 100.0, 100.0, "same"),
        ("higher", 100.0, 91.0, "same"),
        ("higher", 100.0, 89.0, "worse"),
        ("higher", 100.0, 120.0, "better"),
        ("lower", 100.0, 109.0, "same"),
        ("lower", 100.0, 120.0, "worse"),
        ("lower", 100.0, 80.0, "better"),
        ("higher", 0.0, 0.0, "same"),
    ],
)
def test_verdicts_at_a_tolerance_of_a_tenth(better, old, new, verdict):
    (item,) = compare(report(figure(old, better)), report(figure(new, better)), 0.1)
    assert item.verdict == verdict
    assert item.ratio == (1.0 if old == new else new / old)
    assert exit_status([item]) == (1 if verdict == "worse" else 0)


def test_medians_are_compared():
    old, new = figure(0.0, values=(1.0, 10.0, 99.0)), figure(0.0, values=(10.0, 2.0, 11.0))
    (item,) = compare(report(old), report(new), 0.1)
    assert item.ratio == 1.0


def test_a_missing_figure_of_a_common_suite_counts_against_the_new_file():
    other = figure(1.0, suite="memory")
    kept, lost = figure(1.0), figure(1.0, subject="b")
    items = compare(report(kept, lost, other), report(kept), 0.1)
    assert [item.verdict for item in items] == ["same", "missing"]
    assert exit_status(items) == 1


def test_figures_without_a_good_direction_are_left_out():
    floor = figure(1.0, "neither")
    assert compare(report(figure(1.0), floor), report(figure(1.0)), 0.1)[1:] == []


def test_files_without_a_common_suite_are_refused():
    with pytest.raises(ValueError, match="no suite in common"):
        compare(report(figure(1.0)), report(figure(1.0, suite="memory")), 0.1)


def test_table_begins_with_what_got_worse():
    old = report(figure(1.0), figure(10.0, subject="b"))
    new = report(figure(1.0), figure(5.0, subject="b"))
    first = comparison_table(compare(old, new, 0.1)).splitlines()[2]
    assert first.split("|")[1].strip() == "worse"
    assert first.split("|")[2].strip() == "0.50"


def test_command_line_returns_the_status(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    report(figure(100.0)).save(old)
    report(figure(70.0)).save(new)
    assert main(["compare", str(old), str(new)]) == 1
    assert "worse" in capsys.readouterr().out
    assert main(["compare", str(old), str(new), "--tolerance", "0.4"]) == 0
    assert main(["compare", str(new), str(old)]) == 0


def test_other_machines_are_named():
    here = report(figure(1.0))
    there = dataclasses.replace(here, machine=dataclasses.replace(here.machine, cpu="Abacus"))
    assert machines_differ(here, here) is None
    assert "Abacus" in machines_differ(here, there)
