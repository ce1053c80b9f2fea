"""What `check_module` runs a module through, and how it compares what comes out.

A `Trial` holds one module, random inputs of the kind of a sample, and the results of running
them step by step and as a sequence, each computed when a rule first asks for it.
"""

import functools
from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from eqx_ppo._compare import Difference, differences
from eqx_ppo._tree import tree_where
from eqx_ppo._typing import Extras, State, Tree
from eqx_ppo.networks._frozen import trainable
from eqx_ppo.networks._module import StatefulModule, StatefulModuleOutput

_LARGEST = 2**31 - 2  # integer that is drawn

# Dtypes whose rounding depends on how XLA arranges the computation, as a jaxpr writes them.
_HALF = {"bf16": jnp.bfloat16, "f16": jnp.float16}


class Size(NamedTuple):
    """How large the trial is, and how exact results must be.

    Floating-point numbers agree if they differ by at most `tolerance * (1 + magnitude)`; see
    `Trial.tolerance` for half precision.
    """

    n_envs: int
    n_steps: int
    tolerance: float


@final
class Trial:
    """One module under test, with inputs and (lazily) what it makes of them."""

    def __init__(self, module: StatefulModule, xs: Tree, key: Array, size: Size):
        self.module = module
        self.xs = xs
        self.size = size
        self.keys = jax.random.split(key)
        steps, envs = np.arange(size.n_steps)[:, None], np.arange(size.n_envs)[None]
        self.done = jnp.asarray((steps + envs) % 3 == 1)  # at different steps, not at the first

    def initial_state(self, n_envs: int, key: int = 0) -> State:
        """The module's own start; `key` numbers the key that it is made from."""
        return self.module.initialize_state(n_envs, key=self.keys[key])

    @functools.cached_property
    def start(self) -> State:
        """The carry before the first step."""
        return self.initial_state(self.size.n_envs)

    @functools.cached_property
    def x(self) -> Tree:
        """The input of a single step."""
        return rows(self.xs, -1)

    @functools.cached_property
    def middle(self) -> State:
        """A carry in the middle of an episode, save in every third environment."""
        state = step(self.module, self.start, rows(self.xs, 0), None).next_state
        done = jnp.arange(self.size.n_envs) % 3 == 1
        return tree_where(done, reset(self.module, state), state)

    @functools.cached_property
    def stepped(self) -> StatefulModuleOutput:
        """One step from there, compiled."""
        return step(self.module, self.middle, self.x, None)

    @functools.cached_property
    def rollout(self) -> StatefulModuleOutput:
        """The steps as the rollout runs them."""
        return scan(self.module, self.start, self.xs, self.done, None)

    @functools.cached_property
    def replayed(self) -> StatefulModuleOutput:
        """The same steps one by one, with the extras given back."""
        return scan(self.module, self.start, self.xs, self.done, self.rollout.rollout_extras)

    @functools.cached_property
    def unrolled(self) -> StatefulModuleOutput:
        """The same as one sequence, with the extras given back."""
        return unroll(self.module, self.start, self.xs, self.done, self.rollout.rollout_extras)

    @functools.cached_property
    def tolerance(self) -> float:
        """That of the trial or, if the module computes in half precision, what that allows."""
        text = str(eqx.filter_make_jaxpr(self.module)(self.start, self.x, None)[0])
        used = [dtype for name, dtype in _HALF.items() if f"{name}[" in text]
        return max([self.size.tolerance, *(4 * float(jnp.finfo(dtype).eps) for dtype in used)])

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether what the module does depends on the key of its state."""
        other = scan(self.module, self.initial_state(self.size.n_envs, 1), self.xs, self.done, None)
        return self.difference(visible(other), visible(self.rollout)) is not None

    def difference(
        self, got: Tree, expected: Tree, *, within: str = "", exact: bool = False
    ) -> Difference | None:
        """The first leaf in which two trees of results differ, if there is one.

        `within` is what their paths begin with.
        """
        tolerance = 0.0 if exact else self.tolerance
        return next(differences(got, expected, tolerance, within), None)


@eqx.filter_jit
def step(module: StatefulModule, state: State, x: Tree, extras: Extras) -> StatefulModuleOutput:
    """One compiled step."""
    return module(state, x, extras)


@eqx.filter_jit
def reset(module: StatefulModule, state: State) -> State:
    """One compiled reset of every environment."""
    return module.reset_state(state)


@eqx.filter_jit
def scan(
    module: StatefulModule, state: State, xs: Tree, done: Bool[Array, "T B"], extras: Extras
) -> StatefulModuleOutput:
    """The steps one after the other, which every `unroll` must equal."""
    return StatefulModule.unroll(module, state, xs, done, extras)


@eqx.filter_jit
def unroll(
    module: StatefulModule, state: State, xs: Tree, done: Bool[Array, "T B"], extras: Extras
) -> StatefulModuleOutput:
    """The module's own sequence."""
    return module.unroll(state, xs, done, extras)


