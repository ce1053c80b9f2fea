"""Environment steps per second of whole training iterations, side by side."""

import jax

from benchmarks._figures import Figure
from benchmarks._settings import (
    CARTPOLE,
    CARTPOLE_64,
    CARTPOLE_LSTM,
    CARTPOLE_LSTM_ALONE,
    CHEETAH,
    Plan,
    Setting,
)
from benchmarks._timing import interleave
from benchmarks.peers import able_peers
from benchmarks.suites import Found, say

SUITE = "throughput"
QUANTITY = "steps per second"


def throughput(plan: Plan) -> Found:
    """Each peer trains; all take turns in one process."""
    settings = plan.workloads(CARTPOLE, CARTPOLE_64, CARTPOLE_LSTM, CARTPOLE_LSTM_ALONE, CHEETAH)
    figures = []
    for setting in settings:
        say(setting.name)
        figures += with_ratios(_measure(setting, plan))
        jax.clear_caches()
    return Found(figures, settings)


def _measure(setting: Setting, plan: Plan) -> list[Figure]:
    peers = able_peers(plan.peers, setting)
    runners = {peer.name: peer.prepare(setting, seed=0) for peer in peers}
    try:
        times = interleave(runners, plan.repeats, plan.seconds)
    finally:
        for runner in runners.values():
            runner.close()
    steps = {peer.name: peer.counts(setting).env_steps for peer in peers}
    return [
        Figure(
            suite=SUITE,
            setting=setting.name,
            subject=name,
            quantity=QUANTITY,
            unit="steps/s",
            better="higher",
            values=tuple(steps[name] / seconds for seconds in values),
        )
        for name, values in times.items()
    ]


def with_ratios(figures: list[Figure]) -> list[Figure]:
    """The figures, and the first of them (this library's) over each of the others."""
    return figures + [figures[0].over(other) for other in figures[1:]]
