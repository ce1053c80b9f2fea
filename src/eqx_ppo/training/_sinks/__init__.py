"""Sinks: where the metrics of a run go."""

from eqx_ppo.training._sinks._csv import CSVSink as CSVSink
from eqx_ppo.training._sinks._group import SinkGroup as SinkGroup
from eqx_ppo.training._sinks._jsonl import JSONLinesSink as JSONLinesSink
from eqx_ppo.training._sinks._read import read_metrics as read_metrics
from eqx_ppo.training._sinks._sink import RunInfo as RunInfo, Sink as Sink
from eqx_ppo.training._sinks._tensorboard import TensorBoardSink as TensorBoardSink
from eqx_ppo.training._sinks._wandb import WandbSink as WandbSink
