"""Configuration of a whole training run."""

import dataclasses
from typing import final

from eqx_ppo.algorithms import EvalConfig, PPOConfig


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Parameters of `train_ppo`.

    **Arguments:**

    - `ppo`: of the algorithm.
    - `eval`: of the evaluations during training.
    - `seed`: of all randomness of the run; the same seed gives the same run, bit for bit.
    - `checkpoint_every_steps`: call `checkpoint_fn` when training has passed another
        multiple of this many environment steps (and at the end).
    - `console`: whether to print a line per evaluation.
    """

    ppo: PPOConfig = dataclasses.field(default_factory=PPOConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    seed: int = 17
    checkpoint_every_steps: int = 500_000
    console: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"`TrainConfig.seed` must be an int of at least 0, got {self.seed!r}.")
        if self.checkpoint_every_steps < 1:
            raise ValueError(
                "`TrainConfig.checkpoint_every_steps` must be at least 1, but got "
                f"{self.checkpoint_every_steps!r}."
            )
