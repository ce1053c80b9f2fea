"""Metrics of a run, read back."""

import os
from pathlib import Path

import numpy as np
from jaxtyping import Num

from eqx_ppo.training._sinks._files import STEPS
from eqx_ppo.training._sinks._jsonl import parse_row

METRICS_FILE = "metrics.jsonl"
"""The file of metrics in the folder of a run."""


def read_metrics(path: str | os.PathLike[str]) -> dict[str, Num[np.ndarray, " rows"]]:
    """The columns of a file that a `JSONLinesSink` wrote, also while it still writes.

    ```python
    columns = read_metrics("runs/pendulum")
    evaluated = ~np.isnan(columns["eval/episode_reward/mean"])
    steps = columns["total_steps"][evaluated]
    ```

    **Arguments:**

    - `path`: the file, or a folder with a file `metrics.jsonl`.

    **Returns:** one array per name, one entry per step, in rising order: `total_steps` int64,
    all others float64, with NaN where nothing (or no finite number) was logged. Of several
    rows for one step the later one wins, name by name.

    **Raises:** `FileNotFoundError` if there is no such file, `ValueError` for a line that is
    no row of metrics. A half-written last line is left out.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"There is no `{path}`. Give the folder of a run with a `{METRICS_FILE}`, or a file "
            "that a `JSONLinesSink` wrote."
        )
    rows: dict[int, dict[str, float | None]] = {}
    names: dict[str, None] = {STEPS: None}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            row = parse_row(line, number, path)
            rows.setdefault(int(row[STEPS] or 0), {}).update(row)
            names.update(dict.fromkeys(row))
    steps = sorted(rows)
    columns = {
        name: np.array([rows[step].get(name) for step in steps], np.float64) for name in names
    }
    return columns | {STEPS: np.array(steps, np.int64)}
