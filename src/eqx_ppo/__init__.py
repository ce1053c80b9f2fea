"""eqx-ppo: PPO for stateful networks, as pure functions over immutable Equinox modules.

The names of the quick start; everything else is in `eqx_ppo.networks`, `eqx_ppo.envs`,
`eqx_ppo.algorithms`, `eqx_ppo.training` and `eqx_ppo.ops`.
"""

from importlib.metadata import version as _version

from eqx_ppo._report import ContractError as ContractError, Finding as Finding
from eqx_ppo.algorithms import (
    EvalConfig as EvalConfig,
    LoggingLevel as LoggingLevel,
    PPOConfig as PPOConfig,
    TrainingState as TrainingState,
    eval_rollout as eval_rollout,
    make_policy as make_policy,
    new_training_state as new_training_state,
    ppo_step as ppo_step,
)
from eqx_ppo.envs import (
    EpisodeWrapper as EpisodeWrapper,
    check_env as check_env,
    load_playground as load_playground,
)
from eqx_ppo.networks import (
    check_module as check_module,
    make_mlp_actor_critic as make_mlp_actor_critic,
    make_recurrent_actor_critic as make_recurrent_actor_critic,
    summarize as summarize,
)
from eqx_ppo.training import (
    TrainConfig as TrainConfig,
    TrainResult as TrainResult,
    compiler_options as compiler_options,
    export_policy as export_policy,
    train_ppo as train_ppo,
)

__version__ = _version("eqx-ppo")
