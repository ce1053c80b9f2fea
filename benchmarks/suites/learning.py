"""Return against steps and seconds, over several seeds."""

import dataclasses

import jax

from benchmarks._figures import Figure
from benchmarks._settings import CARTPOLE, CARTPOLE_LSTM_ALONE, Plan, Setting
from benchmarks.peers import Evaluation, Point, able_peers
from benchmarks.suites import Found, say

SUITE = "learning"
RETURN = "return"
SECONDS = "seconds"

_EVALUATIONS = 10

_TUNED = dataclasses.replace(CARTPOLE, learning_rate=1e-3)
_RECALL = dataclasses.replace(
    CARTPOLE_LSTM_ALONE, env="Recall", learning_rate=1e-3, episode_length=20
)  # learned in so few iterations that the first policy counts
SETTINGS = (
    _TUNED,
    dataclasses.replace(_TUNED, env="CartpoleSwingup"),
    dataclasses.replace(_TUNED, env="PendulumSwingup"),
    _RECALL,
    dataclasses.replace(_RECALL, begin_alike=True),
)


def learning(plan: Plan) -> Found:
    """Every peer and seed trains from scratch; a figure holds one value per seed."""
    settings = plan.workloads(*SETTINGS)
    total = 640 if plan.quick else plan.total_steps
    figures = []
    for setting in settings:
        evaluation = Evaluation(every_steps=max(1, total // _EVALUATIONS))
        for peer in able_peers(plan.peers, setting):
            runs = []
            for seed in range(plan.seeds):
                say(f"{setting.name}, {peer.name}, seed {seed}")
                runs.append(peer.learn(setting, seed, total, evaluation))
                jax.clear_caches()
            figures += _figures(setting, peer.name, runs)
    return Found(figures, settings)


def _figures(setting: Setting, name: str, runs: list[list[Point]]) -> list[Figure]:
    """The return and the time at each evaluation; all seeds evaluate at the same steps."""
    figures = []
    for points in zip(*runs, strict=True):
        at = float(points[0].steps)
        returns = tuple(point.mean_return for point in points)
        seconds = tuple(point.seconds for point in points)
        figures += [
            Figure(SUITE, setting.name, name, RETURN, "", "higher", returns, at),
            Figure(SUITE, setting.name, name, SECONDS, "s", "lower", seconds, at),
        ]
    return figures
