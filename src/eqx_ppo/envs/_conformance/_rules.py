"""The rules in the order in which they are tested, and what each of them presupposes."""

from eqx_ppo._rules import Rule
from eqx_ppo.envs._conformance import _calls, _episodes, _shapes, _structure
from eqx_ppo.envs._conformance._trial import Trial

_TRACED = (
    "single environment",
    "state",
    "reset wrappers",
    "scalars",
    "step",
    "closed state",
    "dtypes",
)
_PURE = (*_TRACED, "purity")
_RUN = (*_PURE, "vmap")

RULES: dict[str, Rule[Trial]] = {
    "single environment": Rule(_shapes.single_environment),
    "state": Rule(_shapes.state, ("single environment",)),
    "reset wrappers": Rule(_shapes.reset_wrappers, ("single environment", "state")),
    "scalars": Rule(_shapes.scalars, ("single environment", "state")),
    "step": Rule(_shapes.step, ("single environment", "state")),
    "in place": Rule(_shapes.in_place, ("step",)),
    "closed state": Rule(_structure.closed_state, ("single environment", "state", "step")),
    "dtypes": Rule(_structure.dtypes, ("closed state",)),
    "sizes": Rule(_structure.sizes, ("step",)),
    "purity": Rule(_calls.purity, _TRACED),
    "jit": Rule(_calls.jit, _PURE),
    "vmap": Rule(_calls.vmap, _PURE),
    "keys": Rule(_calls.keys, _RUN),
    "reward and done": Rule(_calls.incoming, _RUN),
    "episode end": Rule(_episodes.episode_end, _RUN),
    "own resets": Rule(_episodes.own_resets, (*_RUN, "episode end")),
    "finite": Rule(_episodes.finite, _RUN),
}
