"""The host side: the training loop, its configuration, presets and its progress line."""

from eqx_ppo.training._checkpoint import (
    Checkpointer as Checkpointer,
    CheckpointError as CheckpointError,
    CheckpointMetadata as CheckpointMetadata,
    DamagedCheckpointError as DamagedCheckpointError,
    RunRecord as RunRecord,
    StructureMismatchError as StructureMismatchError,
    restore_network as restore_network,
)
from eqx_ppo.training._compiler_options import compiler_options as compiler_options
from eqx_ppo.training._config import TrainConfig as TrainConfig
from eqx_ppo.training._config_json import (
    config_from_json as config_from_json,
    config_to_json as config_to_json,
)
from eqx_ppo.training._console import ConsoleSink as ConsoleSink
from eqx_ppo.training._environments import EnvConfig as EnvConfig
from eqx_ppo.training._export import (
    export_onnx as export_onnx,
    export_policy as export_policy,
)
from eqx_ppo.training._loop import (
    CheckpointFn as CheckpointFn,
    LogFn as LogFn,
    TrainResult as TrainResult,
)
from eqx_ppo.training._network_config import NetworkConfig as NetworkConfig
from eqx_ppo.training._plots import (
    LearningCurves as LearningCurves,
    plot_learning_curves as plot_learning_curves,
)
from eqx_ppo.training._preset import Preset as Preset
from eqx_ppo.training._presets import load_preset as load_preset, preset_names as preset_names
from eqx_ppo.training._run_config import (
    RunConfig as RunConfig,
    default_run_config as default_run_config,
)
from eqx_ppo.training._run_folder import LoadedPolicy as LoadedPolicy, RunFolder as RunFolder
from eqx_ppo.training._sinks import (
    CSVSink as CSVSink,
    JSONLinesSink as JSONLinesSink,
    RunInfo as RunInfo,
    Sink as Sink,
    SinkGroup as SinkGroup,
    TensorBoardSink as TensorBoardSink,
    WandbSink as WandbSink,
    read_metrics as read_metrics,
)
from eqx_ppo.training._stops import (
    TrainingDivergedError as TrainingDivergedError,
    TrainingInterrupted as TrainingInterrupted,
)
from eqx_ppo.training._train import train_ppo as train_ppo
from eqx_ppo.training._video import (
    Video as Video,
    VideoConfig as VideoConfig,
    VideoRecorder as VideoRecorder,
    record_video as record_video,
)
