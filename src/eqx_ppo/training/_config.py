"""Configuration of a whole training run."""

import dataclasses
from typing import final

import numpy as np

from eqx_ppo.algorithms import EvalConfig, PPOConfig


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Parameters of `train_ppo`.

    **Arguments:**

    - `ppo`: of the algorithm.
    - `eval`: of the evaluations during training.
    - `seed`: of all randomness of the run, at least 0 and below 2**32; the same seed gives the
        same run, bit for bit.
    - `checkpoint_every_steps`: save when training has passed another multiple of this many
        environment steps, and at the end. That is, hand the state to the `checkpointer` and
        the `checkpoint_fn` of `train_ppo`, if it has them.
    - `console`: whether to print how it goes.
    - `max_invalid_share`, `invalid_window`: stop, after saving, when more than this share of
        the environment steps of this many iterations was invalid, that is, left an environment
        non-finite. A share of 1 never stops.
    """

    ppo: PPOConfig = dataclasses.field(default_factory=PPOConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    seed: int = 17
    checkpoint_every_steps: int = 500_000
    console: bool = True
    max_invalid_share: float = 0.5
    invalid_window: int = 10

    def __post_init__(self) -> None:
        for name, kind in (("ppo", PPOConfig), ("eval", EvalConfig)):
            value = vars(self)[name]
            if not isinstance(value, kind):
                raise TypeError(
                    f"`TrainConfig.{name}` must be a `{kind.__name__}`, but got "
                    f"`{type(value).__name__}`."
                )
        for name, at_least in (("seed", 0), ("checkpoint_every_steps", 1), ("invalid_window", 1)):
            value = vars(self)[name]
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"`TrainConfig.{name}` must be an int, but got `{value!r}`.")
            if value < at_least:
                raise ValueError(
                    f"`TrainConfig.{name}` must be at least {at_least}, but got {value}."
                )
        if self.seed >= 2**32:  # a key is made of 32 bits, so larger ones would not be told apart
            raise ValueError(f"`TrainConfig.seed` must be below 2**32, but got {self.seed}.")
        share = self.max_invalid_share
        if isinstance(share, bool) or not isinstance(share, int | float | np.number):
            raise TypeError(f"`TrainConfig.max_invalid_share` must be a number, but got {share!r}.")
        if not 0.0 <= share <= 1.0:
            raise ValueError(
                f"`TrainConfig.max_invalid_share` must be in [0, 1], but got {share!r}."
            )
