"""Progress on the terminal: one line per evaluation."""

import time
from typing import final

from eqx_ppo._typing import Metrics


@final
class Console:
    """Prints how training goes."""

    def __init__(self, total_steps: int):
        """**Arguments:**

        - `total_steps`: of the whole run, for the share that is done.
        """
        self.rate: float | None = None
        self._total_steps = total_steps
        self._started = time.perf_counter()

    def evaluation(self, steps: int, metrics: Metrics) -> None:
        """Prints the outcome of an evaluation after `steps` environment steps."""
        share = min(100.0, 100.0 * steps / max(self._total_steps, 1))
        rate = "" if self.rate is None else f"  {self.rate:>9,.0f} steps/s"
        elapsed = time.perf_counter() - self._started
        print(
            f"{steps:>12,} steps ({share:3.0f} %)  "
            f"return {metrics['eval/episode_reward/mean']:>9.2f} "
            f"+- {metrics['eval/episode_reward/std']:.2f}  "
            f"length {metrics['eval/lifespan/mean']:>7.1f}{rate}  {elapsed:6.1f} s",
            flush=True,
        )
