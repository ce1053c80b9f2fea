"""Action samplers: from distribution parameters to an action and its log-likelihood."""

from eqx_ppo.networks._samplers._affine import AffineSampler as AffineSampler
from eqx_ppo.networks._samplers._beta import BetaSampler as BetaSampler
from eqx_ppo.networks._samplers._categorical import (
    CategoricalSampler as CategoricalSampler,
    MaskedLogits as MaskedLogits,
    MultiCategoricalSampler as MultiCategoricalSampler,
)
from eqx_ppo.networks._samplers._normal import NormalSampler as NormalSampler
from eqx_ppo.networks._samplers._sampler import (
    ActionDistribution as ActionDistribution,
    ActionSampler as ActionSampler,
    Sample as Sample,
)
from eqx_ppo.networks._samplers._tanh_normal import NormalTanhSampler as NormalTanhSampler
