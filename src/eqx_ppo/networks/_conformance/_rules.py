"""The rules in the order in which they are tested, and what each of them presupposes."""

from eqx_ppo._rules import Rule
from eqx_ppo.networks._conformance import _learning, _shapes, _values
from eqx_ppo.networks._conformance._trial import Trial

_SHAPES = ("returns", "batch axis", "closed state")
_PURE = (*_SHAPES, "purity")

RULES: dict[str, Rule[Trial]] = {
    "static fields": Rule(_shapes.static_fields),
    "returns": Rule(_shapes.returns),
    "batch axis": Rule(_shapes.batch_axis, ("returns",)),
    "one number per env": Rule(_shapes.one_number_per_env, ("returns",)),
    "closed state": Rule(_shapes.closed_state, ("returns",)),
    "initial state": Rule(_values.initial_state, _SHAPES),
    "purity": Rule(_values.purity, _SHAPES),
    "jit equals eager": Rule(_values.jit_equals_eager, _PURE),
    "per sample": Rule(_values.per_sample, _PURE),
    "replay": Rule(_values.replay, _PURE),
    "unroll": Rule(_values.sequence, (*_PURE, "per sample")),
    "keys": Rule(_values.keys, _PURE),
    "statistics": Rule(_learning.statistics, _PURE),
    "gradients": Rule(_learning.gradients, (*_PURE, "unroll")),
    "retracing": Rule(_learning.retracing, (*_PURE, "static fields", "statistics")),
}
