"""Rules on what a module computes: these run it."""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo._compare import as_numpy, differences, is_unchanged, snapshot
from eqx_ppo._rules import Fault, Faults
from eqx_ppo._typing import State, Tree
from eqx_ppo.networks._conformance._trial import Trial, reset, rows, scan, step, unroll, visible
from eqx_ppo.networks._container import Container
from eqx_ppo.networks._module import StatefulModule

_PARTS = 10  # scans per episode in the test of the noise
_LEAK = Fault(
    "",
    "a call stored an array outside what it returns (in a list, a global, a cache or a closure), "
    "which is a leaked tracer in compiled code. Return it in the state or the metrics, or make "
    "it in `__init__`.",
)


def initial_state(trial: Trial) -> Faults:
    """`reset_state` of an initial state gives it again."""
    found = trial.difference(reset(trial.module, trial.start), trial.start, within="state")
    if found:
        yield Fault(
            found.leaf,
            f"`reset_state` of a state from `initialize_state` must give it again, but "
            f"{found.text}. The first episode would start unlike all others.",
        )


def purity(trial: Trial) -> Faults:
    """A call changes nothing that a later one sees, and keeps nothing that it was given."""
    module = trial.module
    try:
        before = snapshot((module, trial.middle, trial.x))
        first, second = (module(trial.middle, trial.x, None) for _ in range(2))
    except jax.errors.UnexpectedTracerError:
        yield _LEAK
        return
    found = trial.difference(second, first, exact=True)
    if found:
        yield Fault(
            found.leaf,
            f"two calls with the same state and input must return the same, but {found.text}. "
            "Keep what changes in the carry state, and draw noise from keys in it.",
        )
    if not is_unchanged((module, trial.middle, trial.x), before):
        yield Fault("", "a call changed the module or its input in place. Return new values.")
    try:
        with jax.checking_leaks():
            jax.make_jaxpr(lambda state, x: visible(module(state, x, None)))(trial.middle, trial.x)
    except Exception as error:
        if "Leaked" not in str(error):
            raise
        yield _LEAK


def jit_equals_eager(trial: Trial) -> Faults:
    """The compiled module computes what the eager one does."""
    found = trial.difference(trial.module(trial.middle, trial.x, None), trial.stepped)
    if found:
        yield Fault(
            found.leaf,
            f"must be the same under `jit` and without it, but {found.text}. Do not branch on "
            "Python state or on whether arrays are traced.",
        )


def per_sample(trial: Trial) -> Faults:
    """Permuting, slicing or changing samples does just that to the results."""
    n_envs = trial.size.n_envs
    order = np.arange(n_envs)[::-1]
    for phase, extras in (("rollout", None), ("replay", trial.stepped.rollout_extras)):
        given = (trial.middle, trial.x, extras)
        base = step(trial.module, *given)
        permuted = step(trial.module, *rows(given, order))
        single = step(trial.module, *rows(given, np.array([1])))
        others = np.arange(1, n_envs)
        changed = step(trial.module, *jax.tree.map(_change_first, given))
        tests = {
            "permuting the batch must permute": (permuted, rows(base, order)),
            "a batch of one must give its row of": (single, rows(base, np.array([1]))),
            "changing one sample must not touch the others in": (
                rows(changed, others),
                rows(base, others),
            ),
        }
        for text, (got, expected) in tests.items():
            found = trial.difference(got, expected)
            if found:
                yield Fault(
                    found.leaf,
                    f"{text} every result ({phase}), but {found.text}. Compute each sample on its "
                    "own; what needs the whole batch belongs in `update_statistics`.",
                )
                return
    after = reset(trial.module, trial.middle)
    for text, which in (("permuting", order), ("slicing", np.array([1]))):
        got = reset(trial.module, rows(trial.middle, which))
        found = trial.difference(got, rows(after, which), within="reset_state")
        if found:
            yield Fault(
                found.leaf,
                f"{text} the batch must do just that to the reset state, but {found.text}.",
            )
            return


def replay(trial: Trial) -> Faults:
    """With unchanged weights the replay gives the outputs and states of the rollout."""
    for name in ("output", "regularization_loss", "next_state"):
        got, expected = (out._asdict()[name] for out in (trial.replayed, trial.rollout))
        found = trial.difference(got, expected, within=name)
        if found:
            yield Fault(
                found.leaf,
                f"the replay must give what the rollout gave, but {found.text}. Emit in "
                "`rollout_extras` what the replay cannot compute again (the value that was "
                "drawn, before any clipping), and move the state alike in both.",
            )
            return


