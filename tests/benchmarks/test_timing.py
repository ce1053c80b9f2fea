import threading

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _timing
from benchmarks._gate import GatedRunner
from benchmarks._timing import CallRunner, LoopRunner, SuccessiveRunner, chunks_for, interleave


class Clocked:
    """Takes a known time per iteration, on a clock of its own."""

    def __init__(self, clock: list[float], name: str, cost: float, chunk: int):
        self.chunk = chunk
        self.runs: list[int] = []
        self._clock, self._name, self._cost = clock, name, cost
        self.order: list[str] = []

    def run(self, n_iterations: int) -> None:
        self.runs.append(n_iterations)
        self._clock[0] += self._cost * n_iterations

    def close(self) -> None: ...


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now[0])
    return now


def test_times_are_per_iteration_and_timings_about_as_long_as_asked(clock):
    fast, slow = Clocked(clock, "fast", 0.125, chunk=2), Clocked(clock, "slow", 3.0, chunk=1)
    times = interleave({"fast": fast, "slow": slow}, repeats=3, seconds=1.0)
    assert times == {"fast": (0.125,) * 3, "slow": (3.0,) * 3}
    assert fast.runs == [2, 2, 2, 8, 8, 8]  # compile, warm up, calibrate, then 1 s each
    assert slow.runs == [1, 1, 1, 1, 1, 1]


def test_everyone_begins_a_repeat_in_turn(clock):
    calls = []

    def runner(name):
        made = Clocked(clock, name, 1.0, chunk=1)
        made.run = lambda n: calls.append(name)
        return made

    interleave({name: runner(name) for name in "abc"}, repeats=4, seconds=0.0)
    timed = "".join(calls[9:])  # after three runs of each to warm up
    assert timed == "abc" + "bca" + "cab" + "abc"


def test_chunks():
    assert chunks_for(0.3, 1.0) == 3
    assert chunks_for(7.0, 1.0) == 1
    assert chunks_for(0.0, 1.0) >= 1


def test_loop_runner_keeps_the_state():
    runner = LoopRunner(lambda state, count: state + count, jnp.zeros(()))
    runner.run(3)
    runner.run(4)
    assert float(runner._state) == 7.0


def test_call_runner_calls_as_often_as_asked():
    calls = []
    runner = CallRunner(lambda x: calls.append(x) or jnp.zeros(()), 5)
    runner.run(3)
    assert calls == [5, 5, 5]


def test_parts_run_one_after_the_other_as_often_as_asked():
    calls = []
    parts = [CallRunner(lambda x: calls.append(x) or jnp.zeros(()), name) for name in "ab"]
    runner = SuccessiveRunner(parts)
    runner.run(2)
    assert calls == ["a", "a", "b", "b"]


def test_gate_lets_one_epoch_through_at_a_time():
    epochs = []

    def train(pause):
        while True:
            epochs.append(threading.current_thread())
            pause()

    runner = GatedRunner(train, chunk=4)
    assert epochs == []
    runner.run(4)
    assert len(epochs) == 1
    runner.run(8)
    assert len(epochs) == 3
    runner.close()
    assert not epochs[0].is_alive()


def test_nothing_is_left_running_at_the_gate():
    @jax.jit
    def long(matrix):
        return jax.lax.fori_loop(0, 200, lambda _, m: jnp.tanh(m @ m), matrix)

    started = []

    def train(pause):
        while True:
            started.append(long(jnp.ones((256, 256))))
            pause()

    runner = GatedRunner(train, chunk=1)
    for _ in range(3):
        runner.run(1)
        assert started[-1].is_ready()
    runner.close()


def test_gate_refuses_a_part_of_a_chunk():
    runner = GatedRunner(lambda pause: pause(), chunk=4)
    with pytest.raises(ValueError, match="multiple of 4, but got 6"):
        runner.run(6)
    runner.close()


def test_gate_hands_on_errors():
    def train(pause):
        pause()
        raise OSError("no more")

    runner = GatedRunner(train, chunk=1)
    runner.run(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended") as caught:
            runner.run(1)
        assert isinstance(caught.value.__cause__, OSError)
    runner.close()


def test_gate_says_that_training_ended():
    runner = GatedRunner(lambda pause: pause(), chunk=1)
    runner.run(1)
    with pytest.raises(RuntimeError, match="has ended"):
        runner.run(1)
    runner.close()


def test_a_loop_that_never_began_is_closed():
    runner = GatedRunner(lambda pause: pytest.fail("it ran"), chunk=1)
    runner.close()
    assert runner._error is None


def test_no_library_swallows_the_end():
    seen = []

    def train(pause):
        try:
            while True:
                pause()
        except Exception as error:
            seen.append(error)

    runner = GatedRunner(train, chunk=1)
    runner.run(1)
    runner.close()
    assert seen == []
