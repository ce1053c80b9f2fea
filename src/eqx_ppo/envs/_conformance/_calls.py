"""Rules on what the functions compute: these run them."""

import re
from collections.abc import Iterator
from operator import attrgetter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array

from eqx_ppo._compare import as_numpy
from eqx_ppo._rules import Fault, Faults
from eqx_ppo._tree import replace
from eqx_ppo._typing import EnvState, Tree
from eqx_ppo.envs._conformance._errors import LEAK
from eqx_ppo.envs._conformance._fingerprint import fingerprint
from eqx_ppo.envs._conformance._program import Programs, holds_tracer, is_same_program
from eqx_ppo.envs._conformance._trial import Trial

# What a report of leaks says of a tracer in JAX's own caches, which are no harm, or elsewhere.
_OF_JAX = re.compile(r"WeakrefLRUCache|referred to by jax\._src")
_PLACE = re.compile(r"is referred to by ([A-Za-z_][\w.]*)$", re.MULTILINE)

_AT_MOST = 3  # environments that are run one by one
_OTHER_BITS = 0x5BD1E995


def purity(trial: Trial) -> Faults:
    """The same arguments give the same state; nothing is changed, and nothing is kept."""
    first, second, changed = trial.programs, {}, []
    for name in first:
        before = fingerprint(trial.env)
        second[name] = trial.trace(name)
        after = fingerprint(trial.env)
        changed += [part for part in before | after if before.get(part) != after.get(part)]
    kept = _keeps(trial, [*first.values(), *second.values()])
    if kept:
        yield kept
    elif changed:
        yield Fault(
            changed[0],
            "a call changed the environment, which compiled code does once and then never again. "
            "Keep what moves in the state (in `info`, or in fields of your own).",
        )
    else:
        found = _difference_of_traces(trial, first, second) or _difference_of_calls(trial)
        if found:
            yield found


_SAME = "must return the same for the same arguments, but {}."
_WAY_OUT = (
    "Draw random numbers from the key with `jax.random`, not from NumPy or Python, and keep what "
    "changes in the state."
)


def _keeps(trial: Trial, programs: list[ClosedJaxpr]) -> Fault | None:
    """Whether anything that was traced is kept, in what is traced later or elsewhere."""
    if any(map(holds_tracer, programs)):
        return Fault("", LEAK)
    for name in trial.programs:
        try:
            with jax.checking_leaks():
                trial.trace(name)
        except Exception as error:
            if "Leaked" not in str(error):
                raise
            for leak in str(error).split("Tracer(")[1:]:
                if not _OF_JAX.search(leak):
                    place = _PLACE.search(leak)
                    return Fault("", LEAK + (f" It is in `{place[1]}`." if place else ""))
    return None


def _difference_of_traces(trial: Trial, first: Programs, second: Programs) -> Fault | None:
    """What differs between two compilations."""
    for name, program in first.items():
        if is_same_program(program, second[name]):
            continue
        args = jax.tree.leaves(trial.example(name))

        def run(program, args=args):
            return trial.spec.unflatten(jax.jit(jaxpr_as_fun(program))(*args))

        found = trial.identical(run(program), run(second[name]), _returned_by(name))
        if found:
            text = f"between two compilations {found.text}"
            return Fault(found.leaf, f"`{name}` {_SAME.format(text)} {_WAY_OUT}")
    return None


def _difference_of_calls(trial: Trial) -> Fault | None:
    """What differs between two calls of what is compiled, by more than rounding.

    Rounding may differ where a GPU adds in another order; that is advice.
    """
    none = [0.0] * len(trial.spec.leaves)  # what is measured by calls would take noise for it
    for name, one, two in repeated_calls(trial):
        found = trial.difference(one, two, none, _returned_by(name))
        if found:
            return Fault(found.leaf, f"`{name}` {_SAME.format(found.text)} {_WAY_OUT}")
    return None


def repeated_calls(trial: Trial) -> Iterator[tuple[str, EnvState, EnvState]]:
    """The results of two equal calls of each function."""
    yield "reset", trial.reset_all(trial.keys), trial.starts
    yield "step", trial.step_from_middle(trial.middle), trial.after


def _returned_by(function: str) -> str:
    return {"reset": "state", "stagger": "staggered", "carry_over": "fresh"}.get(
        function, "next_state"
    )


def jit(trial: Trial) -> Faults:
    """The compiled functions compute what the uncompiled ones do."""
    if trial.is_large:
        return
    state, action, after = trial.single
    key = trial.keys[0]
    cases = {
        "reset": (trial.env.reset(key), trial.reset_one(key), trial.reset_slack),
        "step": (trial.env.step(_copy(state), action), after, trial.step_slack),
    }
    for name, (uncompiled, compiled, slack) in cases.items():
        eager = trial.spec.unflatten(trial.spec.flatten(uncompiled))
        found = trial.difference(eager, compiled, slack, _returned_by(name))
        if found:
            yield Fault(
                found.leaf,
                f"`{name}` must return the same under `jit` and without it, but {found.text}. Do "
                "not branch on Python state or on whether arrays are traced.",
            )
            return


