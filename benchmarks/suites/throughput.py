"""Environment steps per second of whole training iterations, side by side.

The floor takes turns with them: environment, matrix products and activations, in the fastest
form that is known, and nothing else. Its ratio to a peer says how far ahead of it a library
could be that computes what this one does.
"""

import jax

from benchmarks._environments import sizes_of
from benchmarks._figures import Figure
from benchmarks._floors import PARTS, product_floor
from benchmarks._parts import env_runner, jit, make_workload
from benchmarks._settings import (
    CARTPOLE,
    CARTPOLE_64,
    CARTPOLE_LSTM,
    CARTPOLE_LSTM_ALONE,
    CHEETAH,
    Plan,
    Setting,
)
from benchmarks._timing import CallRunner, SuccessiveRunner, interleave
from benchmarks.peers import able_peers
from benchmarks.suites import Found, say
from eqx_ppo.ops import linear

SUITE = "throughput"
QUANTITY = "steps per second"

FLOOR = "floor"


def throughput(plan: Plan) -> Found:
    """Each peer trains; all take turns in one process, with the floor."""
    settings = plan.workloads(CARTPOLE, CARTPOLE_64, CARTPOLE_LSTM, CARTPOLE_LSTM_ALONE, CHEETAH)
    figures = []
    for setting in settings:
        say(setting.name)
        timed = _measure(setting, plan)
        *peers, floor = timed
        figures += with_ratios(timed) + [floor.over(peer) for peer in peers[1:]]
        jax.clear_caches()
    return Found(figures, settings)


def _measure(setting: Setting, plan: Plan) -> list[Figure]:
    peers = able_peers(plan.peers, setting)
    runners = {peer.name: peer.prepare(setting, seed=0) for peer in peers}
    runners[FLOOR] = floor_runner(setting)
    try:
        times = interleave(runners, plan.repeats, plan.seconds)
    finally:
        for runner in runners.values():
            runner.close()
    steps = {peer.name: peer.counts(setting).env_steps for peer in peers}
    steps[FLOOR] = setting.counts.env_steps
    return [
        Figure(
            suite=SUITE,
            setting=setting.name,
            subject=name,
            quantity=QUANTITY,
            unit="steps/s",
            better="neither" if name == FLOOR else "higher",
            values=tuple(steps[name] / seconds for seconds in values),
        )
        for name, values in times.items()
    ]


def floor_runner(setting: Setting) -> SuccessiveRunner:
    """What an iteration cannot do without, one after the other."""
    work = make_workload(setting)
    sizes = sizes_of(work.env)
    parts = [env_runner(work, jit(work.running_state)(jax.random.key(0)))]
    for part in PARTS:
        fn, args = product_floor(setting, sizes, part, jax.nn.swish, linear)
        parts.append(CallRunner(jit(fn), *args))
    return SuccessiveRunner(parts)


def with_ratios(figures: list[Figure]) -> list[Figure]:
    """The figures, and the first of them (usually this library's) over each of the others."""
    return figures + [figures[0].over(other) for other in figures[1:]]
