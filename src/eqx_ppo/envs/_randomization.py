"""A wrapper that draws the parameters of an environment anew for every episode."""

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from eqx_ppo import _typing
from eqx_ppo._keys import as_key
from eqx_ppo._tree import replace, strong_type
from eqx_ppo._typing import Tree
from eqx_ppo.envs._adapters import BraxEnv
from eqx_ppo.envs._protocol import Env
from eqx_ppo.envs._wrappers import (
    Wrapper,
    carry_over,
    stagger,
    with_entries,
    without_entries,
)

_DRAWN = "randomized"
_INNER = "randomized_inner_info"
RANDOMIZATION_ENTRIES = (_DRAWN, _INNER)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class DomainRandomizationWrapper(Wrapper):
    """Draws some parameters of the environment for each episode.

    The parameters are a pytree in one attribute of the environment: for MuJoCo Playground the
    compiled model, `_mjx_model`. At each reset `randomize(key, parameters)` returns them with
    some leaves changed, and `reset` and `step` run with those until the episode ends. So every
    environment of a batch has parameters of its own, and new ones as often as its reset
    strategy calls `reset` (with `CachedReset`, once in a run).

    Only the leaves that `randomize` changes are stored, in `info["randomized"]` by their path,
    as in `state.info["randomized"][".body_mass"]`; all environments share the others. There
    they can also be read, for example for a critic that knows them.

    `reset` splits its key in two, `draw_key, reset_key = jax.random.split(key)`, for
    `randomize` and the environment's own `reset`.

    What the environment computed from its parameters when it was built (a mass that was
    stored, say) does not change with them. In a MuJoCo model, quantities that the compiler
    derives from others, such as `body_subtreemass`, have to be changed along with them.

    **Arguments:**

    - `env`: the environment to wrap, possibly inside other wrappers or `BraxEnv`.
    - `randomize`: a pure function `(key, parameters) -> parameters` for one environment.
    - `attribute`: the attribute that holds the parameters, which `reset` and `step` read.

    **Raises:** `AttributeError` if the environment has no such attribute of its own;
    `TypeError` for an environment that is a NamedTuple; `TypeError` or `ValueError` in `reset`
    if `randomize` changes nothing, or returns another structure, shape or dtype; `TypeError` in
    `reset` or `step` where a compiled function, stored in an attribute when the environment was
    built, is called.

    ```python
    def randomize(key, model):
        scale = jax.random.uniform(key, (), minval=0.8, maxval=1.2)
        return model.replace(body_mass=model.body_mass * scale)

    env = DomainRandomizationWrapper(load_playground("CartpoleBalance"), randomize)
    env = EpisodeWrapper(env, 1000)
    ```
    """

    randomize: Callable[[PRNGKeyArray, Tree], Tree]
    attribute: str = "_mjx_model"

    def __post_init__(self) -> None:
        if not callable(self.randomize):
            raise TypeError(
                "`randomize` must be a function `(key, parameters) -> parameters`, but got "
                f"`{self.randomize!r}`."
            )
        _read(self.env, self.attribute)

    def reset(self, key: PRNGKeyArray) -> _typing.EnvState:
        draw_key, reset_key = jax.random.split(as_key(key))
        drawn = self._draw(draw_key)
        return _outer_state(self._variant(drawn).reset(reset_key), drawn)

    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        drawn = state.info[_DRAWN]
        return _outer_state(self._variant(drawn).step(_inner_state(state), action), drawn)

    def stagger(self, state: _typing.EnvState, key: PRNGKeyArray) -> _typing.EnvState:
        """Staggers the wrapped environment, with the state's own parameters."""
        drawn = state.info[_DRAWN]
        return _outer_state(stagger(self._variant(drawn), _inner_state(state), key), drawn)

    def carry_over(self, ended: _typing.EnvState, fresh: _typing.EnvState) -> _typing.EnvState:
        """Lets the wrapped environment keep something; the parameters are the new ones."""
        drawn, start = fresh.info[_DRAWN], _inner_state(fresh)
        kept = carry_over(self._variant(drawn), _inner_state(ended), start)
        return fresh if kept is start else _outer_state(kept, drawn)

    def parameters(self, state: _typing.EnvState) -> Tree:
        """All parameters of the episode that `state`, of one environment, belongs to."""
        return _merge(_read(self.env, self.attribute), state.info[_DRAWN])

    def _draw(self, key: PRNGKeyArray) -> dict[str, Array]:
        """The leaves that `randomize` changes, by path."""
        base = _read(self.env, self.attribute)
        drawn = self.randomize(key, base)
        before, after = _leaves(base), _leaves(drawn)
        if jax.tree.structure(base) != jax.tree.structure(drawn):
            raise TypeError(
                "`randomize` must return the parameters in the structure that it is given, a "
                f"`{type(base).__name__}`, but returned a `{type(drawn).__name__}`, which lacks "
                f"{sorted(set(before) - set(after)) or 'nothing'} and adds "
                f"{sorted(set(after) - set(before)) or 'nothing'}."
            )
        changed = {path: leaf for path, leaf in after.items() if leaf is not before[path]}
        if not changed:
            raise ValueError(
                "`randomize` returned the parameters unchanged. They are not changed in place: "
                "return the new ones, as `model.replace(body_mass=...)`."
            )
        return {path: _checked(path, leaf, before[path]) for path, leaf in changed.items()}

    def _variant(self, drawn: Mapping[str, Array]) -> Env:
        """The environment with these parameters; the original stays as it is."""
        parameters = _merge(_read(self.env, self.attribute), drawn)
        return _with_attribute(self.env, self.attribute, parameters)


