"""The host side of one run: what is due when, and where the numbers go."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias, final

import jax
import numpy as np
from jaxtyping import Array

from eqx_ppo._typing import Metrics
from eqx_ppo.algorithms import LoggingLevel, TrainingState
from eqx_ppo.training._checkpoint import Checkpointer, CheckpointError, RunRecord
from eqx_ppo.training._config import TrainConfig
from eqx_ppo.training._device import Chunk, Device, Leaves
from eqx_ppo.training._sinks import Sink
from eqx_ppo.training._stops import (
    Interrupts,
    InvalidWatch,
    TrainingDivergedError,
    TrainingInterrupted,
)

LogFn: TypeAlias = Callable[[dict[str, float], int], None]
"""Called with flat metrics (plain floats, JSON-able) and the count of environment steps."""

CheckpointFn: TypeAlias = Callable[[TrainingState, int], None]
"""Called with the training state and the count of environment steps."""


class TrainResult(NamedTuple):
    """What `train_ppo` returns.

    - `training_state`: the state at the end; its `network` is the trained one.
    - `final_metrics`: of the last iteration and the last evaluation.
    - `eval_history`: one dict per evaluation, with its `step`; of a resumed run also those
        before.
    - `total_steps`, `total_iterations`: environment steps and iterations, exact.
    """

    training_state: TrainingState
    final_metrics: dict[str, float]
    eval_history: list[dict[str, float]]
    total_steps: int
    total_iterations: int


class Outlets(NamedTuple):
    """Where a run sends its metrics and states."""

    sinks: Sink
    log_fn: LogFn | None
    checkpoint_fn: CheckpointFn | None
    checkpointer: Checkpointer | None

    @property
    def saves(self) -> bool:
        """Whether states are handed out at all."""
        return self.checkpoint_fn is not None or self.checkpointer is not None


class _Pending(NamedTuple):
    """Iterations whose metrics have not been fetched yet.

    - `copy`: of the state after them, where it is to be saved.
    - `finished`: when they were finished, once that is known; with an environment on the host
        it is when the call returns.
    """

    chunk: Chunk
    first_step: int
    n_iterations: int
    copy: Leaves | None
    finished: float | None


@final
class Run:
    """One run: `go` is called once.

    **Arguments:**

    - `record`: what is known of the run so far, to which it adds.
    - `steps`: environment steps that were done before.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        eval_key: Array,
        outlets: Outlets,
        record: RunRecord,
        steps: int,
    ):
        self._config = config
        self._device = device
        self._eval_key = eval_key
        self._outlets = outlets
        self._about = record
        self._steps = steps
        self._latest = dict(record.metrics)
        self._eval_history = [dict(row) for row in record.eval_history]
        self._watch = InvalidWatch(config, record.invalid)
        self._diverged: str | None = None
        self._saved_at: int | None = None
        self._pending: _Pending | None = None
        self._clock = time.perf_counter()

    def go(self, state: Leaves, *, evaluates_first: bool) -> TrainResult:
        """Iterates until `total_steps` are reached.

        **Raises:** `TrainingInterrupted`, `TrainingDivergedError`; both after saving.
        """
        if evaluates_first and self._config.eval.enabled:
            self._log(self._evaluate(state), self._steps)
        self._device.wait()  # until here Ctrl-C ends the run at once: nothing is lost
        with Interrupts() as interrupts:
            while self._goes_on() and not interrupts.requested:
                state = self._advance(state)
            self._flush()
            stopped = self._diverged is not None or interrupts.requested
            if stopped and self._outlets.saves and self._saved_at != self._steps:
                self._save(self._device.copy(state), None)
        result = self._result(state)
        if self._diverged is not None:
            raise TrainingDivergedError(f"{self._diverged} {self._whereabouts()}", result)
        if stopped:
            raise TrainingInterrupted(
                f"Training was interrupted after {self._steps:,} steps. {self._whereabouts()}",
                result,
            )
        return result

    def _goes_on(self) -> bool:
        return self._steps < self._config.ppo.total_steps and self._diverged is None

    def _result(self, leaves: Leaves) -> TrainResult:
        state = self._device.open(leaves)
        return TrainResult(
            training_state=state,
            final_metrics=self._latest,
            eval_history=self._eval_history,
            total_steps=int(state.counts.steps),
            total_iterations=int(state.counts.iterations),
        )

    def _advance(self, state: Leaves) -> Leaves:
        """Some iterations; evaluates and saves where that is due.

        Whatever the host does about one call it does while the next one runs, except for
        evaluations.
        """
        before, count = self._steps, self._iterations_to_next_stop()
        state, chunk = self._device.iterate(state, np.int32(count))
        self._settle()  # first: of this call nothing may be noted before the end of the previous
        finished = time.perf_counter() if _is_ready(chunk.invalid) else None
        self._flush()  # the previous call, while this one runs
        self._steps += count * self._config.ppo.steps_per_iteration
        saves = self._outlets.saves and self._is_due(before, self._config.checkpoint_every_steps)
        copy = self._device.copy(state) if saves else None
        self._pending = _Pending(chunk, before, count, copy, finished)
        if self._config.eval.enabled and self._is_due(before, self._config.eval.every_steps):
            self._flush(lambda: self._evaluate(state))
        return state

    def _is_due(self, before: int, every: int) -> bool:
        """Whether a multiple was passed since `before`, or the end is reached."""
        is_last = self._steps >= self._config.ppo.total_steps
        return is_last or self._steps // every > before // every

    def _iterations_to_next_stop(self) -> int:
        ppo, per_iteration = self._config.ppo, self._config.ppo.steps_per_iteration
        stops = [ppo.total_steps]
        if self._config.eval.enabled:
            stops.append(_next_multiple(self._steps, self._config.eval.every_steps))
        if self._outlets.saves:
            stops.append(_next_multiple(self._steps, self._config.checkpoint_every_steps))
        to_stop = -(-(min(stops) - self._steps) // per_iteration)
        return min(ppo.iterations_per_call, to_stop)

    # --- Numbers ------------------------------------------------------------------------------

    def _evaluate(self, state: Leaves) -> dict[str, float]:
        iteration = self._steps // self._config.ppo.steps_per_iteration
        varying = iteration if self._config.eval.vary_key else 0
        key = jax.random.fold_in(self._eval_key, varying)
        started = time.perf_counter()
        metrics = _to_floats(self._device.evaluate(state, key))
        elapsed = time.perf_counter() - started
        if LoggingLevel.THROUGHPUT in self._config.eval.logging_level:
            lifespan = metrics["eval/lifespan/mean"] * self._config.eval.n_envs
            metrics["throughput/eval_sps"] = lifespan / elapsed
        self._eval_history.append({"step": self._steps, **metrics})
        self._clock += elapsed
        return metrics

    def _settle(self) -> None:
        """Waits for the iterations that are pending, and notes when they were finished."""
        if self._pending is not None and self._pending.finished is None:
            jax.block_until_ready(self._pending.chunk.invalid)
            self._pending = self._pending._replace(finished=time.perf_counter())

    def _flush(self, evaluation: Callable[[], dict[str, float]] | None = None) -> None:
        """Fetches and logs finished iterations, and saves the state after them if that is due.

        An evaluation joins the last iteration.
        """
        self._settle()
        if self._pending is None:
            return
        (metrics, invalid), first_step, count, copy, finished = self._pending
        assert finished is not None
        self._pending = None
        rows = {name: np.asarray(values) for name, values in metrics.items()}
        counts = np.asarray(invalid)
        per_iteration = self._config.ppo.steps_per_iteration
        rate = count * per_iteration / (finished - self._clock)
        self._clock = finished
        evaluated: dict[str, float] | None = None
        for index in range(count):
            row = {name: float(values[index]) for name, values in rows.items()}
            if LoggingLevel.THROUGHPUT in self._config.ppo.logging_level:
                row["throughput/train_sps"] = rate
            if index == count - 1 and evaluation is not None:
                evaluated = evaluation()
                row |= evaluated
            steps = first_step + (index + 1) * per_iteration
            self._log(row, steps)
            if self._watch.add(int(counts[index])) and self._diverged is None:
                self._diverged = self._watch.describe(steps)
        if copy is not None:
            self._save(copy, evaluated)

    def _log(self, metrics: dict[str, float], steps: int) -> None:
        metrics = {**metrics, "total_steps": steps}
        self._latest = {**self._latest, **metrics}
        self._outlets.sinks.write(metrics, steps)
        if self._outlets.log_fn is not None:
            self._outlets.log_fn(metrics, steps)

    # --- States -------------------------------------------------------------------------------

    def _save(self, copy: Leaves, evaluated: Mapping[str, float] | None) -> None:
        """Hands out a state; a checkpoint that cannot be written does not end the run."""
        state = self._device.open(copy)
        steps = int(state.counts.steps)
        self._saved_at = steps
        if self._outlets.checkpointer is not None:
            record = RunRecord(
                config=self._about.config,
                environment=self._about.environment,
                metrics=self._latest,
                eval_history=self._eval_history,
                invalid=self._watch.recent,
            )
            try:
                self._outlets.checkpointer.save(state, steps, metrics=evaluated, run=record)
            except CheckpointError as error:
                warn_of_failed_save(error)
        if self._outlets.checkpoint_fn is not None:  # second: it may take long, or raise
            self._outlets.checkpoint_fn(state, steps)

    def _whereabouts(self) -> str:
        checkpointer = self._outlets.checkpointer
        if checkpointer is not None:
            return (
                f"The state is saved in `{checkpointer.directory}`: go on with `resume_from`. It "
                "is in the `result` of this exception, too."
            )
        return "The state is in the `result` of this exception."


def warn_of_failed_save(error: CheckpointError) -> None:
    """Says that a checkpoint is missing, where a run is not to end for it."""
    warnings.warn(
        f"{error} Training goes on, and the next checkpoint is tried when it is due.",
        RuntimeWarning,
        stacklevel=2,
    )


def _is_ready(array: Array) -> bool:
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


def _next_multiple(steps: int, every: int) -> int:
    return (steps // every + 1) * every


def _to_floats(metrics: Mapping[str, Array] | Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
