"""The sampler for what an environment takes: its kind, its bounds, and what is refused."""

import numpy as np
import pytest

from eqx_ppo.algorithms import make_sampler
from eqx_ppo.envs import ContinuousActions, DiscreteActions, MultiDiscreteActions
from eqx_ppo.envs._actions import action_size, continuous_actions
from eqx_ppo.networks import (
    AffineSampler,
    CategoricalSampler,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
)

INF = float("inf")


@pytest.mark.parametrize(
    ("actions", "kind", "n_inputs"),
    [
        (DiscreteActions(4), CategoricalSampler, 4),
        (MultiDiscreteActions((2, 3)), MultiCategoricalSampler, 5),
        (ContinuousActions((-1.0, -1.0), (1.0, 1.0)), NormalTanhSampler, 4),
        (ContinuousActions((-1.0, -2.0), (1.0, 1.0)), AffineSampler, 4),
        (ContinuousActions((-INF, -INF), (INF, INF)), NormalSampler, 2),
    ],
)
def test_the_kind(actions, kind, n_inputs):
    sampler = make_sampler(actions, entropy_weight=0.5)
    assert type(sampler) is kind
    assert sampler.entropy_weight == 0.5
    assert sampler.input_size(actions.size) == n_inputs


def test_the_bounds():
    low, high = make_sampler(ContinuousActions((-1.0, 0.0), (1.0, 5.0))).bounds
    assert (low.tolist(), high.tolist()) == ([-1.0, 0.0], [1.0, 5.0])


def test_what_has_no_sampler():
    with pytest.raises(ValueError, match=r"all have finite bounds.*AffineSampler.*Splitter"):
        make_sampler(ContinuousActions((-1.0, -INF), (1.0, INF)))
    with pytest.raises(TypeError, match=r"dictionary of `arm`, `hand`.*`Map`"):
        make_sampler({"arm": DiscreteActions(2), "hand": DiscreteActions(3)})


def test_sizes():
    actions = {
        "arm": ContinuousActions((0.0,) * 3, (1.0,) * 3),
        "hand": {"grip": DiscreteActions(5)},
    }
    assert action_size(actions) == {"arm": 3, "hand": {"grip": 1}}
    with pytest.raises(ValueError, match="got 1 and 2"):
        ContinuousActions((0.0,), (1.0, 2.0))


@pytest.mark.parametrize("bound", [0.1, 0.3, 2.0, 1.0 / 3.0, 1e-3, 1e38])
def test_bounds_are_rounded_to_the_inside(bound):
    """In float32, and by no more than that has to be."""
    actions = continuous_actions(-bound, np.array([bound, 2 * bound]), (2,))
    for low, high, limit in zip(actions.low, actions.high, (bound, 2 * bound), strict=True):
        assert low == np.float32(low)
        assert high == np.float32(high)
        assert -bound <= low <= -bound * (1 - 1.2e-7)
        assert limit * (1 - 1.2e-7) <= high <= limit


def test_a_box_is_flattened():
    actions = continuous_actions(np.array([[-1.0], [-2.0]]), 3.0, (2, 2))
    assert actions == ContinuousActions((-1.0, -1.0, -2.0, -2.0), (3.0,) * 4)
    assert continuous_actions(-INF, INF, (1,)) == ContinuousActions((-INF,), (INF,))
    assert not continuous_actions(-INF, 1.0, (1,)).is_bounded
