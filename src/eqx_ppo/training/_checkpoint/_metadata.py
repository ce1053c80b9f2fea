"""What is stored beside the arrays, as readable JSON."""

import dataclasses
import datetime as dt
import functools
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self, final, runtime_checkable

import numpy as np

from eqx_ppo._typing import Tree
from eqx_ppo.envs import Env
from eqx_ppo.training._checkpoint._errors import CheckpointError, DamagedCheckpointError
from eqx_ppo.training._checkpoint._fingerprint import Fingerprint
from eqx_ppo.training._checkpoint._pack import PackedLeaf

_FORMAT = 1
_PACKAGES = ("eqx-ppo", "jax", "jaxlib", "equinox", "optax", "orbax-checkpoint")


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a checkpoint knows of the run that saved it.

    **Arguments:**

    - `config`: the settings, by `config_to_json`.
    - `environment`: the classes of the environment, outermost first; the numbers and strings
        among their fields, where they are dataclasses; and the backend of the physics.
    - `metrics`: the last value of every metric.
    - `eval_history`: all evaluations so far.
    - `invalid`: the invalid steps of the last iterations.
    """

    config: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    eval_history: Sequence[Mapping[str, float]] = ()
    invalid: Sequence[int] = ()


class CheckpointMetadata(NamedTuple):
    """What is stored beside the arrays of a checkpoint.

    - `steps`: environment steps that were done.
    - `saved_at`: date and time (UTC).
    - `versions`: of Python, this library and those under it.
    - `score`: the value by which the best are kept; `None` if there was none at this step.
    - `fingerprint`: the structure of the network, by path.
    - `run`: what is known of the run.
    """

    steps: int
    saved_at: str
    versions: dict[str, str]
    score: float | None
    fingerprint: Fingerprint
    run: RunRecord


class Manifest(NamedTuple):
    """The metadata, and what is in the two buffers of arrays."""

    metadata: CheckpointMetadata
    network: list[PackedLeaf]
    rest: list[PackedLeaf]

    def to_json(self) -> str:
        """Strict JSON, with a digest over itself."""
        metadata = self.metadata._asdict() | {"run": _finite(vars(self.metadata.run))}
        arrays = {
            name: [leaf._asdict() for leaf in leaves]
            for name, leaves in (("network", self.network), ("rest", self.rest))
        }
        text = _dump({"format": _FORMAT, **metadata, "arrays": arrays})
        return f'{{"digest": "{_digest(text)}", "checkpoint": {text}}}\n'

    @classmethod
    def from_json(cls, data: Tree) -> Self:
        """From what `to_json` wrote, read as JSON.

        **Raises:** `DamagedCheckpointError` if it is anything else; `CheckpointError` for the
        format of a later version.
        """
        if not isinstance(data, Mapping) or data.keys() != {"digest", "checkpoint"}:
            raise DamagedCheckpointError("its metadata is not that of a checkpoint")
        fields = data["checkpoint"]
        try:
            is_the_same = data["digest"] == _digest(_dump(fields))
        except (ValueError, RecursionError):  # NaN, or nested deeper than can be written
            is_the_same = False
        if not is_the_same:
            raise DamagedCheckpointError("its metadata has changed on disk")
        version = fields.pop("format")
        if version != _FORMAT:
            raise CheckpointError(
                f"The checkpoint has format {version}, which this version of the library does not "
                f"know; it reads format {_FORMAT}. Read it with the version that wrote it, "
                f"{fields['versions']['eqx-ppo']}."
            )
        arrays = fields.pop("arrays")
        fields["run"] = RunRecord(**_floats(fields["run"]))
        return cls(
            CheckpointMetadata(**fields),
            *(
                [PackedLeaf.from_json(leaf) for leaf in arrays[name]]
                for name in ("network", "rest")
            ),
        )


def now() -> str:
    """The time of a save, in UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


@functools.cache
def installed_versions() -> dict[str, str]:
    """The versions of Python and of what computes."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **versions}


# --- Environments -------------------------------------------------------------------------


@runtime_checkable
class _Wraps(Protocol):
    env: Env


@runtime_checkable
class _NamesBackend(Protocol):
    backend: str


@runtime_checkable
class _HasConfig(Protocol):
    _config: Mapping[str, Tree]


def describe_environment(env: Env) -> dict[str, Tree]:
    """What an environment is made of, as JSON takes it.

    **Returns:** `classes`, outermost first; `settings`, the numbers and strings among the
    fields of those that are dataclasses, by class; and `backend`, that of the physics, which is
    `None` for an environment that names none and `impl` of MuJoCo Playground.
    """
    layers = [env]
    while isinstance(env, _Wraps):
        env = env.env
        layers.append(env)
    classes = [type(layer).__name__ for layer in layers]
    settings: dict[str, Tree] = {}
    for index, (name, layer) in enumerate(zip(classes, layers, strict=True)):
        found = _plain_fields(layer)
        if found:  # of several of one class the inner ones are numbered
            settings[f"{name}.{index}" if name in settings else name] = found
    backend = None
    if isinstance(env, _NamesBackend):
        backend = str(env.backend)
    elif isinstance(env, _HasConfig) and "impl" in env._config:
        backend = str(env._config["impl"])
    return {"classes": classes, "settings": settings, "backend": backend}


def _plain_fields(env: Env) -> dict[str, Tree]:
    """The numbers and strings that a dataclass was made from."""
    if not dataclasses.is_dataclass(env):
        return {}
    plain: dict[str, Tree] = {}
    for field in dataclasses.fields(env):
        try:
            value = getattr(env, field.name)
        except AttributeError:  # a class whose own `__init__` leaves it out
            continue
        if isinstance(value, str | int | float | np.number | np.bool_):
            plain[field.name] = _finite(value.item() if isinstance(value, np.generic) else value)
    return plain


# --- Strict JSON --------------------------------------------------------------------------


def _finite(value: Tree) -> Tree:
    """Numbers that JSON has no word for as strings."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(name): _finite(part) for name, part in value.items()}
        case tuple() | list():
            return [_finite(part) for part in value]
    return value


def _floats(run: Mapping[str, Tree]) -> dict[str, Tree]:
    """Undoes `_finite` for metrics."""

    def restore(row: Mapping[str, Tree]) -> dict[str, float]:
        return {
            name: float(value) if isinstance(value, str) else value for name, value in row.items()
        }

    history = [restore(row) for row in run["eval_history"]]
    return {**run, "metrics": restore(run["metrics"]), "eval_history": history}


def _dump(data: Tree) -> str:
    """The text of JSON data; reading it and writing it again gives the same text."""
    return json.dumps(data, allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
