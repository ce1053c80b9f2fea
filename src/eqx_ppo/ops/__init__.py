"""Pure functions on arrays: the mathematics of PPO, without modules or environments."""

from eqx_ppo.ops._beta import (
    beta_entropy as beta_entropy,
    beta_log_likelihood as beta_log_likelihood,
    beta_mode as beta_mode,
)
from eqx_ppo.ops._bounded_softplus import (
    bounded_softplus as bounded_softplus,
    inverse_bounded_softplus as inverse_bounded_softplus,
)
from eqx_ppo.ops._categorical import (
    IMPOSSIBLE as IMPOSSIBLE,
    categorical_entropy as categorical_entropy,
    categorical_log_likelihood as categorical_log_likelihood,
    masked_log_probabilities as masked_log_probabilities,
)
from eqx_ppo.ops._counter import (
    Counter as Counter,
    add_count as add_count,
    count_as_float as count_as_float,
    new_counter as new_counter,
)
from eqx_ppo.ops._gae import gae as gae
from eqx_ppo.ops._gru import gru_sequence as gru_sequence, gru_step as gru_step
from eqx_ppo.ops._linear import add_bias as add_bias, linear as linear
from eqx_ppo.ops._losses import (
    AdvantageNormalization as AdvantageNormalization,
    clipped_surrogate as clipped_surrogate,
    likelihood_ratio as likelihood_ratio,
    masked_mean as masked_mean,
    normalize_advantages as normalize_advantages,
    squared_value_error as squared_value_error,
)
from eqx_ppo.ops._lstm import lstm_sequence as lstm_sequence, lstm_step as lstm_step
from eqx_ppo.ops._moments import (
    Moments as Moments,
    merge_moments as merge_moments,
    new_moments as new_moments,
)
from eqx_ppo.ops._normal import (
    normal_entropy as normal_entropy,
    normal_log_likelihood as normal_log_likelihood,
)
from eqx_ppo.ops._tanh_normal import (
    tanh_log_det as tanh_log_det,
    tanh_normal_entropy as tanh_normal_entropy,
    tanh_normal_log_likelihood as tanh_normal_log_likelihood,
    tanh_normal_mode as tanh_normal_mode,
)
