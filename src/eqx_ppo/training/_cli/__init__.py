"""The command line, `eqx-ppo`."""

from eqx_ppo.training._cli._main import main as main
