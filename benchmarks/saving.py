"""What saving costs: `python -m benchmarks.saving`.

Blocks of iterations with one asynchronous save, and blocks without any, take turns in one
process, as `train_ppo` runs them: the state of one block is saved while the next one runs. A
second kind of block without a save says how much two equal blocks differ. Wall time
counts the time of other programs, CPU time counts the files that are written in the background.
On a busy machine only the last line is of use: the CPU time of saves alone.
"""

import argparse
import statistics
import sys
import tempfile
import time
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

import eqx_ppo as ep
from eqx_ppo.training import Checkpointer
from eqx_ppo.training._device import Device, Leaves, Task, compile_device, new_start

Seconds: TypeAlias = dict[str, list[float]]

_KINDS = ("without", "again without", "with")


class Cost(NamedTuple):
    """Seconds of every block, by kind; and the CPU time of every save that had all to itself."""

    wall: Seconds
    cpu: Seconds
    alone: list[float]


def measure(env: str, n_envs: int, length: int, iterations: int, blocks: int) -> Cost:
    """Runs as many blocks of each kind, after one of each to warm up."""
    ppo = ep.PPOConfig(n_envs=n_envs, rollout_length=length, iterations_per_call=iterations)
    config = ep.TrainConfig(ppo=ppo, eval=ep.EvalConfig(enabled=False), console=False)
    task_env = ep.EpisodeWrapper(ep.load_playground(env), 1000)
    network = ep.make_mlp_actor_critic(
        task_env.observation_size,
        task_env.action_size,
        [64] * 4,
        [256] * 2,
        key=jax.random.key(0),
    )
    task = Task(task_env, task_env, config, None)
    device = compile_device(task, new_start(task, network, jax.random.key(1)))
    state = device.first()
    wall: Seconds = {kind: [] for kind in _KINDS}
    cpu: Seconds = {kind: [] for kind in _KINDS}
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        for block in range(blocks + 1):
            turns = _KINDS[block % 3 :] + _KINDS[: block % 3]  # everyone is first in turn
            for kind in turns:
                saver = checkpointer if kind == "with" else None
                started = time.perf_counter(), time.process_time()
                state = _run(device, state, iterations, saver)
                elapsed = time.perf_counter() - started[0], time.process_time() - started[1]
                if block > 0:
                    wall[kind].append(elapsed[0])
                    cpu[kind].append(elapsed[1])
        alone = [_save(device, state, checkpointer, 10**9 + index) for index in range(blocks)]
    return Cost(wall, cpu, alone)


def _save(device: Device, state: Leaves, checkpointer: Checkpointer, steps: int) -> float:
    """The CPU time of one save."""
    started = time.process_time()
    checkpointer.save(device.open(device.copy(state)), steps)
    checkpointer.wait()
    return time.process_time() - started


def _run(
    device: Device, state: Leaves, iterations: int, checkpointer: Checkpointer | None
) -> Leaves:
    """A block: what it began with is saved while it runs."""
    copy = None if checkpointer is None else device.copy(state)
    state, chunk = device.iterate(state, np.int32(iterations))
    if checkpointer is not None and copy is not None:
        opened = device.open(copy)
        checkpointer.save(opened, int(opened.counts.steps))
    jax.block_until_ready((state, chunk))
    if checkpointer is not None:
        checkpointer.wait()
    return state


def _line(name: str, values: Seconds) -> str:
    base = values["without"]
    parts = [f"{name}: {statistics.median(base):.3f} s without"]
    for kind in _KINDS[1:]:
        ratios = [other / one for other, one in zip(values[kind], base, strict=True)]
        low, middle, high = (100.0 * (q - 1.0) for q in statistics.quantiles(ratios, n=4))
        total = 100.0 * (sum(values[kind]) / sum(base) - 1.0)
        parts.append(
            f"{kind} {middle:+.2f} % (quartiles {low:+.2f} to {high:+.2f}, sums {total:+.2f})"
        )
    return ", ".join(parts)


def main() -> int:
    """Prints by how much a block takes longer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartpoleBalance")
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=10, help="per save")
    parser.add_argument("--blocks", type=int, default=40)
    options = parser.parse_args()
    cost = measure(options.env, options.envs, options.length, options.iterations, options.blocks)
    print(f"{options.blocks} blocks of {options.iterations} iterations each")
    print(_line("wall time per block", cost.wall))
    print(_line("CPU time per block", cost.cpu))
    alone, block = statistics.median(cost.alone), statistics.median(cost.cpu["without"])
    print(
        f"CPU time of a save alone: {1e3 * alone:.1f} ms, {100.0 * alone / block:.2f} % of a block"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
