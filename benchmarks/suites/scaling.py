"""How time and memory of this library's iteration grow with the size of the work."""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from benchmarks._figures import Figure, fit_line
from benchmarks._memory import bytes_of
from benchmarks._parts import compile_loop, iteration_runner, make_workload
from benchmarks._settings import Plan, Setting, setting_for
from benchmarks._timing import interleave
from benchmarks.peers import Runner
from benchmarks.suites import Found, say

SUITE = "scaling"
SECONDS = "seconds per iteration"
TEMPORARIES = "temporaries of XLA"
COMPILE = "seconds to trace and compile"
ERROR = "largest deviation from a line"

FACTORS = (1, 4, 16)


class Axis(NamedTuple):
    """One direction in which the work grows: `grow(setting, factor)`; `size` names it."""

    name: str
    grow: Callable[[Setting, int], Setting]
    size: Callable[[Setting], int]


AXES = (
    Axis(
        "environments",
        lambda setting, factor: dataclasses.replace(setting, n_envs=factor * setting.n_envs),
        lambda setting: setting.n_envs,
    ),
    Axis(
        "rollout length",
        lambda setting, factor: dataclasses.replace(
            setting, rollout_length=factor * setting.rollout_length
        ),
        lambda setting: setting.rollout_length,
    ),
    Axis(
        "width of the actor",
        lambda setting, factor: dataclasses.replace(
            setting, actor_sizes=tuple(factor * size for size in setting.actor_sizes)
        ),
        lambda setting: setting.actor_sizes[0],
    ),
    Axis(
        "modules in the actor",
        lambda setting, factor: dataclasses.replace(
            setting, actor_sizes=setting.actor_sizes[:1] * (4 * factor)
        ),
        lambda setting: len(setting.actor_sizes),
    ),
)


def scaling(plan: Plan) -> Found:
    """Grows one size at a time by 4 and by 16, from 64 environments and 20 steps."""
    bases = plan.workloads(dataclasses.replace(setting_for("CartpoleBalance"), n_envs=64))
    figures = []
    for base in bases:
        for axis in AXES:
            say(f"{base.name}, {axis.name}")
            grown = [axis.grow(base, factor) for factor in FACTORS]
            figures += _measure(base, axis, grown, plan)
            jax.clear_caches()
    return Found(figures, bases)


def _measure(base: Setting, axis: Axis, grown: list[Setting], plan: Plan) -> list[Figure]:
    runners: dict[int, Runner] = {}
    compile_seconds, temporaries = [], []
    for setting in grown:
        work = make_workload(setting)
        start = time.perf_counter()
        loop = compile_loop(work)
        compile_seconds.append(time.perf_counter() - start)
        temporaries.append(bytes_of(loop).temporaries)
        runners[axis.size(setting)] = iteration_runner(work, loop)
    times = interleave(
        {str(size): run for size, run in runners.items()}, plan.repeats, plan.seconds
    )
    sizes = tuple(runners)
    for runner in runners.values():
        runner.close()
    figures = []
    for index, size in enumerate(sizes):
        figures += [
            _figure(base, axis, SECONDS, "s", times[str(size)], size),
            _figure(base, axis, TEMPORARIES, "bytes", (float(temporaries[index]),), size),
            _figure(base, axis, COMPILE, "s", (compile_seconds[index],), size),
        ]
    return figures + [_fit(base, axis, quantity, figures) for quantity in (SECONDS, TEMPORARIES)]


def _figure(
    base: Setting, axis: Axis, quantity: str, unit: str, values: tuple[float, ...], size: int
) -> Figure:
    better = "neither" if quantity == COMPILE else "lower"  # a cache may be in use
    return Figure(SUITE, base.name, axis.name, quantity, unit, better, values, at=float(size))


def _fit(base: Setting, axis: Axis, quantity: str, figures: list[Figure]) -> Figure:
    """How far the points are from a straight line, as a fraction."""
    points = [figure for figure in figures if figure.quantity == quantity]
    xs = tuple(figure.at for figure in points if figure.at is not None)
    line = fit_line(xs, tuple(figure.median for figure in points))
    name = f"{ERROR}: {quantity}"
    return Figure(SUITE, base.name, axis.name, name, "", "neither", (line.error,))