def _copy(state: EnvState) -> EnvState:
    """The same state in containers of its own, into which a step may write."""
    return jax.tree.map(lambda leaf: leaf, state)


def vmap(trial: Trial) -> Faults:
    """A batch of environments computes what they do one by one."""
    for index in map(jnp.int32, range(min(_AT_MOST, trial.size.n_envs))):
        for name, alone, batch, slack in _one_by_one(trial, index):
            found = trial.difference(trial.row(batch, index), alone, slack, _returned_by(name))
            if found:
                yield Fault(
                    found.leaf,
                    f"`{name}` must return the same in a batch (`jax.vmap`) and for one "
                    f"environment, but {found.text}. Look at callbacks and custom batching rules: "
                    "each environment is computed on its own.",
                )
                return


def _one_by_one(
    trial: Trial, index: Array
) -> Iterator[tuple[str, EnvState, EnvState, list[float]]]:
    """What an environment does alone, what the batch does, and what rounding may do.

    To compile another reset of a physics engine takes longer than it is worth.
    """
    if not trial.is_large:
        yield "reset", trial.reset_one(trial.keys[index]), trial.starts, trial.reset_slack
    state, action = (trial.row(tree, index) for tree in (trial.middle, trial.middle_actions))
    yield "step", trial.step_one(state, action), trial.after, trial.step_slack


def keys(trial: Trial) -> Faults:
    """A key in the state that moves is another one in every episode."""
    for index, name in key_leaves(trial):
        words, after = (
            as_numpy(jax.tree.leaves(batch)[index]) for batch in (trial.starts, trial.after)
        )
        same = trial.size.n_envs > 1 and np.all(words == words[:1])
        if same and np.any(words != after) and matters(trial, index):
            yield Fault(
                f"state{name}",
                "holds the same key after every reset, so that all environments draw the same "
                "numbers in every episode. Split it off the key that `reset` gets.",
            )


def key_leaves(trial: Trial) -> list[tuple[int, str]]:
    """Position and path of every leaf that is a PRNG key, typed or by name and shape."""
    return [
        (index, path)
        for index, (path, leaf) in enumerate(zip(trial.spec.paths, trial.spec.leaves, strict=True))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        or (
            leaf.dtype == jnp.uint32
            and leaf.shape in ((2,), (4,))
            and any(word in path.lower() for word in ("key", "rng"))
        )
    ]


def matters(trial: Trial, index: int) -> bool:
    """Whether a step draws from the key that is leaf `index` of the state."""
    state, action, after = trial.single
    leaves = jax.tree.leaves(state)
    leaves[index] = _other_key(leaves[index])
    other = trial.step_one(trial.spec.unflatten(leaves), action)
    return any(
        position != index and not np.array_equal(as_numpy(new), as_numpy(old))
        for position, (new, old) in enumerate(
            zip(jax.tree.leaves(other), jax.tree.leaves(after), strict=True)
        )
    )


def _other_key(key: Tree) -> Tree:
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key) ^ jnp.uint32(_OTHER_BITS)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
    return key ^ jnp.uint32(_OTHER_BITS)


def incoming(trial: Trial) -> Faults:
    """`step` does not depend on the `reward` and `done` of the state that it is given."""
    state, action, after = trial.single
    others = {
        "done": replace(state, done=_toggled(state.done)),
        "reward": replace(state, reward=jax.tree.map(_plus_one, state.reward)),
    }
    for field, other in others.items():
        got, expected, value = trial.step_one(other, action), after, attrgetter(field)
        cases = ((state, after), (other, got))
        if all(eqx.tree_equal(value(before), value(then)) for before, then in cases):
            expected = replace(after, **{field: value(other)})  # it is passed on as it is
        found = trial.difference(got, expected, trial.step_slack, "next_state")
        if found:
            yield Fault(
                found.leaf,
                f"`step` must not depend on the incoming `{field}`, which wrappers change, but "
                f"with another one {found.text}. Keep what it needs in `info` or in fields of "
                "your own.",
            )
            return


def _toggled(done: Tree) -> Tree:
    done = jnp.asarray(done)
    return jnp.logical_not(done.astype(jnp.bool_)).astype(done.dtype)


def _plus_one(reward: Tree) -> Tree:
    reward = jnp.asarray(reward)
    return ~reward if reward.dtype == jnp.bool_ else reward + jnp.ones_like(reward)
