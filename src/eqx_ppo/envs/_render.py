"""Pictures of environments: the protocol, and who draws what.

The convention is that of MuJoCo Playground: `render` takes a list of states of one
environment, and returns one picture of each. It runs on the host, outside compiled code.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from eqx_ppo import _typing
from eqx_ppo.envs._action_repeat import ActionRepeatWrapper
from eqx_ppo.envs._protocol import Env
from eqx_ppo.envs._wrappers import Wrapper


@runtime_checkable
class SupportsRender(Protocol):
    """An environment that can draw its states.

    - `dt`: seconds from one state to the next.
    """

    @property
    def dt(self) -> float:
        """Seconds from one state to the next."""
        ...

    def render(
        self,
        trajectory: list[_typing.EnvState],
        height: int = 240,
        width: int = 320,
        camera: str | None = None,
    ) -> Sequence[UInt8[np.ndarray, "height width 3"]]:
        """One RGB picture per state.

        **Arguments:**

        - `trajectory`: states of one environment, leaves without an env axis.
        - `height`, `width`: of a picture, in pixels.
        - `camera`: the name of a view, where the environment has several.
        """
        ...


def find_renderer(env: Env) -> tuple[SupportsRender, float]:
    """What draws the states of `env`: the innermost environment, below all wrappers.

    **Returns:** that environment, and the seconds that one action takes.

    **Raises:** `TypeError` if it cannot draw.
    """
    n_steps = 1
    while isinstance(env, Wrapper):
        if isinstance(env, ActionRepeatWrapper):
            n_steps *= env.repeats
        env = env.env
    if not isinstance(env, SupportsRender):
        raise TypeError(
            f"`{type(env).__name__}` cannot be drawn. Expected an environment with "
            "`render(trajectory, height, width, camera)` and `dt`, as those of MuJoCo Playground, "
            "`Pendulum` and `TwoArms` are."
        )
    return env, n_steps * env.dt
