"""Environments of other libraries, each of which is imported only when it is used."""

from eqx_ppo.envs._adapters._brax import BraxEnv as BraxEnv, load_brax as load_brax
from eqx_ppo.envs._adapters._gymnasium import (
    GymnasiumEnv as GymnasiumEnv,
    HostReset as HostReset,
    load_gymnasium as load_gymnasium,
)
from eqx_ppo.envs._adapters._gymnax import GymnaxEnv as GymnaxEnv, load_gymnax as load_gymnax
