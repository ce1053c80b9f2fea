"""What the commands do."""

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax

from eqx_ppo.algorithms import evaluate
from eqx_ppo.training._checkpoint import Checkpointer
from eqx_ppo.training._cli._arguments import (
    EVAL,
    LIST,
    VIDEO,
    read_on_run,
    read_plot,
    read_train,
)
from eqx_ppo.training._cli._beginning import (
    FolderNotes,
    folder_of,
    steps_to_resume,
    undone_if_empty,
)
from eqx_ppo.training._cli._errors import CommandError, told_in_one_line
from eqx_ppo.training._cli._flags import parse
from eqx_ppo.training._environments import SOURCES
from eqx_ppo.training._plots import plot_learning_curves
from eqx_ppo.training._presets import preset_names
from eqx_ppo.training._run_folder import RunFolder
from eqx_ppo.training._sinks import JSONLinesSink
from eqx_ppo.training._stops import TrainingInterrupted
from eqx_ppo.training._train import train_ppo
from eqx_ppo.training._video import VideoRecorder, record_video, use_headless_rendering

_CURVES = "learning_curves.png"
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


def train(command: str, arguments: Sequence[str]) -> int:
    """`eqx-ppo train`."""
    use_headless_rendering()
    request = read_train(command, arguments)
    config = request.config
    with told_in_one_line():
        env, eval_env = config.env.make_env(), config.env.make_eval_env()
        network = config.make_network(env)
        folder, replaced = folder_of(request)
        done = steps_to_resume(request, folder)
    notes = FolderNotes(folder, config, env, replaced)
    print(f"Run folder: {folder.path}", flush=True)
    with (
        Checkpointer(folder.checkpoints) as checkpointer,
        undone_if_empty(notes, request, checkpointer),
    ):
        recorder = VideoRecorder(eval_env, folder.videos, config.video, latest=done or 0)
        try:
            result = train_ppo(
                env,
                network,
                config.train,
                eval_env=eval_env,
                sinks=[JSONLinesSink(folder.metrics_file, overwrite=done is None), notes],
                checkpointer=checkpointer,
                checkpoint_fn=None if config.video.every_steps is None else recorder,
                resume_from=None if done is None else checkpointer,
            )
        except TrainingInterrupted as interrupted:
            steps = interrupted.result.total_steps
            print(f"Interrupted after {steps:,} steps, which are saved. Go on with `--resume`.")
            return INTERRUPTED
        except (OSError, TypeError, ValueError) as error:
            if notes.has_begun:
                raise
            raise CommandError(str(error)) from error  # settings that do not fit the environment
    print(f"Finished after {result.total_steps:,} steps.")
    return 0


def eval_(command: str, arguments: Sequence[str]) -> int:
    """`eqx-ppo eval`."""
    use_headless_rendering()
    filled, folder, options = read_on_run(EVAL, command, arguments, lambda run: run.train.eval)
    with told_in_one_line():
        if not 0 <= filled.seed < 2**32:
            raise ValueError(f"`--seed` must be at least 0 and below 2**32, but got {filled.seed}.")
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
        runs: dict[Path, Path] = {}
        for path in filled.runs:
            runs.setdefault(path.resolve(), path)  # each once
        folders = [RunFolder.open(path) for path in runs.values()]
        if not folders:
            raise ValueError(f"There is nothing to draw. Name a run folder: `{command} RUN`.")
        path = filled.out or _picture(folders)
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


def _picture(folders: list[RunFolder]) -> Path:
    """Where learning curves are drawn if nothing is said about it."""
    if len(folders) == 1:
        return folders[0].plots / _CURVES
    path = Path("plots") / _CURVES
    if path.exists():
        raise FileExistsError(f"`{path}` exists. Say by `--out` where to draw several runs.")
    return path


def _by_settings(folders: list[RunFolder]) -> dict[str, list[Path]]:
    """The runs that differ only in their seed, under one label.

    Where two of them have the same seed, they are no sample over seeds: each is a curve then.
    """
    groups: dict[str, list[RunFolder]] = defaultdict(list)
    for folder in folders:
        config = folder.read_config()
        train = dataclasses.replace(config.train, seed=0)
        settings = dataclasses.replace(config, train=train).to_json()
        groups[json.dumps(settings, sort_keys=True)].append(folder)
    curves: list[list[RunFolder]] = []
    for members in groups.values():
        seeds = {member.read_config().train.seed for member in members}
        curves += [members] if len(seeds) == len(members) else [[member] for member in members]
    labels: dict[str, list[Path]] = {}
    for members in curves:
        first = members[0].path
        name = first.name
        if len(members) > 1:
            name = name.removesuffix(f"-{members[0].read_config().train.seed}")
        free = (label for label in (name, str(first), str(first.resolve())) if label not in labels)
        labels[next(free)] = [member.path for member in members]
    return labels
