"""What the host's loop and its callbacks add to an iteration of some ten milliseconds."""

import jax

from benchmarks._figures import Figure, median_interval
from benchmarks._parts import compile_loop, iteration_runner, make_workload
from benchmarks._settings import Plan, Setting
from benchmarks._timing import interleave
from benchmarks.peers.ours import EqxPPO
from benchmarks.suites import Found, say

SUITE = "host"
SECONDS = "seconds per iteration"
RATIO = "time with the host's loop"
INTERVAL = "the same, 95 % interval of the median"

# An iteration takes about 15 ms on two cores.
SETTING = Setting(env="Pendulum", actor_sizes=(64, 64), critic_sizes=(64, 64))

_TURNS = 60  # per repeat of the plan: a difference of 2 % drowns in the noise of a few
_SECONDS_SHARE = 0.5  # of the plan's seconds


def host(plan: Plan) -> Found:
    """Training as users run it and the same iterations in one compiled loop, in many turns."""
    settings = plan.workloads(SETTING)
    turns = 2 if plan.quick else _TURNS * plan.repeats
    figures = []
    for setting in settings:
        say(f"{setting.name}, {turns} turns")
        figures += _measure(setting, turns, _SECONDS_SHARE * plan.seconds)
        jax.clear_caches()
    return Found(figures, settings)


def _measure(setting: Setting, turns: int, seconds: float) -> list[Figure]:
    work = make_workload(setting)
    runners = {
        "training": EqxPPO().prepare(setting, seed=0),
        "compiled loop": iteration_runner(work, compile_loop(work)),
    }
    try:
        times = interleave(runners, turns, seconds)
    finally:
        for runner in runners.values():
            runner.close()
    training, loop = (
        Figure(SUITE, setting.name, name, SECONDS, "s", "lower", values)
        for name, values in times.items()
    )
    ratio = training.over(loop)._replace(quantity=RATIO)
    interval = ratio._replace(
        quantity=INTERVAL, better="neither", values=median_interval(ratio.values)
    )
    return [training, loop, ratio, interval]