def sequence(trial: Trial) -> Faults:
    """`unroll` equals a scan of the steps, in the rollout and in the replay."""
    in_rollout = unroll(trial.module, trial.start, trial.xs, trial.done, None)
    pairs = (
        ("with extras", trial.unrolled, trial.replayed),
        ("without extras", in_rollout, trial.rollout),
    )
    for phase, got, expected in pairs:
        found = trial.difference(got, expected)
        if found:
            yield Fault(
                found.leaf,
                f"`unroll` {phase} must equal a scan of the steps with resets, but {found.text}. "
                "Compare with `StatefulModule.unroll(module, ...)`.",
            )
            return


def keys(trial: Trial) -> Faults:
    """Noise differs between environments, from step to step, and after a reset."""
    if not trial.is_random:
        return
    alike = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:, :1], leaf.shape), trial.xs)
    still = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1, :1], leaf.shape), trial.xs)
    first, after_reset = _episode(trial, trial.start, alike)
    second, last = _episode(trial, after_reset, alike)
    of_still, _ = _episode(trial, trial.start, still)
    by_env = np.moveaxis(first, 1, 0).reshape(first.shape[1], -1)
    is_continuous = np.unique(of_still[:, 0]).size > len(of_still) // 2
    n_distinct = len(np.unique(by_env, axis=0))
    if n_distinct == 1 or (is_continuous and n_distinct < len(by_env)):
        yield Fault(
            "state",
            f"{len(by_env)} environments with equal inputs drew {n_distinct} different sequences "
            "of noise. Give each environment a key of its own (see `RandomModule`).",
        )
        return
    if _holds_keys(trial.start) and np.array_equal(first, second, equal_nan=True):
        moves = np.any(of_still != of_still[:1])
        yield _repeated("state", "after every reset" if moves else "at every step")
        return
    other = trial.initial_state(trial.size.n_envs, 1)
    for path in _stuck(trial.module, trial.start, last):
        swapped = _with_state_of(trial.module, trial.start, other, path)
        out = scan(trial.module, swapped, trial.xs, trial.done, None)
        if trial.difference(visible(out), visible(trial.rollout)):
            yield _repeated("state of `" + ".".join(path) + "`", "after every reset")


def _repeated(leaf: str, when: str) -> Fault:
    return Fault(
        leaf,
        f"the same noise was drawn {when}. Advance the count of draws in `next_state`, and leave "
        "it alone in `reset_state`.",
    )


def _episode(trial: Trial, state: State, xs: Tree) -> tuple[np.ndarray, State]:
    """The outputs of an episode, as a table `[T, B, numbers]`, and the carry after its reset.

    It is long enough for noise that is seldom seen, by scans of the length that is compiled.
    """
    tables = []
    for part in range(_PARTS):
        done = jnp.zeros_like(trial.done).at[-1].set(part == _PARTS - 1)
        out = scan(trial.module, state, xs, done, None)
        state = out.next_state
        tables.append(_numbers(out.output, *done.shape))
    return np.concatenate(tables), state


def _stuck(module: StatefulModule, before: State, after: State) -> Iterator[tuple[str, ...]]:
    """The layers whose state holds keys and came back as it was, as names of children."""
    if not isinstance(module, Container):
        if _holds_keys(before) and next(differences(after, before, 0.0), None) is None:
            yield ()
        return
    states = _by_child(module, after)
    for name, state in _by_child(module, before).items():
        for path in _stuck(module[name], state, states[name]):
            yield (name, *path)


def _with_state_of(
    module: StatefulModule, state: State, other: State, path: tuple[str, ...]
) -> State:
    """`state` with that of the layer at `path` taken from `other`."""
    if not path or not isinstance(module, Container):
        return other
    name, *rest = path
    states, others = _by_child(module, state), _by_child(module, other)
    swapped = _with_state_of(module[name], states[name], others[name], tuple(rest))
    return module.pack({**states, name: swapped})


def _by_child(module: Container, state: State) -> dict[str, State]:
    names, treedef = jax.tree.flatten(module.pack({name: name for name in module.names}))
    return dict(zip(names, treedef.flatten_up_to(state), strict=True))


def _change_first(leaf: Tree) -> Tree:
    if not eqx.is_inexact_array(leaf):
        return leaf
    return leaf.at[0].add(jnp.asarray(0.7, leaf.dtype))


def _numbers(output: Tree, n_steps: int, n_envs: int) -> np.ndarray:
    """Everything in an output as one table `[T, B, numbers]`."""
    leaves = [as_numpy(leaf).reshape(n_steps, n_envs, -1) for leaf in jax.tree.leaves(output)]
    return np.concatenate([leaf.astype(np.float64) for leaf in leaves], axis=-1)


def _holds_keys(state: Tree) -> bool:
    """Whether a state holds typed keys, or what looks like the words of untyped ones."""
    return any(
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        or (leaf.dtype == jnp.uint32 and leaf.shape[1:] in ((2,), (4,)))
        for leaf in jax.tree.leaves(state)
    )
