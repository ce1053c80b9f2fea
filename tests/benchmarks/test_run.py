"""The command line, from measuring to pictures, on this library alone."""

import pytest

from benchmarks.__main__ import main
from benchmarks._report import load_report


@pytest.mark.slow
def test_throughput_of_this_library_on_the_pendulum(tmp_path, capsys):
    arguments = ["throughput", "--quick", "--envs", "Pendulum", "--peers", "eqx-ppo"]
    assert main([*arguments, "--output", str(tmp_path), "--name", "run"]) == 0
    report = load_report(tmp_path / "run.json")
    figure, floor, ratio = report.figures
    assert (figure.subject, figure.unit) == ("eqx-ppo", "steps/s")
    assert (floor.subject, floor.unit) == ("floor", "steps/s")
    assert figure.median > 0
    assert floor.median > 0
    assert ratio == figure.over(floor)
    assert report.settings[figure.setting]["env"] == "Pendulum"
    assert "| eqx-ppo         | steps per second |" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "run.json"), str(tmp_path / "run.json")]) == 0


@pytest.mark.slow
def test_the_part_of_the_host_comes_with_an_interval(tmp_path):
    assert main(["host", "--quick", "--output", str(tmp_path), "--name", "run"]) == 0
    training, loop, ratio, interval = load_report(tmp_path / "run.json").figures
    assert ratio.values == training.over(loop).values
    assert interval.values == (ratio.low, ratio.high)  # of two turns