@eqx.filter_jit
def gradient_of(
    module: StatefulModule,
    state: State,
    xs: Tree,
    done: Bool[Array, "T B"],
    extras: Extras,
    by_unroll: bool,
) -> Tree:
    """The gradient of a weighted sum of all outputs and penalties, in the replay."""
    params, static = eqx.partition(module, trainable(module))
    run = unroll if by_unroll else scan

    def loss(params):
        network = eqx.combine(params, static)
        out = run(network, network.reset_state(state), xs, done, extras)
        terms = [leaf for leaf in jax.tree.leaves(visible(out)) if eqx.is_inexact_array(leaf)]
        return sum((_weighted(term, index) for index, term in enumerate(terms)), jnp.float32(0))

    return jax.grad(loss)(params)


def _weighted(leaf: Array, index: int) -> Array:
    weights = jnp.sin(1.0 + index + jnp.arange(leaf.size, dtype=jnp.float32))
    return jnp.sum(weights * leaf.reshape(-1).astype(jnp.float32))


def visible(out: StatefulModuleOutput) -> dict[str, Tree]:
    """What the loss sees of a result."""
    return {"output": out.output, "regularization_loss": out.regularization_loss}


def rows(tree: Tree, index: int | np.ndarray) -> Tree:
    """The entries `index` of the first axis of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def random_inputs(sample: Tree, lead: tuple[int, ...], key: Array) -> Tree:
    """Inputs `[*lead, *feat]` around a sample, in its dtypes.

    Floating-point leaves get unit normal noise, booleans are drawn anew, and integers between
    0 and the largest of the sample, so that an index stays one.
    """
    leaves, treedef = jax.tree.flatten(sample)
    keys = jax.random.split(key, max(len(leaves), 1))
    drawn = [_random_leaf(leaf, lead, k) for leaf, k in zip(leaves, keys, strict=False)]
    return jax.tree.unflatten(treedef, drawn)


def _random_leaf(leaf: Tree, lead: tuple[int, ...], key: Array) -> Array:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = jnp.zeros(leaf.shape, leaf.dtype)
    leaf = jnp.asarray(leaf)
    shape = (*lead, *leaf.shape)
    if leaf.dtype == jnp.bool_:
        return jax.random.bernoulli(key, shape=shape)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        high = min(max(int(jnp.max(leaf)), 1), _LARGEST) if leaf.size else 1
        return jax.random.randint(key, shape, 0, high + 1, jnp.int32).astype(leaf.dtype)
    noise = jax.random.normal(key, shape, jnp.float32).astype(leaf.dtype)
    return jnp.broadcast_to(leaf, shape) + noise


def nudged(tree: Tree, by: float) -> Tree:
    """A copy in which every floating-point number is larger, by `by` and in proportion."""
    return jax.tree.map(
        lambda leaf: (
            leaf + by * (1 + jnp.abs(leaf)).astype(leaf.dtype)
            if eqx.is_inexact_array(leaf)
            else leaf
        ),
        tree,
    )
