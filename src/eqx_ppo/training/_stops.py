"""What ends a run before its time: Ctrl-C, and environments that do not stay finite."""

import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self, final

from eqx_ppo.training._config import TrainConfig

if TYPE_CHECKING:
    from eqx_ppo.training._loop import TrainResult

_NOTICE = b"\nStopping after the iterations that are running; Ctrl-C again stops at once.\n"


@final
class TrainingInterrupted(KeyboardInterrupt):
    """Training was ended by Ctrl-C, after its state was saved.

    A script that does not catch it ends, as scripts do on Ctrl-C.

    - `result`: what `train_ppo` would have returned, with the state after the last iteration.
    """

    def __init__(self, message: str, result: "TrainResult"):
        super().__init__(message)
        self.result = result


@final
class TrainingDivergedError(RuntimeError):
    """Most environments do not stay finite; training was ended after its state was saved.

    - `result`: what `train_ppo` would have returned, with the state after the last iteration.
    """

    def __init__(self, message: str, result: "TrainResult"):
        super().__init__(message)
        self.result = result


@final
class Interrupts:
    """Within this context the first Ctrl-C only sets `requested`, and the second acts as usual.

    In threads other than the main one, and where the program has a handler of its own,
    nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._installed = False

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, _NOTICE)  # `print` may be in the middle of a line


@final
class InvalidWatch:
    """Says when too many steps of the last iterations were invalid."""

    def __init__(self, config: TrainConfig, recent: Sequence[int] = ()):
        """**Arguments:**

        - `config`: with the share and the window.
        - `recent`: the counts of the iterations before, oldest first.
        """
        self._share = config.max_invalid_share
        self._per_iteration = config.ppo.steps_per_iteration
        self._counts = deque(recent, maxlen=config.invalid_window)

    @property
    def recent(self) -> list[int]:
        """The counts of the iterations in the window, oldest first."""
        return list(self._counts)

    def add(self, count: int) -> bool:
        """Takes in the invalid steps of another iteration, and says whether they are too many."""
        self._counts.append(count)
        window = self._counts.maxlen or 0
        full = len(self._counts) == window
        return full and sum(self._counts) > self._share * window * self._per_iteration

    def describe(self, steps: int) -> str:
        """How many, and since when, after `steps` environment steps."""
        bad, window = sum(self._counts), len(self._counts)
        limit = self._share * self._per_iteration
        first = next(index for index, count in enumerate(self._counts) if count > limit)
        began = steps - (window - first) * self._per_iteration
        since = "or earlier " if first == 0 else ""
        return (
            f"{bad:,} of the {window * self._per_iteration:,} environment steps of the last "
            f"{window} iterations were invalid: the state, the observation or the reward of the "
            f"environment became infinite or NaN. It began after {began:,} steps {since}"
            f"(now {steps:,}), where more than {self._share:.0%} of an iteration were invalid for "
            "the first time. Try the environment by `check_env`, a smaller time step or more "
            "solver iterations of its physics, or bounded actions. To go on regardless, raise "
            "`TrainConfig.max_invalid_share`, up to 1."
        )
