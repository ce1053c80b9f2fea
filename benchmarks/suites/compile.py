"""Seconds until the first iteration is done, in fresh processes without a compilation cache."""

from benchmarks._figures import Figure
from benchmarks._process import Outcome, in_fresh_process
from benchmarks._settings import CARTPOLE, CHEETAH, Plan, Setting
from benchmarks.peers import able_peers
from benchmarks.suites import Found, say
from benchmarks.suites.throughput import with_ratios

SUITE = "compile"
FIRST = "seconds to the first iteration"
LOAD = "seconds to import and load"

_MOST_REPEATS = 3  # a process takes a minute or so


def compile_time(plan: Plan) -> Found:
    """Peers take turns, one process each."""
    settings = plan.workloads(CARTPOLE, CHEETAH)
    figures = []
    for setting in settings:
        names = [peer.name for peer in able_peers(plan.peers, setting)]
        outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        for repeat in range(min(plan.repeats, _MOST_REPEATS)):
            for name in names:
                say(f"{setting.name}, {name}, process {repeat + 1}")
                outcomes[name].append(in_fresh_process(name, setting))
        first = [
            _figure(setting, name, FIRST, [one.first_seconds for one in found])
            for name, found in outcomes.items()
        ]
        load = [
            _figure(setting, name, LOAD, [one.load_seconds for one in found])
            for name, found in outcomes.items()
        ]
        figures += with_ratios(first) + load
    return Found(figures, settings)


def _figure(setting: Setting, name: str, quantity: str, values: list[float]) -> Figure:
    return Figure(
        suite=SUITE,
        setting=setting.name,
        subject=name,
        quantity=quantity,
        unit="s",
        better="lower" if quantity == FIRST else "neither",
        values=tuple(values),
    )
