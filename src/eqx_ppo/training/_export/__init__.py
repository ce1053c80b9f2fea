"""Trained policies for the world outside: functions and files that need no library."""

from eqx_ppo.training._export._jax import export_policy as export_policy
from eqx_ppo.training._export._onnx import export_onnx as export_onnx
