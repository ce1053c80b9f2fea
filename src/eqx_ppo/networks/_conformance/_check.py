"""A test of the whole contract, for modules of one's own."""

import contextlib

import jax
from jaxtyping import Array

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._report import ContractError, Finding, first_paragraph
from eqx_ppo._rules import apply_rules
from eqx_ppo._tree import merge_time, split_time
from eqx_ppo._typing import KeyLike, Tree
from eqx_ppo.networks._conformance._rules import RULES
from eqx_ppo.networks._conformance._trial import Size, Trial, random_inputs, step
from eqx_ppo.networks._container import Container
from eqx_ppo.networks._errors import place_of
from eqx_ppo.networks._module import StatefulModule


@typed
def check_module(
    module: StatefulModule,
    sample_input: Tree,
    *,
    key: KeyLike | None = None,
    n_envs: int = 5,
    n_steps: int = 6,
    tolerance: float = 1e-4,
) -> None:
    """Tests that a module or a whole network keeps the contract; silent if it does.

    Runs it on random inputs: step by step, as a sequence with resets, and in the replay; with
    the batch permuted, sliced and changed; compiled and eager; and through its gradients and
    `update_statistics`. If a network fails, its children are tested one by one to say which
    is at fault. The page "Check your own module" lists the rules.

    ```python
    def test_my_layer():
        check_module(MyLayer(3, key=jax.random.key(0)), jnp.zeros(3))
    ```

    **Arguments:**

    - `module`: what is tested; its weights should not be all zero, or a gradient is easily
        missed.
    - `sample_input`: one input *without* batch axes (arrays or `jax.ShapeDtypeStruct`s). The
        test draws inputs around it: unit normal noise is added to floating-point numbers,
        booleans are drawn, and integers between 0 and the largest that it has.
    - `key`: for inputs and states; the same one gives the same test.
    - `n_envs`, `n_steps`: size of the test, at least 3 each.
    - `tolerance`: floating-point results agree if they differ by at most
        `tolerance * (1 + magnitude)`. A module that computes in half precision is allowed
        four times the spacing of its dtype.

    **Raises:** `ContractError` with every finding: the rule, the path of the module, the leaf
    that shows it, and what to do.
    """
    if n_envs < 3 or n_steps < 3:
        raise ValueError(
            f"`check_module` needs at least 3 environments and 3 steps, but got {n_envs} and "
            f"{n_steps}."
        )
    keys = jax.random.split(jax.random.key(0) if key is None else as_key(key))
    xs = random_inputs(sample_input, (n_steps, n_envs), keys[0])
    findings = _examine(module, xs, "network", keys[1], Size(n_envs, n_steps, tolerance))
    if findings:
        raise ContractError(f"`{type(module).__name__}`", findings)


def _examine(module: StatefulModule, xs: Tree, path: str, key: Array, size: Size) -> list[Finding]:
    """What is wrong with a module, told of its innermost part that shows it."""
    trial = Trial(module, xs, key, size)

    def blame(rule: str, error: Exception) -> Finding:
        text = f"it could not be run. {type(error).__name__}: {first_paragraph(error)}"
        return Finding(rule, place_of(error, path), "", text)

    findings = apply_rules(RULES, trial, path, blame)
    if not findings or not isinstance(module, Container):
        return findings
    inner = []
    for name, child_xs in _inputs_of_children(module, trial).items():
        inner += _examine(module[name], child_xs, path + module.segment(name), key, size)
    explained = {finding.rule for finding in inner}
    return inner + [finding for finding in findings if finding.rule not in explained]


def _inputs_of_children(module: Container, trial: Trial) -> dict[str, Tree]:
    """`[T, B, ...]` inputs of every child that the container calls, up to a failure.

    They are what the child gets from the others, in one step of `T*B` environments that have
    run for a while, since not every input makes sense to it.
    """
    n_steps, n_envs = trial.done.shape
    xs = merge_time(trial.xs)
    state = trial.initial_state(n_steps * n_envs)
    with contextlib.suppress(Exception):  # reported already; what was seen is enough
        for _ in range(n_steps):
            state = step(module, state, xs, None).next_state
    try:
        call = module.begin(state, xs)
    except Exception:
        return {}
    with contextlib.suppress(Exception):
        module.wire(call, xs)
    return {name: split_time(x, n_steps) for name, x in call.inputs.items()}
