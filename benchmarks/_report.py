"""A run of the benchmarks as a record that goes to JSON and back."""

import dataclasses
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Self, final

import jax

from benchmarks._figures import Figure
from benchmarks._settings import Plan

SCHEMA = 1
PACKAGES = (
    "eqx-ppo",
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "numpy",
    "nnx-ppo",
    "flax",
    "brax",
    "playground",
    "mujoco",
    "mujoco-mjx",
)


@final
@dataclasses.dataclass(frozen=True)
class Machine:
    """What the figures were measured on.

    - `cpu`, `cores`, `memory_gb`: the host.
    - `backend`, `device`, `n_devices`: what JAX ran on.
    - `system`: operating system and architecture.
    - `xla_flags`: the variable `XLA_FLAGS`.
    """

    cpu: str
    cores: int
    memory_gb: float
    backend: str
    device: str
    n_devices: int
    system: str
    xla_flags: str


@final
@dataclasses.dataclass(frozen=True)
class Report:
    """A run: the JSON file holds these fields, in this structure.

    - `schema`: version of this record.
    - `started`: local time, ISO 8601.
    - `command`: what was run.
    - `python`, `versions`: of the interpreter and of the packages (those that are there).
    - `machine`: see `Machine`.
    - `plan`: see `benchmarks._settings.Plan`.
    - `settings`: by name, the fields of each `Setting`.
    - `figures`: see `Figure`; ratios among them have the unit `x`.
    """

    schema: int
    started: str
    command: str
    python: str
    versions: dict[str, str]
    machine: Machine
    plan: dict[str, object]
    settings: dict[str, dict[str, object]]
    figures: tuple[Figure, ...]

    def to_json(self) -> str:
        """One line per figure, so that differences between files can be read."""
        head = dataclasses.asdict(self)
        del head["figures"]
        text = json.dumps(head, indent=2)
        rows = ",\n    ".join(json.dumps(figure._asdict()) for figure in self.figures)
        return f'{text[:-2]},\n  "figures": [\n    {rows}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Undoes `to_json`.

        **Raises:** `ValueError` for a file of another schema.
        """
        data = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"The file has schema {data.get('schema')}, but this version reads {SCHEMA}. "
                "Run the benchmarks again."
            )
        data["machine"] = Machine(**data["machine"])
        data["figures"] = tuple(
            Figure(**{**row, "values": tuple(row["values"])}) for row in data["figures"]
        )
        return cls(**data)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json())


def load_report(path: Path) -> Report:
    """Reads a file that `Report.save` wrote."""
    return Report.from_json(path.read_text())


def make_report(
    figures: list[Figure],
    plan: Plan,
    settings: dict[str, dict[str, object]],
    started: str,
    command: str,
) -> Report:
    """Puts figures together with where they come from."""
    return Report(
        schema=SCHEMA,
        started=started,
        command=command,
        python=platform.python_version(),
        versions=_versions(),
        machine=this_machine(),
        plan=json.loads(json.dumps(dataclasses.asdict(plan))),
        settings=json.loads(json.dumps(settings)),
        figures=tuple(figures),
    )


def this_machine() -> Machine:
    """The machine that this process runs on."""
    devices = jax.devices()
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 0,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        backend=jax.default_backend(),
        device=devices[0].device_kind,
        n_devices=len(devices),
        system=f"{platform.system()} {platform.machine()}",
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
