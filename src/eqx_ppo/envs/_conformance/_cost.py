"""What a reset costs. The one place outside of training that looks at a clock."""

import time
from collections.abc import Callable

import jax

from eqx_ppo._typing import Tree
from eqx_ppo.envs._conformance._trial import Trial

_REPEATS = 5


def reset_cost(trial: Trial) -> float:
    """How many steps a reset takes the time of, both compiled, for the batch of the trial."""
    actions = trial.actions(0)
    reset = _seconds(lambda: trial.reset_all(trial.keys))
    step = _seconds(lambda: trial.step_all(trial.middle, actions))
    return reset / step


def _seconds(run: Callable[[], Tree]) -> float:
    """The shortest of a few calls."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)
