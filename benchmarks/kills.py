"""Kills a run that saves often, over and over: `python -m benchmarks.kills`.

A small recurrent run saves after every iteration, and gets SIGKILL at a random moment; then
it is resumed, and killed again. After every kill the newest checkpoint must be sound, at
least as new as the newest that was complete before the kill, and bit for bit the state that
an uninterrupted run had at that step. At the end the run must have the weights, and the rows
of metrics, of the uninterrupted one. Exit status 1 if not.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import eqx_ppo as ep
from eqx_ppo.algorithms import TrainingState, new_training_state
from eqx_ppo.envs import Pendulum
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training import Checkpointer, JSONLinesSink, restore_network

ROOT = Path(__file__).parents[1]
_PATIENCE = 300.0  # seconds for a process to save its first checkpoint


class Kills(NamedTuple):
    """What happened.

    - `kills`: how many.
    - `in_save`: how many of them left a save unfinished.
    - `iterations`: of the whole run.
    - `failures`: what was not as it should be.
    """

    kills: int
    in_save: int
    iterations: int
    failures: list[str]


def make_config(iterations: int) -> ep.TrainConfig:
    """A run of 32 steps per iteration that saves after each and evaluates after every fifth."""
    ppo = ep.PPOConfig(
        n_envs=8,
        rollout_length=4,
        n_minibatches=2,
        n_epochs=1,
        total_steps=32 * iterations,
        iterations_per_call=1,
    )
    evaluation = ep.EvalConfig(every_steps=160, n_envs=2, max_episode_length=8)
    return ep.TrainConfig(ppo=ppo, eval=evaluation, checkpoint_every_steps=32, console=False)


def make_env() -> ep.EpisodeWrapper:
    """Episodes of eleven steps."""
    return ep.EpisodeWrapper(Pendulum(), 11)


def make_network() -> StatefulModule:
    """A normalizer and a recurrent layer."""
    return ep.make_recurrent_actor_critic(3, 1, 4, key=jax.random.key(0))


def digest(state: TrainingState) -> str:
    """A digest of every bit of a state."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        total.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return total.hexdigest()


# --- The process that is killed ---------------------------------------------------------------


def train(directory: Path, iterations: int) -> None:
    """Begins, or goes on where it was killed; notes the digest of the end."""
    warnings.filterwarnings("ignore", message=".*is damaged, or is none")
    checkpoints = Checkpointer(directory / "checkpoints", keep=2)
    result = ep.train_ppo(
        make_env(),
        make_network(),
        make_config(iterations),
        sinks=[JSONLinesSink(directory / "metrics.jsonl", overwrite=True)],
        checkpointer=checkpoints,
        resume_from=None if checkpoints.latest() is None else checkpoints,
    )
    (directory / "end").write_text(digest(result.training_state))


@contextmanager
def _running(directory: Path, iterations: int) -> Iterator[subprocess.Popen]:
    """The process, which is killed in the end if it still runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks.kills", "--iterations", str(iterations)]
    with (directory / "output").open("ab") as output:
        process = subprocess.Popen(
            [*command, "--train", str(directory)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


# --- The process that kills -------------------------------------------------------------------


def kill_often(
    directory: Path, kills: int, iterations: int, seed: int, *, longest_wait: float = 0.5
) -> Kills:
    """Kills, resumes, compares.

    **Arguments:**

    - `directory`: empty.
    - `kills`, `iterations`: how many kills, and of the run.
    - `seed`: of the moments.
    - `longest_wait`: seconds between the first new checkpoint of a process and its end.
    """
    digests: dict[int, str] = {}
    whole = directory / "whole.jsonl"
    end = ep.train_ppo(
        make_env(),
        make_network(),
        make_config(iterations),
        sinks=[JSONLinesSink(whole)],
        checkpoint_fn=lambda state, steps: digests.update({steps: digest(state)}),
    ).training_state
    ppo = make_config(iterations).ppo
    template = jax.jit(lambda key: new_training_state(make_env(), make_network(), ppo, key))(
        jax.random.key(1)
    )
    moments = random.Random(seed)
    checkpoints = Checkpointer(directory / "checkpoints")
    failures: list[str] = []
    done = in_save = 0
    while done < kills:
        with _running(directory, iterations) as process:
            _wait_for_save(process, checkpoints, directory)
            time.sleep(moments.uniform(0.0, longest_wait))
            before = checkpoints.latest()
            if process.poll() is not None:
                failures.append(f"ended by itself after {done} kills: {_tail(directory)}")
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
        done += 1
        in_save += any("tmp" in path.name for path in checkpoints.directory.iterdir())
        found = _compare(checkpoints, template, digests, before)
        failures += [f"kill {done}: {failure}" for failure in found]
        print(f"kill {done}: {checkpoints.latest():,} steps {found or ''}", flush=True)
    with _running(directory, iterations) as process:
        if process.wait() != 0:
            failures.append(f"did not reach its end: {_tail(directory)}")
        elif (directory / "end").read_text() != digest(end):
            failures.append("the state at the end is another")
    rows, expected = _rows(directory / "metrics.jsonl"), _rows(whole)
    if rows != expected:
        failures.append("the metrics are others")
    restored = restore_network(checkpoints.directory, make_network())
    if jax.tree.leaves(restored)[0].tolist() != jax.tree.leaves(end.network)[0].tolist():
        failures.append("the restored network is another")
    return Kills(done, in_save, iterations, failures)


def _wait_for_save(process: subprocess.Popen, checkpoints: Checkpointer, directory: Path) -> None:
    """Until the process has saved something new."""
    first, limit = checkpoints.latest(), time.monotonic() + _PATIENCE
    while process.poll() is None and checkpoints.latest() == first:
        if time.monotonic() > limit:
            raise TimeoutError(f"Nothing was saved in {_PATIENCE} s: {_tail(directory)}")
        time.sleep(0.005)


def _compare(
    checkpoints: Checkpointer,
    template: TrainingState,
    digests: dict[int, str],
    before: int | None,
) -> list[str]:
    """What is wrong with the newest checkpoint; a damaged one is an error here."""
    newest = checkpoints.latest()
    if newest is None or (before is not None and newest < before):
        return [f"step {before} was complete, but now the newest is {newest}"]
    try:
        state = checkpoints.restore(template, step=newest)
    except ep.training.CheckpointError as error:
        return [str(error)]
    return [] if digest(state) == digests[newest] else [f"step {newest} is not what it was"]


def _rows(path: Path) -> list[dict[str, float]]:
    """The rows of metrics, without those that measure time."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


def _tail(directory: Path) -> str:
    return (directory / "output").read_text(errors="replace")[-2000:]


def main() -> int:
    """Prints every kill, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train, arguments.iterations)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        found = kill_often(Path(directory), arguments.kills, arguments.iterations, arguments.seed)
    print(
        f"{found.kills} kills, {found.in_save} in the middle of a save; "
        f"{found.iterations} iterations in the end; {len(found.failures)} failures"
    )
    print("\n".join(found.failures))
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
