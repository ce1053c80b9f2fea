"""The sampler for the actions of an environment."""

from eqx_ppo._checks import typed
from eqx_ppo.envs import Actions, DiscreteActions, MultiDiscreteActions
from eqx_ppo.networks import (
    ActionSampler,
    AffineSampler,
    CategoricalSampler,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
)


@typed
def make_sampler(actions: Actions, *, entropy_weight: float = 1e-2) -> ActionSampler:
    """The sampler that draws the actions which an environment takes.

    | actions | sampler |
    |---|---|
    | `ContinuousActions` with bounds | `NormalTanhSampler`, in an `AffineSampler` |
    | `ContinuousActions` without any | `NormalSampler` |
    | `DiscreteActions` | `CategoricalSampler` |
    | `MultiDiscreteActions` | `MultiCategoricalSampler` |

    For a dictionary of actions take one for each of its entries, and put them into a `Map`.

    **Arguments:**

    - `actions`: what the environment's `actions` says.
    - `entropy_weight`: of the bonus for entropy.

    **Raises:** `TypeError` for a dictionary, `ValueError` for numbers of which only some are
    bounded.

    ```python
    >>> from eqx_ppo.algorithms import make_sampler
    >>> from eqx_ppo.envs import DiscreteActions
    >>> make_sampler(DiscreteActions(4)).input_size(1)
    4

    ```
    """
    if isinstance(actions, dict):
        raise TypeError(
            "`make_sampler` takes actions of one kind, but got a dictionary of "
            f"{', '.join(f'`{name}`' for name in actions)}. Take one sampler for each entry, and "
            "put them into a `Map`."
        )
    if isinstance(actions, DiscreteActions):
        return CategoricalSampler(actions.n, entropy_weight=entropy_weight)
    if isinstance(actions, MultiDiscreteActions):
        return MultiCategoricalSampler(actions.sizes, entropy_weight=entropy_weight)
    if actions.is_bounded:
        sampler = NormalTanhSampler(entropy_weight=entropy_weight)
        if set(actions.low) == {-1.0} and set(actions.high) == {1.0}:
            return sampler
        return AffineSampler(sampler, actions.low, actions.high)
    if set(actions.low) != {-float("inf")} or set(actions.high) != {float("inf")}:
        raise ValueError(
            "`make_sampler` takes numbers that all have finite bounds, or that have none, but got "
            f"the bounds {actions.low} and {actions.high}. Choose limits, and use "
            "`AffineSampler(NormalTanhSampler(...), low, high)`; or split the features by "
            "`Splitter`, and give each part its own sampler in a `Map`."
        )
    return NormalSampler(actions.size, entropy_weight=entropy_weight)
