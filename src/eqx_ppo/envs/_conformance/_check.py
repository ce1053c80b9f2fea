"""A test of the whole convention, for environments of one's own."""

import contextlib
from collections.abc import Callable, Collection
from typing import NamedTuple, final

import jax
from jaxtyping import Array

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._report import ContractError, Finding
from eqx_ppo._rules import apply_rules
from eqx_ppo._typing import KeyLike, Tree
from eqx_ppo.envs._conformance._actions import Sampler, action_sampler
from eqx_ppo.envs._conformance._advice import advise
from eqx_ppo.envs._conformance._cost import reset_cost
from eqx_ppo.envs._conformance._errors import blame
from eqx_ppo.envs._conformance._rules import RULES
from eqx_ppo.envs._conformance._trial import Size, Trial
from eqx_ppo.envs._protocol import Env
from eqx_ppo.envs._resets import SupportsOwnResets
from eqx_ppo.envs._wrappers import Wrapper


@final
class EnvReport(NamedTuple):
    """What `check_env` says of an environment that breaks no rule.

    - `advice`: what is legitimate, and yet worth knowing.
    - `reset_cost`: how many steps a reset takes the time of, both compiled, in a small batch.
        A measurement, which varies.
    - `skipped`: what was not tested, because that would take minutes.
    """

    advice: tuple[Finding, ...]
    reset_cost: float
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"no rule is broken; a reset costs about as much as {self.reset_cost:.1f} steps"]
        if self.skipped:
            lines.append(f"not tested, because it would take minutes: {', '.join(self.skipped)}")
        return "\n".join(lines + [f"advice: {finding}" for finding in self.advice])


@typed
def check_env(
    env: Env,
    *,
    sample_action: Tree = None,
    key: KeyLike | None = None,
    n_envs: int = 8,
    n_steps: int = 100,
    allow: Collection[str] = (),
) -> EnvReport:
    """Tests that an environment keeps the convention; silent if it does.

    Traces `reset` and `step`; runs them compiled and uncompiled, alone and in a batch; and
    lets the batch run for a while under random actions. If a wrapped environment fails, the
    ones inside are tested to say which is at fault. The page "Check your own module" lists
    the rules.

    ```python
    def test_my_env():
        check_env(MyEnv())
    ```

    **Arguments:**

    - `env`: what is tested, written for one environment.
    - `sample_action`: one action (arrays or `jax.ShapeDtypeStruct`s), or a function that draws
        one from a key. Around a sample floating-point numbers are drawn between -1 and 1,
        integers between 0 and the largest that it has, and booleans. By default an action is
        what `env.actions` says (see `Actions`) or else `env.action_size` (a number, a shape,
        or a tree of these), between -1 and 1.
    - `key`: for resets and actions; the same one gives the same test.
    - `n_envs`, `n_steps`: the size of the batch, at least 2, and how long it runs, at least 3.
    - `allow`: names of rules that the environment may break: what they find becomes advice.

    **Returns:** advice, and what a reset costs. Print it, or leave it.

    **Raises:** `ContractError` with every finding: the rule, the environment (`env.env` is the
    one inside of a wrapper), the leaf that shows it, and what to do. `ValueError` if nothing
    says what an action is. `TypeError` for an environment on the host.
    """
    _check_arguments(env, n_envs, n_steps, allow)
    sampler = action_sampler(env, sample_action)
    key = jax.random.key(0) if key is None else as_key(key)
    new_trial = _maker(sampler, key, Size(n_envs, n_steps))
    trial = new_trial(env)
    findings = _examine(trial, "env", new_trial, allow)
    if all(finding.rule in allow for finding in findings) and not trial.is_large:
        findings += _hidden_resets(env, new_trial)
    raised = [finding for finding in findings if finding.rule not in allow]
    if raised:
        raise ContractError(f"`{type(env).__name__}`", raised)
    cost = reset_cost(trial)
    advice = [finding for finding in findings if finding.rule in allow]
    advice += advise(trial, "env", cost)
    return EnvReport(tuple(advice), cost, _skipped(trial))


def _check_arguments(env: Env, n_envs: int, n_steps: int, allow: Collection[str]) -> None:
    if n_envs < 2 or n_steps < 3:
        raise ValueError(
            f"`check_env` needs at least 2 environments and 3 steps, but got {n_envs} and "
            f"{n_steps}."
        )
    unknown = sorted(set(allow) - set(RULES))
    if unknown:
        raise ValueError(
            f"`check_env` has no rule {', '.join(f'`{name}`' for name in unknown)} to allow. Its "
            f"rules are {', '.join(f'`{name}`' for name in RULES)}."
        )
    inner = env
    while isinstance(inner, Wrapper):
        inner = inner.env
    if isinstance(inner, SupportsOwnResets):
        raise TypeError(
            f"`check_env` tests environments that are functions, but `{type(inner).__name__}` "
            "keeps its state on the host. Test what it is made from by the means of its own "
            "library (`gymnasium.utils.env_checker.check_env`)."
        )


def _maker(sampler: Sampler, key: Array, size: Size) -> Callable[[Env], Trial]:
    return lambda env: Trial(env, sampler, key, size)


def _examine(
    trial: Trial, path: str, new_trial: Callable[[Env], Trial], allow: Collection[str]
) -> list[Finding]:
    """What is wrong with an environment, told of the innermost one that shows it."""
    findings = apply_rules(RULES, trial, path, lambda rule, error: blame(rule, path, error), allow)
    env = trial.env
    broken = {finding.rule for finding in findings} - set(allow)
    if not broken or not isinstance(env, Wrapper):
        return findings
    inner = [
        finding
        for finding in _examine(new_trial(env.env), f"{path}.env", new_trial, allow)
        if finding.rule in broken
    ]
    explained = {finding.rule for finding in inner}
    if _is_ours(env):  # hands on what it is given, `done` too
        explained.add("reward and done")
    return inner + [finding for finding in findings if finding.rule not in explained]


def _skipped(trial: Trial) -> tuple[str, ...]:
    if not trial.is_large:
        return ()
    return ("jit", "own resets inside of wrappers") if isinstance(trial.env, Wrapper) else ("jit",)


def _is_ours(env: Env) -> bool:
    """Whether it is one of the wrappers of this library."""
    return isinstance(env, Wrapper) and type(env).__module__.startswith("eqx_ppo.envs.")


def _hidden_resets(env: Env, new_trial: Callable[[Env], Trial]) -> list[Finding]:
    """What resets itself inside of wrappers, whose own counts and frames go on.

    Told of the innermost. One that cannot be run alone, because a wrapper gives it something,
    cannot be tested.
    """
    path, found = "env", []
    while isinstance(env, Wrapper):
        env, path = env.env, f"{path}.env"
        if not _is_ours(env):
            with contextlib.suppress(Exception):
                faults = RULES["own resets"].test(new_trial(env))
                found = [Finding("own resets", path, *fault) for fault in faults] or found
    return found
