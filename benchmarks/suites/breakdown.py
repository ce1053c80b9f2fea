"""Where the time of an iteration goes, part by part, and how near that is to the floor."""

from collections.abc import Mapping

import jax

from benchmarks import _handwritten
from benchmarks._environments import Sizes, sizes_of
from benchmarks._figures import Figure
from benchmarks._floors import PARTS, Part, product_floor
from benchmarks._handwritten import experience_shapes, make_experience
from benchmarks._parts import compile_loop, iteration_runner, jit, make_workload, part_runners
from benchmarks._settings import (
    CARTPOLE,
    CARTPOLE_64,
    CARTPOLE_LSTM,
    CARTPOLE_LSTM_ALONE,
    CHEETAH,
    Plan,
    Setting,
)
from benchmarks._timing import CallRunner, interleave
from benchmarks.peers import Runner
from benchmarks.peers.ours import EqxPPO
from benchmarks.suites import Found, say

SUITE = "breakdown"
SECONDS = "seconds per iteration"
SHARE = "floor / time"
SHARE_ACTIVE = "floor with activations / time"

BY_HAND = "update by hand"

# An iteration of a few milliseconds, beside which the host's part can be seen.
SHORT = Setting(env="Pendulum", n_envs=64, actor_sizes=(32, 32), critic_sizes=(32, 32))

_OURS = (
    "training",
    "iteration",
    "rollout",
    "policy forward",
    "bootstrap",
    "advantages",
    "update",
    "statistics",
)
_FLOORS: dict[str, tuple[Part, ...]] = {
    "rollout": ("rollout", "bootstrap"),
    "bootstrap": ("bootstrap",),
    "update": ("update",),
    "training": PARTS,
}
_WITH_ENV = ("rollout", "training")


def breakdown(plan: Plan) -> Found:
    """Times the parts of this library's iteration and the floors, in turns."""
    settings = plan.workloads(
        CARTPOLE, CARTPOLE_64, CARTPOLE_LSTM, CARTPOLE_LSTM_ALONE, CHEETAH, SHORT
    )
    figures = []
    for setting in settings:
        say(setting.name)
        runners = _runners(setting)
        try:
            figures += _figures(setting, interleave(runners, plan.repeats, plan.seconds))
        finally:
            for runner in runners.values():
                runner.close()
        jax.clear_caches()
    return Found(figures, settings)


def _runners(setting: Setting) -> dict[str, Runner]:
    work = make_workload(setting)
    sizes = sizes_of(work.env)
    floors = {}
    for part in PARTS:
        fn, args = product_floor(setting, sizes, part)
        floors[f"products: {part}"] = CallRunner(jit(fn), *args)
        fn, args = product_floor(setting, sizes, part, jax.nn.swish)
        floors[f"with activations: {part}"] = CallRunner(jit(fn), *args)
    if setting.network == "mlp":
        floors[BY_HAND] = _update_by_hand(setting, sizes)
    return {
        "training": EqxPPO().prepare(setting, seed=0),
        "iteration": iteration_runner(work, compile_loop(work)),
        **part_runners(work),
        **floors,
    }


def _update_by_hand(setting: Setting, sizes: Sizes) -> CallRunner:
    """What an update costs with everything in it but this library."""
    optimizer, update = _handwritten.make_update(setting)
    params = _handwritten.init(setting, sizes, jax.random.key(0))
    experience = make_experience(experience_shapes(setting, sizes))
    return CallRunner(jit(update), params, optimizer.init(params), experience, jax.random.key(1))


def _figures(setting: Setting, times: Mapping[str, tuple[float, ...]]) -> list[Figure]:
    """Seconds of every part, the host's share, and floors over times."""
    timed = {
        name: Figure(
            suite=SUITE,
            setting=setting.name,
            subject=name,
            quantity=SECONDS,
            unit="s",
            better="lower" if name in _OURS else "neither",
            values=values,
        )
        for name, values in times.items()
    }
    pairs = zip(times["training"], times["iteration"], strict=True)
    host = timed["training"]._replace(
        subject="host",
        better="neither",  # a difference of two timings, around 0
        values=tuple(whole - compiled for whole, compiled in pairs),
    )
    return [*timed.values(), host, *_shares(timed, times)]


def _shares(timed: Mapping[str, Figure], times: Mapping[str, tuple[float, ...]]) -> list[Figure]:
    """Both floors of every part over its time."""
    found = []
    for quantity, label in ((SHARE, "products"), (SHARE_ACTIVE, "with activations")):
        for name, parts in _FLOORS.items():
            products = [f"{label}: {part}" for part in parts]
            floors = ["env", *products] if name in _WITH_ENV else products
            rows = zip(*(times[each] for each in floors), times[name], strict=True)
            values = tuple(sum(floor) / whole for *floor, whole in rows)
            found.append(
                timed[name]._replace(quantity=quantity, unit="x", better="higher", values=values)
            )
    return found
