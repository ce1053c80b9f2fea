"""The forms of the commands: what can be said on the command line."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import EvalConfig, PPOConfig
from eqx_ppo.training._cli._errors import told_in_one_line
from eqx_ppo.training._cli._flags import apply, fill, form_of, optional_flag, parse
from eqx_ppo.training._config import TrainConfig
from eqx_ppo.training._environments import EnvConfig
from eqx_ppo.training._network_config import NetworkConfig
from eqx_ppo.training._plots import LearningCurves
from eqx_ppo.training._run_config import RunConfig, default_run_config
from eqx_ppo.training._run_folder import RunFolder
from eqx_ppo.training._video import VideoConfig


def _flag(kind: Tree, about: str, *marks: Tree, metavar: str | None = None) -> Tree:
    """The type of a flag with its help."""
    for mark in marks:
        kind = mark[kind]
    return Annotated[kind, tyro.conf.arg(help=about, metavar=metavar)]


def _form(name: str, about: str, fields: Sequence[tuple]) -> Tree:
    """A form of a command; a field without a default is one that must be given."""
    form = dataclasses.make_dataclass(name, fields, kw_only=True)
    form.__doc__ = about
    return form


def _part(form: Tree, *, flat: bool = False) -> tuple[Tree, Tree]:
    """The type and the default of a field that is itself a form."""
    kind = tyro.conf.OmitArgPrefixes[form] if flat else form
    return kind, dataclasses.field(default_factory=form)


_SWITCH = tyro.conf.FlagCreatePairsOff
_PLACE = tyro.conf.Positional
_RUN = _flag(Path, "the run folder", _PLACE, metavar="RUN")
_STEP = _flag(optional_flag(int), "of the checkpoint; the last one where none is given")

_PARTS = {
    "env": form_of(EnvConfig, leave_out=("name",)),
    "network": form_of(NetworkConfig, names={"kind": "network"}),
    "run": form_of(TrainConfig, leave_out=("ppo", "eval")),
    "ppo": form_of(PPOConfig),
    "eval": form_of(EvalConfig),
    "video": form_of(VideoConfig),
}
_FLAT = ("env", "network", "run")

TRAIN: Tree = _form(
    "Train",
    "Trains a policy, and leaves a run folder.",
    [
        ("env_name", _flag(str, "the environment; see `eqx-ppo list`", _PLACE, metavar="ENV")),
        ("preset", _flag(bool, "begin with the published settings for ENV", _SWITCH), False),
        ("out", _flag(Path | None, "the run folder; runs/ENV-NETWORK-SEED by default"), None),
        ("resume", _flag(bool, "go on with the run in the folder", _SWITCH), False),
        ("overwrite", _flag(bool, "replace the run in the folder", _SWITCH), False),
        *((name, *_part(form, flat=name in _FLAT)) for name, form in _PARTS.items()),
    ],
)

_EVAL_PART = form_of(EvalConfig, leave_out=("enabled", "every_steps"))
EVAL: Tree = _form(
    "Eval",
    "Evaluates the policy of a run on fresh episodes.",
    [
        ("run", _RUN),
        ("step", _STEP, None),
        ("seed", _flag(int, "of the episodes"), 0),
        ("json", _flag(bool, "print one JSON object", _SWITCH), False),
        ("options", *_part(_EVAL_PART, flat=True)),
    ],
)

_CURVES_PART = form_of(LearningCurves)
PLOT: Tree = _form(
    "Plot",
    "Draws learning curves. Runs that differ only in their seed become one curve with a band.",
    [
        ("runs", _flag(tuple[Path, ...], "run folders", _PLACE, metavar="RUN...")),
        (
            "out",
            _flag(
                Path | None,
                "the picture; RUN/plots/learning_curves.png by default, and for several runs "
                "plots/learning_curves.png here, unless it exists",
            ),
            None,
        ),
        ("options", *_part(_CURVES_PART, flat=True)),
    ],
)

_VIDEO_PART = form_of(VideoConfig, leave_out=("every_steps",))
VIDEO: Tree = _form(
    "Video",
    "Makes a video of the policy of a run.",
    [
        ("run", _RUN),
        ("step", _STEP, None),
        ("out", _flag(Path | None, "the file; RUN/videos/STEP.mp4 by default"), None),
        ("options", *_part(_VIDEO_PART, flat=True)),
    ],
)

LIST: Tree = _form("List", "Lists the environments and presets.", [])


class TrainRequest(NamedTuple):
    """What `eqx-ppo train` was asked to do.

    - `config`: of the run.
    - `out`: its folder.
    - `resume`, `overwrite`: what to do with a run that is there.
    """

    config: RunConfig
    out: Path
    resume: bool
    overwrite: bool


def read_train(command: str, arguments: Sequence[str]) -> TrainRequest:
    """Reads the arguments of `train`.

    They are read twice: what some of them say (the environment, the preset, the network, the
    folder) decides what is meant where the others say nothing.
    """
    asks_for_help = bool({"-h", "--help"} & set(arguments))
    if asks_for_help and not [word for word in arguments if not word.startswith("-")]:
        parse(TRAIN, command, arguments)
    first = parse(TRAIN, command, [word for word in arguments if word not in ("-h", "--help")])
    names_network = any(word.split("=")[0] == "--network" for word in arguments)
    kind = first.network.kind if names_network else None
    with told_in_one_line():
        config = default_run_config(first.env_name, preset=first.preset, network=kind)
        seed = first.run.seed
        name = f"{first.env_name.replace(':', '-')}-{config.network.kind}-{seed}"
        out = first.out or Path("runs") / name
        if first.resume and first.overwrite:
            raise ValueError("`--resume` and `--overwrite` exclude each other.")
        if first.resume:
            config = RunFolder.open(out).read_config()
            _check_same_env(config, first.env_name, out)
    default = TRAIN(env_name=first.env_name, **_filled_parts(config))
    filled = parse(TRAIN, command, arguments, default)
    with told_in_one_line():
        return TrainRequest(_applied(filled, config), out, first.resume, first.overwrite)


def read_on_run(
    form: Tree, command: str, arguments: Sequence[str], part_of: Callable[[RunConfig], Tree]
) -> tuple[Tree, RunFolder, Tree]:
    """Reads the arguments of a command on a run, whose options are those of a record.

    **Arguments:**

    - `part_of`: the record in the settings of the run, whose values stand where the arguments
        say nothing.

    **Returns:** the filled form, the run folder, and the record as asked for.
    """
    first = parse(form, command, arguments)
    with told_in_one_line():
        folder = RunFolder.open(first.run)
        record = part_of(folder.read_config())
    options = fill(type(first.options), record)
    filled = parse(form, command, arguments, form(run=first.run, options=options))
    with told_in_one_line():
        return filled, folder, apply(filled.options, record)


def read_plot(command: str, arguments: Sequence[str]) -> tuple[Tree, LearningCurves]:
    """Reads the arguments of `plot`."""
    filled = parse(PLOT, command, arguments)
    with told_in_one_line():
        return filled, apply(filled.options, LearningCurves())


def _check_same_env(config: RunConfig, env_name: str, out: Path) -> None:
    if config.env.name != env_name:
        raise ValueError(
            f"The run in `{out}` is one on `{config.env.name}`, not on `{env_name}`. Choose the "
            "folder by `--out`."
        )


def _filled_parts(config: RunConfig) -> dict[str, Tree]:
    return {name: fill(_PARTS[name], record) for name, record in _records(config).items()}


def _records(config: RunConfig) -> dict[str, Tree]:
    """The records of a run by the names of their forms."""
    return {
        "env": config.env,
        "network": config.network,
        "run": config.train,
        "ppo": config.train.ppo,
        "eval": config.train.eval,
        "video": config.video,
    }


def _applied(filled: Tree, config: RunConfig) -> RunConfig:
    """The settings of a run with the values of a filled form."""
    done = {name: apply(vars(filled)[name], record) for name, record in _records(config).items()}
    train = dataclasses.replace(done["run"], ppo=done["ppo"], eval=done["eval"])
    return RunConfig(env=done["env"], network=done["network"], train=train, video=done["video"])
