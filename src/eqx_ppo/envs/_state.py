"""The state record of the environments that ship with the library."""

from typing import Self, final

import equinox as eqx

from eqx_ppo import _tree
from eqx_ppo._typing import Tree


@final
class State(eqx.Module):
    """The state of one environment; see `eqx_ppo.envs.EnvState` for the convention.

    **Arguments:**

    - `obs`: the observation, a pytree of arrays.
    - `reward`: a scalar, or a pytree of scalars.
    - `done`: a scalar, nonzero where the episode ended.
    - `info`: a dictionary of arrays; may hold the flag `"truncation"`.
    - `metrics`: a dictionary of arrays to be logged.
    - `data`: the environment's own variables, any pytree.

    ```python
    >>> import jax.numpy as jnp
    >>> from eqx_ppo.envs import State
    >>> state = State(jnp.zeros(2), jnp.zeros(()), jnp.array(False), {}, {})
    >>> bool(state.replace(done=jnp.array(True)).done), bool(state.done)
    (True, False)

    ```
    """

    obs: Tree
    reward: Tree
    done: Tree
    info: dict[str, Tree]
    metrics: dict[str, Tree]
    data: Tree = None

    def replace(self, **changes: Tree) -> Self:
        """Returns a copy with some fields changed.

        **Raises:** `TypeError` for a field that does not exist.
        """
        return _tree.replace(self, **changes)
