"""Runs the tests that compare two programs bit by bit, in a process that rounds alike in both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROUGH = "--xla_cpu_use_fusion_emitters=false"


@pytest.mark.slow
@pytest.mark.skipif(ROUGH not in os.environ["XLA_FLAGS"], reason="they run as they are")
def test_what_is_equal_bit_by_bit():
    """Without the emitters of fusions, what is rounded depends on what is fused."""
    files = [path for path in ROOT.glob("tests/**/test_*.py") if "mark.exact" in path.read_text()]
    files.remove(Path(__file__))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "exact", *map(str, files)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace(ROUGH, "")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
