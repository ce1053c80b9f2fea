"""One peer in a fresh process: what it takes until it runs, and how large it gets.

`python -m benchmarks._process PEER SETTING` is that process; `in_fresh_process` starts it,
without a compilation cache, and reads the line that it prints.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks._settings import Setting
from eqx_ppo._typing import Tree

ROOT = Path(__file__).parents[1]
_MARK = "RESULT "


class Outcome(NamedTuple):
    """Measured inside a fresh process.

    - `load_seconds`: importing JAX and the library, and loading the environment.
    - `first_seconds`: from the call of the training function to the end of the first
        iteration.
    - `later_seconds`: per iteration after that.
    - `resident_before`, `resident_peak`: resident bytes before training was called, and at
        most.
    - `device_peak`: the most bytes that JAX held on the device, where it counts that.
    """

    load_seconds: float
    first_seconds: float
    later_seconds: float
    resident_before: int
    resident_peak: int
    device_peak: int | None


def in_fresh_process(peer: str, setting: Setting) -> Outcome:
    """Runs two iterations of a peer in a process of its own.

    **Raises:** `RuntimeError` with the end of its output if it fails.
    """
    env = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks._process", peer, to_json(setting)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"`{peer}` failed on {setting.name}:\n{done.stderr[-2000:]}")
    return Outcome(**json.loads(lines[-1].removeprefix(_MARK)))


def to_json(setting: Setting) -> str:
    """The fields of a setting."""
    return json.dumps(dataclasses.asdict(setting))


def from_json(text: str) -> Setting:
    """Undoes `to_json`."""
    fields: dict[str, Tree] = json.loads(text)
    for name, value in fields.items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    return Setting(**fields)


def main(name: str, setting: Setting) -> None:
    """Runs in the fresh process."""
    started = time.perf_counter()
    from benchmarks._memory import peak_device_bytes, peak_resident_bytes
    from benchmarks.peers import all_peers

    peer = next(peer for peer in all_peers() if peer.name == name)
    runner = peer.prepare(dataclasses.replace(setting, epoch_iterations=1), seed=0)
    loaded, before = time.perf_counter(), peak_resident_bytes()
    runner.run(1)
    first = time.perf_counter()
    runner.run(1)
    later = time.perf_counter()
    outcome = Outcome(
        load_seconds=loaded - started,
        first_seconds=first - loaded,
        later_seconds=later - first,
        resident_before=before,
        resident_peak=peak_resident_bytes(),
        device_peak=peak_device_bytes(),
    )
    runner.close()
    print(_MARK + json.dumps(outcome._asdict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], from_json(sys.argv[2]))
