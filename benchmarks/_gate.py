"""A training loop that is let go on piece by piece.

All three libraries train in a blocking function that calls back from time to time. Such a
function runs here in a thread of its own, and its callback waits at a gate, where nothing that
it has dispatched is left unfinished. So each library is timed in the very loop that its users
run, and several of them can take turns.
"""

import threading
from collections.abc import Callable
from typing import final

import jax

Train = Callable[[Callable[[], None]], None]
"""Trains for ever, and calls its argument after every epoch."""


class _Stop(BaseException):
    """Unwinds a training loop; not an `Exception`, so that no library swallows it."""


@final
class GatedRunner:
    """A `Runner` (see `benchmarks.peers`) around a training loop."""

    def __init__(self, train: Train, chunk: int):
        """**Arguments:**

        - `train`: the loop; it starts with the first `run`.
        - `chunk`: iterations between two of its callbacks.
        """
        self.chunk = chunk
        self._train = train
        self._go = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._stopping = False
        self._ended = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def run(self, n_iterations: int) -> None:
        """Trains for `n_iterations`, a multiple of `chunk`, and waits until that is done.

        **Raises:** `ValueError` for another number, `RuntimeError` (from the loop's own
        error, if there was one) if the loop has ended.
        """
        if n_iterations < 1 or n_iterations % self.chunk:
            raise ValueError(
                f"`n_iterations` must be a multiple of {self.chunk}, but got {n_iterations}."
            )
        for _ in range(n_iterations // self.chunk):
            if not self._ended:
                self._go.release()
                self._arrived.acquire()
            if self._ended:
                raise RuntimeError("The training loop has ended.") from self._error

    def close(self) -> None:
        """Ends the loop and waits for its thread."""
        self._stopping = True
        self._go.release()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._wait()
            self._train(self._pause)
        except _Stop:
            pass
        except Exception as error:
            self._error = error  # the cause of what `run` raises
        finally:
            self._ended = True
            self._arrived.release()

    def _pause(self) -> None:
        _wait_for_all()  # a loop may be ahead of its callbacks
        self._arrived.release()
        self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._stopping:
            raise _Stop


def _wait_for_all() -> None:
    """Waits for every array that is still being computed."""
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
