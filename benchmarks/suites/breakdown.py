"""Where the time of an iteration goes, part by part, and how near that is to the floor."""

from collections.abc import Mapping

import jax

from benchmarks import _handwritten
from benchmarks._environments import Sizes, sizes_of
from benchmarks._figures import Figure
from benchmarks._floors import PARTS, product_floor
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
_FLOORS = {
    "rollout": ("env", "products: rollout", "products: bootstrap"),
    "bootstrap": ("products: bootstrap",),
    "update": ("products: update",),
    "training": ("env", *(f"products: {part}" for part in PARTS)),
}


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
    shares = [
        timed[name]._replace(
            quantity=SHARE,
            unit="x",
            better="higher",
            values=tuple(
                sum(floor) / whole
                for *floor, whole in zip(*(times[part] for part in parts), times[name], strict=True)
            ),
        )
        for name, parts in _FLOORS.items()
    ]
    return [*timed.values(), host, *shares]
