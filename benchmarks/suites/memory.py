"""Bytes: of the compiled update and iteration, and of whole processes."""

import dataclasses
import math

import jax

from benchmarks import _handwritten
from benchmarks._environments import Sizes, sizes_of
from benchmarks._figures import Figure
from benchmarks._memory import compiled_bytes, needed_bytes
from benchmarks._parts import Workload, make_workload
from benchmarks._process import in_fresh_process
from benchmarks._settings import LARGE, Plan, Setting
from benchmarks.peers import able_peers
from benchmarks.suites import Found, say

SUITE = "memory"
TEMPORARIES = "temporaries of XLA"
TOTAL = "arguments, results and temporaries of XLA"
NEEDED = "must be held"
PEAK = "peak resident size of the process"
GROWTH = "peak resident size minus that before training"
DEVICE = "peak on the device"

UPDATE = "eqx-ppo update"
ITERATION = "eqx-ppo iteration"
IN_PARTS = "eqx-ppo iteration, replay in parts"
BY_HAND = "handwritten update"


def memory(plan: Plan) -> Found:
    """Compiles without running for XLA's account, then runs each peer in its process."""
    settings = plan.workloads(LARGE)
    figures = []
    for setting in settings:
        say(f"{setting.name}, compiled functions")
        work = make_workload(setting)
        figures += _compiled(work, sizes_of(work.env))
        jax.clear_caches()
        for peer in able_peers(plan.peers, setting):
            say(f"{setting.name}, {peer.name}")
            figures += _process(setting, peer.name)
    return Found([*figures, *_ratios(figures)], settings)


def _compiled(work: Workload, sizes: Sizes) -> list[Figure]:
    """Of this library's update and iteration, and of the update written by hand."""
    setting = work.setting
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(work.new_state, key)
    rollout = jax.eval_shape(work.collect, state, key)
    in_parts = work._replace(config=dataclasses.replace(work.config, replay_chunks=_parts(setting)))
    found = {
        UPDATE: compiled_bytes(work.update, state, rollout, key),
        ITERATION: compiled_bytes(work.step, state, donate=(0,)),
        IN_PARTS: compiled_bytes(in_parts.step, state, donate=(0,)),
    }
    if setting.network == "mlp":
        optimizer, update = _handwritten.make_update(setting)
        params = jax.eval_shape(lambda one: _handwritten.init(setting, sizes, one), key)
        found[BY_HAND] = compiled_bytes(
            update,
            params,
            jax.eval_shape(optimizer.init, params),
            _handwritten.experience_shapes(setting, sizes),
            key,
        )
    figures = []
    for name, account in found.items():
        figures.append(_figure(setting, name, TEMPORARIES, account.temporaries))
        figures.append(_figure(setting, name, TOTAL, account.total))
    return figures + (_needed(setting, sizes) if setting.network == "mlp" else [])


def _needed(setting: Setting, sizes: Sizes) -> list[Figure]:
    needed = needed_bytes(setting, sizes)
    parts = {**needed._asdict(), "total": needed.total}
    return [
        _figure(setting, name, NEEDED, value)._replace(better="neither")
        for name, value in parts.items()
    ]


def _parts(setting: Setting) -> int:
    """Into how many parts to cut the replay of a minibatch: 8 where that divides it."""
    return math.gcd(8, setting.n_envs // setting.n_minibatches)


def _process(setting: Setting, name: str) -> list[Figure]:
    outcome = in_fresh_process(name, setting)
    growth = outcome.resident_peak - outcome.resident_before
    figures = [
        _figure(setting, name, PEAK, outcome.resident_peak),
        _figure(setting, name, GROWTH, growth),
    ]
    if outcome.device_peak is not None:
        figures.append(_figure(setting, name, DEVICE, outcome.device_peak))
    return figures


def _ratios(figures: list[Figure]) -> list[Figure]:
    """This library over what it is measured against, where both are there."""
    wanted = [
        (TEMPORARIES, UPDATE, TEMPORARIES, BY_HAND),
        (TOTAL, UPDATE, TOTAL, BY_HAND),
        (TOTAL, ITERATION, NEEDED, "total"),
        (TOTAL, IN_PARTS, NEEDED, "total"),
        (PEAK, "eqx-ppo", PEAK, "nnx-ppo"),
        (PEAK, "eqx-ppo", PEAK, "brax"),
    ]
    found = {(figure.setting, figure.quantity, figure.subject): figure for figure in figures}
    ratios = []
    for setting in dict.fromkeys(figure.setting for figure in figures):
        for quantity, subject, other_quantity, other in wanted:
            pair = (
                found.get((setting, quantity, subject)),
                found.get((setting, other_quantity, other)),
            )
            if pair[0] is not None and pair[1] is not None:
                ratios.append(pair[0].over(pair[1]))
    return ratios


def _figure(setting: Setting, subject: str, quantity: str, value: int) -> Figure:
    return Figure(
        suite=SUITE,
        setting=setting.name,
        subject=subject,
        quantity=quantity,
        unit="bytes",
        better="lower",
        values=(float(value),),
    )
