"""The command line, from measuring to pictures, on this library alone."""

import pytest

from benchmarks.__main__ import main
from benchmarks._report import load_report


@pytest.mark.slow
def test_throughput_of_this_library_on_the_pendulum(tmp_path, capsys):
    arguments = ["throughput", "--quick", "--envs", "Pendulum", "--peers", "eqx-ppo"]
    assert main([*arguments, "--output", str(tmp_path), "--name", "run"]) == 0
    report = load_report(tmp_path / "run.json")
    (figure,) = report.figures
    assert (figure.subject, figure.unit) == ("eqx-ppo", "steps/s")
    assert figure.median > 0
    assert report.settings[figure.setting]["env"] == "Pendulum"
    assert "| eqx-ppo | steps per second |" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "run.json"), str(tmp_path / "run.json")]) == 0
