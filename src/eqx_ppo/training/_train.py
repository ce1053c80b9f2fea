"""Training from the first iteration to the last: what a run is put together from."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import optax

from eqx_ppo._checks import typed
from eqx_ppo.algorithms import TrainingState, split_network
from eqx_ppo.envs import Env, SupportsOwnResets
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training._checkpoint import (
    Checkpointer,
    CheckpointError,
    RunRecord,
    describe_environment,
    unfinished_saves,
)
from eqx_ppo.training._config import TrainConfig
from eqx_ppo.training._config_json import config_to_json
from eqx_ppo.training._console import ConsoleSink
from eqx_ppo.training._device import (
    Start,
    Task,
    compile_device,
    continue_from,
    new_start,
    template_of,
)
from eqx_ppo.training._loop import (
    CheckpointFn,
    LogFn,
    Outlets,
    Run,
    TrainResult,
    warn_of_failed_save,
)
from eqx_ppo.training._resume import restart_on_host, warn_of_changes
from eqx_ppo.training._sinks import RunInfo, Sink, SinkGroup


@typed
def train_ppo(  # noqa: PLR0913 (each may be left out)
    env: Env,
    network: StatefulModule,
    config: TrainConfig | None = None,
    *,
    eval_env: Env | None = None,
    optimizer: optax.GradientTransformation | None = None,
    log_fn: LogFn | None = None,
    sinks: Sequence[Sink] = (),
    checkpoint_fn: CheckpointFn | None = None,
    checkpointer: Checkpointer | None = None,
    initial_state: TrainingState | None = None,
    resume_from: Checkpointer | str | os.PathLike[str] | None = None,
) -> TrainResult:
    """Trains a network by PPO.

    The network and the state that are handed in stay usable: training works on copies.

    Ctrl-C ends training after the iterations that are running: their state is saved, and
    `TrainingInterrupted` is raised, which holds the result. A second Ctrl-C ends it at once.

    **Arguments:**

    - `env`: the environment to train in, written for one instance.
    - `network`: outputs a `PPONetworkOutput`, as `make_mlp_actor_critic` builds it.
    - `config`: of the run; `TrainConfig()` by default.
    - `eval_env`: the environment to evaluate in; `env` by default.
    - `optimizer`: any `optax` optimizer, instead of the one that `config.ppo` describes.
    - `log_fn`: called once per iteration, with a rising count of environment steps; where
        an evaluation took place its metrics are part of the call. Also called once before
        training with the first evaluation.
    - `sinks`: get the same metrics as `log_fn`, and write them somewhere.
    - `checkpoint_fn`: called with a copy of the state; see
        `TrainConfig.checkpoint_every_steps`.
    - `checkpointer`: saves the state as often. Checkpoints in its directory that the run does
        not continue from are set aside, with a warning. One that cannot be written is a
        warning, too.
    - `initial_state`: continue from this state (its weights and statistics) instead of a new
        one; `network` then only has to be of the same structure.
    - `resume_from`: continue the run whose checkpoints these are, as if it had not been
        interrupted: bit for bit, with its metrics and evaluations. Usually `checkpointer`
        itself, or the path of such a directory.

    **Returns:** the final state, metrics and all evaluations.

    **Raises:** `TrainingInterrupted` after Ctrl-C; `TrainingDivergedError` when most
    environments do not stay finite; `CheckpointError` when there is nothing to resume from, or
    `checkpointer` cannot write; `StructureMismatchError` when the checkpoint is that of another
    network, optimizer or environment. Errors of `env`, `network`, `log_fn` and `checkpoint_fn`
    come through.
    """
    config = TrainConfig() if config is None else config
    if initial_state is not None and resume_from is not None:
        raise ValueError(
            "`initial_state` and `resume_from` both say where to begin. Give one of them."
        )
    task = Task(env, env if eval_env is None else eval_env, config, optimizer)
    _check_eval_env(task)
    run_key, eval_key = jax.random.split(jax.random.key(config.seed))
    origin = _origin(task, network, run_key, initial_state, resume_from)
    outlets = Outlets(
        SinkGroup([*([ConsoleSink()] if config.console else []), *sinks]),
        log_fn,
        checkpoint_fn,
        checkpointer,
    )
    _open(outlets, origin, config)
    try:
        traced = task.traced_once()
        start = origin.start or new_start(traced, network, run_key)
        device = compile_device(traced, start)
        _set_aside(checkpointer, origin)
        run = Run(config, device, eval_key, outlets, origin.record, origin.steps or 0)
        return run.go(device.first(), evaluates_first=origin.directory is None)
    finally:
        _close(outlets)


def _check_eval_env(task: Task) -> None:
    is_same = task.eval_env is task.env
    if is_same and isinstance(task.env, SupportsOwnResets) and task.config.eval.enabled:
        raise ValueError(
            f"A `{type(task.env).__name__}` cannot be evaluated in while training goes on in it, "
            "because its episodes cannot be put aside. Give another one as `eval_env`, or set "
            "`EvalConfig(enabled=False)`."
        )


class _Origin(NamedTuple):
    """Where a run begins.

    - `start`: the state to begin with; `None` for a new one.
    - `steps`: environment steps that were done; `None` for a new run.
    - `record`: what is known of the run so far.
    - `directory`: of the checkpoints that it resumes from.
    """

    start: Start | None
    steps: int | None
    record: RunRecord
    directory: Path | None


def _origin(
    task: Task,
    network: StatefulModule,
    key: jax.Array,
    initial_state: TrainingState | None,
    resume_from: Checkpointer | str | os.PathLike[str] | None,
) -> _Origin:
    record = RunRecord(
        config=config_to_json(task.config), environment=describe_environment(task.env)
    )
    if resume_from is not None:
        source = resume_from if isinstance(resume_from, Checkpointer) else Checkpointer(resume_from)
        state, metadata = source.resume(template_of(task, network, key))
        if task.config.console:
            unfinished = unfinished_saves(source.directory)
            ignored = f" Saves that were not finished: {unfinished}." if unfinished else ""
            where = f"Continuing from {metadata.steps:,} steps in `{source.directory}`."
            print(where + ignored, flush=True)
        warn_of_changes(metadata, record)
        if isinstance(task.env, SupportsOwnResets):
            state = restart_on_host(task, state, jax.random.fold_in(key, metadata.steps))
        record = RunRecord(**{**vars(metadata.run), "config": record.config})
        return _Origin(
            continue_from(task, state), metadata.steps, record, source.directory.resolve()
        )
    if initial_state is None:
        return _Origin(None, None, record, None)
    if split_network(network)[1] != initial_state.remainder:
        raise ValueError(
            "`initial_state` was made for another network than the one given. Continue with "
            "`initial_state.network`, or leave `initial_state` out to start anew."
        )
    start = continue_from(task, initial_state)
    return _Origin(start, int(initial_state.counts.steps), record, None)


def _open(outlets: Outlets, origin: _Origin, config: TrainConfig) -> None:
    """Opens all outlets before anything is compiled, so that a wrong path is told at once."""
    checkpointer = outlets.checkpointer
    if checkpointer is not None:
        checkpointer.check_writable()
    about = RunInfo(
        total_steps=config.ppo.total_steps,
        resumed_at=origin.steps,
        config=origin.record.config,
    )
    outlets.sinks.start(about)


def _set_aside(checkpointer: Checkpointer | None, origin: _Origin) -> None:
    """Makes room for new checkpoints, once nothing can be refused any more."""
    if checkpointer is not None:
        elsewhere = origin.directory not in (None, checkpointer.directory.resolve())
        checkpointer.begin(None if elsewhere else origin.steps)


def _close(outlets: Outlets) -> None:
    """Waits until everything is on disk, also when the run has failed."""
    try:
        if outlets.checkpointer is not None:
            outlets.checkpointer.wait()
    except CheckpointError as error:
        warn_of_failed_save(error)
    finally:
        outlets.sinks.close()