def _outer_state(inner: _typing.EnvState, drawn: Mapping[str, Array]) -> _typing.EnvState:
    return replace(inner, info=with_entries(inner.info, {_DRAWN: drawn}, _INNER, (_DRAWN,)))


def _inner_state(state: _typing.EnvState) -> _typing.EnvState:
    return replace(state, info=without_entries(state.info, _INNER, (_DRAWN,)))


def _leaves(tree: Tree) -> dict[str, Tree]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def _merge(base: Tree, drawn: Mapping[str, Array]) -> Tree:
    """`base` with the leaves at some paths replaced."""
    leaves = [drawn.get(path, leaf) for path, leaf in _leaves(base).items()]
    return jax.tree.unflatten(jax.tree.structure(base), leaves)


def _checked(path: str, leaf: Tree, before: Tree) -> Array:
    try:
        leaf, expected = strong_type(jnp.asarray(leaf)), jax.eval_shape(jnp.asarray, before)
    except TypeError as error:
        raise TypeError(
            f"`randomize` changed `{path}`, which is a `{type(before).__name__}`. Only arrays and "
            "numbers can differ between environments."
        ) from error
    if (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"`randomize` must keep shapes and dtypes, but `{path}` was "
            f"{expected.dtype}{list(expected.shape)} and became {leaf.dtype}{list(leaf.shape)}."
        )
    return leaf


def _read(env: Env, name: str) -> Tree:
    return vars(_layers(env, name)[-1])[name]


def _layers(env: Env, name: str) -> list[Env]:
    """The environment inside of this library's wrappers that holds the attribute, and those."""
    layers = [env]
    while isinstance(env, (Wrapper, BraxEnv)) and name not in _attributes(env):
        env = env.env
        layers.append(env)
    if name not in _attributes(env):
        raise AttributeError(
            f"`{type(env).__name__}` has no attribute `{name}` of its own, so it cannot be "
            "replaced. Name the attribute in which the environment stores its parameters (not a "
            f"property), one of {sorted(vars(env))}. If another library's wrapper is around the "
            "environment, wrap what is inside of it."
        )
    return layers


def _attributes(env: Env) -> Mapping[str, Tree]:
    try:
        return vars(env)
    except TypeError as error:
        raise TypeError(
            f"`{type(env).__name__}` is a NamedTuple or has `__slots__`, so no attribute of a copy "
            "of it can be replaced. Make it a frozen dataclass or an ordinary class."
        ) from error


def _with_attribute(env: Env, name: str, value: Tree) -> Env:
    """A copy of the environment, and of the wrappers around it, with one other attribute."""
    layers = _layers(env, name)
    copies = [copy.copy(layer) for layer in layers]
    for layer, variant in zip(layers, copies, strict=True):
        for own, held in vars(layer).items():
            moved = _moved(held, layers, copies, f"`{own}` of `{type(layer).__name__}`")
            if moved is not held:
                object.__setattr__(variant, own, moved)
    object.__setattr__(copies[-1], name, value)
    return copies[0]


def _moved(held: Tree, layers: Sequence[Env], copies: Sequence[Env], where: str) -> Tree:
    """What an attribute holds, where it is a layer or bound to one, for the copy of the layer.

    A function that cannot be taken apart is replaced by one that refuses to be called.
    """
    for layer, variant in zip(layers, copies, strict=True):
        if held is layer:
            return variant
    if isinstance(held, types.MethodType):
        owner = _moved(held.__self__, layers, copies, where)
        return held if owner is held.__self__ else types.MethodType(held.__func__, owner)
    if isinstance(held, functools.partial):
        before = (held.func, *held.args, *held.keywords.values())
        after = [_moved(part, layers, copies, where) for part in before]
        if all(new is old for new, old in zip(after, before, strict=True)):
            return held
        n_args = len(held.args) + 1
        keywords = dict(zip(held.keywords, after[n_args:], strict=True))
        return functools.partial(*after[:n_args], **keywords)
    return _refusal(where) if _is_closed_over(held, layers, copies) else held


def _is_closed_over(held: Tree, layers: Sequence[Env], copies: Sequence[Env]) -> bool:
    """Whether `held` is a function that has a layer inside, as `jax.jit(env.step)` has."""
    if not callable(held):
        return False
    inner = inspect.unwrap(held, stop=lambda function: isinstance(function, types.MethodType))
    if inner is not held and _moved(inner, layers, copies, "") is not inner:
        return True
    cells = (inner.__closure__ or ()) if isinstance(inner, types.FunctionType) else ()
    contents = [cell.cell_contents for cell in cells if cell != types.CellType()]
    return any(content is layer for content in contents for layer in layers)


def _refusal(where: str) -> Callable[..., Tree]:
    def refuse(*_, **__):
        raise TypeError(
            f"{where} is a function that was made for the environment as it was built, such as "
            "`jax.jit(self._step)`: the drawn parameters do not reach it. Define an ordinary "
            "method, and use `jax.jit` where it is called; training compiles it in any case."
        )

    return refuse
