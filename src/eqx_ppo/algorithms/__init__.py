"""PPO as pure functions: the environment step, rollout, replay, evaluation and update."""

from eqx_ppo.algorithms._config import (
    EvalConfig as EvalConfig,
    LoggingLevel as LoggingLevel,
    PPOConfig as PPOConfig,
)
from eqx_ppo.algorithms._evaluation import (
    EvalResult as EvalResult,
    eval_rollout as eval_rollout,
    evaluate as evaluate,
)
from eqx_ppo.algorithms._loss import Minibatch as Minibatch, ppo_loss as ppo_loss
from eqx_ppo.algorithms._make_sampler import make_sampler as make_sampler
from eqx_ppo.algorithms._optimizer import make_optimizer as make_optimizer
from eqx_ppo.algorithms._policy import (
    Policy as Policy,
    PolicyCarry as PolicyCarry,
    make_policy as make_policy,
)
from eqx_ppo.algorithms._ppo import ppo_step as ppo_step
from eqx_ppo.algorithms._recording import (
    Recording as Recording,
    record_rollout as record_rollout,
)
from eqx_ppo.algorithms._replay import replay as replay, replay_error as replay_error
from eqx_ppo.algorithms._rollout import unroll_env as unroll_env
from eqx_ppo.algorithms._training_state import (
    Counts as Counts,
    Remainder as Remainder,
    TrainingState as TrainingState,
    join_network as join_network,
    new_training_state as new_training_state,
    restart_episodes as restart_episodes,
    split_network as split_network,
)
from eqx_ppo.algorithms._transition import (
    RolloutState as RolloutState,
    Transition as Transition,
)
