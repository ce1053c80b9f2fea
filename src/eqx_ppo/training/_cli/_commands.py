"""What the commands do."""

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import equinox as eqx
import jax

from eqx_ppo.algorithms import evaluate
from eqx_ppo.envs import Env
from eqx_ppo.training._checkpoint import Checkpointer
from eqx_ppo.training._cli._arguments import (
    EVAL,
    LIST,
    VIDEO,
    TrainRequest,
    read_on_run,
    read_plot,
    read_train,
)
from eqx_ppo.training._cli._errors import CommandError, told_in_one_line
from eqx_ppo.training._cli._flags import parse
from eqx_ppo.training._environments import SOURCES
from eqx_ppo.training._plots import plot_learning_curves
from eqx_ppo.training._presets import preset_names
from eqx_ppo.training._run_config import RunConfig
from eqx_ppo.training._run_folder import RunFolder
from eqx_ppo.training._sinks import JSONLinesSink, RunInfo, Sink
from eqx_ppo.training._stops import TrainingInterrupted
from eqx_ppo.training._train import train_ppo
from eqx_ppo.training._video import VideoRecorder, record_video, use_headless_rendering

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


def train(command: str, arguments: Sequence[str]) -> int:
    """`eqx-ppo train`."""
    use_headless_rendering()
    request = read_train(command, arguments)
    config = request.config
    with told_in_one_line():
        env, eval_env = config.env.make_env(), config.env.make_eval_env()
        network = config.make_network(env)
        folder = _folder(request)
    recorder = VideoRecorder(eval_env, folder.videos, config.video)
    notes = _FolderNotes(folder, config, env)
    print(f"Run folder: {folder.path}", flush=True)
    with Checkpointer(folder.checkpoints) as checkpointer:
        done = checkpointer.latest() if request.resume else None
        try:
            result = train_ppo(
                env,
                network,
                config.train,
                eval_env=eval_env,
                sinks=[notes, JSONLinesSink(folder.metrics_file, overwrite=done is None)],
                checkpointer=checkpointer,
                checkpoint_fn=None if config.video.every_steps is None else recorder,
                resume_from=None if done is None else checkpointer,
            )
        except TrainingInterrupted as interrupted:
            steps = interrupted.result.total_steps
            print(f"Interrupted after {steps:,} steps, which are saved. Go on with `--resume`.")
            return INTERRUPTED
        except (TypeError, ValueError) as error:
            if notes.has_begun:
                raise
            if not request.resume:
                folder.delete()
            raise CommandError(str(error)) from error  # settings that do not fit the environment
    print(f"Finished after {result.total_steps:,} steps.")
    return 0


def eval_(command: str, arguments: Sequence[str]) -> int:
    """`eqx-ppo eval`."""
    use_headless_rendering()
    filled, folder, options = read_on_run(EVAL, command, arguments, lambda run: run.train.eval)
    with told_in_one_line():
        policy = folder.load_policy(filled.step)
    key = jax.random.key(filled.seed)
    metrics = eqx.filter_jit(evaluate)(policy.env, policy.network, options, key)
    metrics = {name: float(value) for name, value in metrics.items()}
    if filled.json:
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        print(json.dumps({"steps": policy.steps, **finite}))
        return 0
    print(f"{options.n_envs} episodes after {policy.steps:,} steps of training")
    width = max(map(len, metrics))
    for name, value in sorted(metrics.items(), key=_natural):
        print(f"  {name:<{width}}  {value:>12.6g}")
    return 0


def plot(command: str, arguments: Sequence[str]) -> int:
    """`eqx-ppo plot`."""
    filled, options = read_plot(command, arguments)
    with told_in_one_line():
        folders = [RunFolder.open(path) for path in filled.runs]
        if not folders:
            raise ValueError(f"There is nothing to draw. Name a run folder: `{command} RUN`.")
        path = filled.out
        if path is None:
            alone = len(folders) == 1
            path = (folders[0].plots if alone else Path("plots")) / "learning_curves.png"
        path = plot_learning_curves(_by_settings(folders), path, options)
    print(path)
    return 0


def video(command: str, arguments: Sequence[str]) -> int:
    """`eqx-ppo video`."""
    use_headless_rendering()
    filled, folder, options = read_on_run(VIDEO, command, arguments, lambda run: run.video)
    with told_in_one_line():
        policy = folder.load_policy(filled.step)
        path = filled.out or folder.videos / f"{policy.steps}.{options.format}"
        made = record_video(policy.env, policy.network, path, options)
    episodes = zip(made.returns, made.lengths, strict=True)
    for number, (total, length) in enumerate(episodes, 1):
        print(f"Episode {number}: return {total:.2f}, {length} steps")
    print(f"{made.path} ({made.n_frames} pictures, {made.fps:g} per second)")
    return 0


def list_(command: str, arguments: Sequence[str]) -> int:
    """`eqx-ppo list`."""
    parse(LIST, command, arguments)
    presets, shown = set(preset_names()), set()
    print(f"{'environment':<38} {'from':<20} preset")
    for prefix, source in SOURCES.items():
        try:
            names = source.names()
        except ImportError:
            print(f"{'(not installed)':<38} {source.title}")
            continue
        for bare_name in names:
            shown.add(bare_name)
            name = f"{prefix}:{bare_name}" if source.needs_prefix else bare_name
            print(f"{name:<38} {source.title:<20} {'yes' if name in presets else ''}".rstrip())
    for name in preset_names():
        if name not in shown:
            print(f"{name:<38} {'not to be loaded here':<20} yes")
    return 0


def _natural(item: tuple[str, float]) -> list[str | int]:
    """Sorts `p100` after `p25`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def _folder(request: TrainRequest) -> RunFolder:
    """The folder of a run that begins or goes on."""
    if request.resume:
        return RunFolder.open(request.out)
    return RunFolder.create(request.out, request.config, overwrite=request.overwrite)


@final
class _FolderNotes(Sink):
    """Writes down with what a run begins, when its checkpoint has been found to fit.

    A run that is continued with settings that do not fit it leaves its folder as it was.
    `has_begun` tells whether the run got as far as its first row.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, env: Env):
        self._folder, self._config, self._env = folder, config, env
        self.has_begun = False

    def start(self, run: RunInfo) -> None:
        self._folder.write_config(self._config)
        self._folder.note_start(self._env, run.resumed_at or 0)

    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        self.has_begun = True

    def close(self) -> None:
        """Nothing is open."""


def _by_settings(folders: list[RunFolder]) -> dict[str, list[Path]]:
    """The runs that differ only in their seed, under one label."""
    groups: dict[str, list[RunFolder]] = defaultdict(list)
    for folder in folders:
        config = folder.read_config()
        train = dataclasses.replace(config.train, seed=0)
        settings = dataclasses.replace(config, train=train).to_json()
        groups[json.dumps(settings, sort_keys=True)].append(folder)
    labels: dict[str, list[Path]] = {}
    for members in groups.values():
        name = members[0].path.name
        if len(members) > 1:
            name = name.removesuffix(f"-{members[0].read_config().train.seed}")
        label = str(members[0].path) if name in labels else name
        labels[label] = [member.path for member in members]
    return labels
