"""The host side: the training loop, its configuration, presets and its progress line."""

from eqx_ppo.training._config import TrainConfig as TrainConfig
from eqx_ppo.training._preset import Preset as Preset
from eqx_ppo.training._presets import load_preset as load_preset, preset_names as preset_names
from eqx_ppo.training._train import (
    CheckpointFn as CheckpointFn,
    LogFn as LogFn,
    TrainResult as TrainResult,
    train_ppo as train_ppo,
)
