"""The host side: the training loop, its configuration and its progress line."""

from eqx_ppo.training._config import TrainConfig as TrainConfig
from eqx_ppo.training._train import (
    CheckpointFn as CheckpointFn,
    LogFn as LogFn,
    TrainResult as TrainResult,
    train_ppo as train_ppo,
)
