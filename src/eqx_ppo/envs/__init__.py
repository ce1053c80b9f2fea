"""Environments: the protocol, wrappers, reset strategies and small environments.

An environment is written for *one* instance and never resets itself; the library
vectorizes it and replaces ended episodes.
"""

from eqx_ppo.envs._action_repeat import ActionRepeatWrapper as ActionRepeatWrapper
from eqx_ppo.envs._actions import (
    Actions as Actions,
    ContinuousActions as ContinuousActions,
    DiscreteActions as DiscreteActions,
    MultiDiscreteActions as MultiDiscreteActions,
)
from eqx_ppo.envs._adapters import (
    BraxEnv as BraxEnv,
    GymnasiumEnv as GymnasiumEnv,
    GymnaxEnv as GymnaxEnv,
    HostReset as HostReset,
    load_brax as load_brax,
    load_gymnasium as load_gymnasium,
    load_gymnax as load_gymnax,
)
from eqx_ppo.envs._batched import (
    BatchedEnv as BatchedEnv,
    EnvSpec as EnvSpec,
    PackedStates as PackedStates,
    env_spec as env_spec,
)
from eqx_ppo.envs._conformance import EnvReport as EnvReport, check_env as check_env
from eqx_ppo.envs._history import (
    FrameStackWrapper as FrameStackWrapper,
    ObservationDelayWrapper as ObservationDelayWrapper,
)
from eqx_ppo.envs._keep_info import KeepInfoWrapper as KeepInfoWrapper
from eqx_ppo.envs._pendulum import Pendulum as Pendulum
from eqx_ppo.envs._playground import (
    load_playground as load_playground,
    playground_names as playground_names,
)
from eqx_ppo.envs._probes import (
    ActionRewardProbe as ActionRewardProbe,
    ConstantRewardProbe as ConstantRewardProbe,
    DiscountProbe as DiscountProbe,
    ObservationActionProbe as ObservationActionProbe,
    ObservationRewardProbe as ObservationRewardProbe,
    TruncationProbe as TruncationProbe,
)
from eqx_ppo.envs._protocol import (
    Env as Env,
    EnvState as EnvState,
    SupportsCarryOver as SupportsCarryOver,
    SupportsStagger as SupportsStagger,
    TimeLimitWarning as TimeLimitWarning,
    episode_end as episode_end,
    read_done as read_done,
    read_truncation as read_truncation,
    warn_without_time_limit as warn_without_time_limit,
)
from eqx_ppo.envs._randomization import (
    DomainRandomizationWrapper as DomainRandomizationWrapper,
)
from eqx_ppo.envs._recall import Recall as Recall
from eqx_ppo.envs._render import (
    SupportsRender as SupportsRender,
    find_renderer as find_renderer,
)
from eqx_ppo.envs._resets import (
    CachedReset as CachedReset,
    FreshReset as FreshReset,
    PooledReset as PooledReset,
    ResetStrategy as ResetStrategy,
    SupportsOwnResets as SupportsOwnResets,
    own_resets as own_resets,
)
from eqx_ppo.envs._state import State as State
from eqx_ppo.envs._two_arms import TwoArms as TwoArms
from eqx_ppo.envs._wrappers import (
    EpisodeWrapper as EpisodeWrapper,
    RewardScalingWrapper as RewardScalingWrapper,
    Wrapper as Wrapper,
)
