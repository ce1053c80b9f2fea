"""Containers: the routing of state and extras, written once.

A concrete container writes only its wiring; the same wiring runs one step and a whole
sequence. See `Container`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_ppo._keys import as_key
from eqx_ppo._tree import merge_time, split_time, tree_where
from eqx_ppo._typing import Extras, KeyLike, Metrics, State, TimeBatchTree, Tree
from eqx_ppo.networks._errors import at_path, check_closed, check_lead
from eqx_ppo.networks._frozen import holds_statistics
from eqx_ppo.networks._module import StatefulModule, StatefulModuleOutput

_Value = TypeVar("_Value")

if TYPE_CHECKING:
    Child: TypeAlias = StatefulModule
else:
    # Checked by `Container`, whose message names the child and the way out.
    Child: TypeAlias = object


class Container(StatefulModule):
    """A module made of named children, which writes only how they are wired.

    Subclasses call `super().__init__({name: module})` and implement `wire`:

    ```python
    class Residual(Container):
        def __init__(self, inner: StatefulModule):
            super().__init__({"inner": inner})

        def wire(self, call, x):
            return call.local(jnp.add, x, call("inner", x))
    ```

    `call(name, x)` runs a child and returns its output; `call.local(fn, *xs)` applies
    arithmetic, with `fn` seeing `[B, *feat]` in a step and in a sequence alike. State,
    extras, statistics, penalties and metrics of the children are routed here. State and
    extras are dicts by child name (`Sequential`: lists).
    """

    names: tuple[str, ...] = eqx.field(static=True)
    modules: tuple[StatefulModule, ...]

    def __init__(self, children: Mapping[str, Child]):
        """**Arguments:**

        - `children`: names to modules, in order.

        **Raises:** `TypeError` for a child that is not a `StatefulModule`.
        """
        for name, module in children.items():
            if not isinstance(module, StatefulModule):
                raise TypeError(
                    f"The child `{name}` of `{type(self).__name__}` must be a `StatefulModule`, "
                    f"but is a `{type(module).__name__}`. Wrap a plain Equinox layer or function "
                    "of one sample as `Lift(layer)`."
                )
        self.names = tuple(children)
        self.modules = tuple(children.values())

    @abc.abstractmethod
    def wire(self, call: "Call", x: Tree) -> Tree:
        """Computes the container's output by `call(name, x)` and `call.local(fn, *xs)`."""

    def pack(self, values: dict[str, _Value]) -> Tree:
        """Arranges one value per child as the container's state or extras."""
        return values

    def segment(self, name: str) -> str:
        """How a child is addressed from the container, in error messages."""
        return f"[{name!r}]"

    def __getitem__(self, name: str) -> StatefulModule:
        """The child of that name."""
        return self.modules[self._index(name)]

    def __call__(
        self, state: State, x: Tree, rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Runs one step of every child that `wire` calls."""
        call = self.begin(state, x, rollout_extras)
        return call.finish(self.wire(call, x))

    def begin(self, state: State, x: Tree, rollout_extras: Extras = None) -> "Call":
        """What `wire` is given for one step."""
        lead = batch_of(state, x)
        return Call(self, self._unpack(state), self._unpack(rollout_extras), lead, None)

    def unroll(
        self,
        state: State,
        xs: TimeBatchTree,
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Runs a sequence: the same wiring over the children's own `unroll`."""
        call = Call(self, self._unpack(state), self._unpack(rollout_extras), done.shape, done)
        return call.finish(self.wire(call, xs))

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> State:
        """The state of every child, each from a key of its own."""
        keys = jax.random.split(as_key(key), max(len(self.names), 1))
        states = {}
        for name, module, child_key in zip(self.names, self.modules, keys, strict=False):
            with at_path(self.segment(name), module):
                states[name] = module.initialize_state(batch_size, key=child_key)
        return self.pack(states)

    def reset_state(self, prev_state: State) -> State:
        """The reset state of every child."""
        states = self._unpack(prev_state)
        resets = {}
        for name, module in zip(self.names, self.modules, strict=True):
            with at_path(self.segment(name), module):
                resets[name] = module.reset_state(states[name])
                check_closed("`reset_state`", resets[name], states[name])
        return self.pack(resets)

    def update_statistics(self, rollout_extras: Extras) -> Self:
        """A new container in which every child has taken in its own extras.

        **Raises:** `NotImplementedError` if a field besides the children holds `Statistics`
        and the subclass does not override this method.
        """
        if type(self).update_statistics is Container.update_statistics:
            self._check_own_fields()
        extras = self._unpack(rollout_extras)
        updated = []
        for name, module in zip(self.names, self.modules, strict=True):
            with at_path(self.segment(name), module):
                updated.append(module.update_statistics(extras[name]))
        if not updated:
            return self
        return eqx.tree_at(lambda container: container.modules, self, tuple(updated))

    def _check_own_fields(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "modules" and holds_statistics(vars(self)[field.name]):
                raise NotImplementedError(
                    f"The field `{field.name}` of `{type(self).__name__}` holds `Statistics`, but "
                    "only those of children are updated. Make it a child and run it by "
                    "`call(name, x)`, or override `update_statistics`."
                )

    def _unpack(self, packed: Tree) -> dict[str, Tree]:
        """Undoes `pack`; `None` stands for one `None` per child."""
        if packed is None:
            return dict.fromkeys(self.names)
        template = self.pack({name: name for name in self.names})
        treedef = jax.tree.structure(template)
        try:
            values = treedef.flatten_up_to(packed)
        except ValueError as error:
            raise ValueError(
                f"The state or extras of `{type(self).__name__}` do not mirror its children: "
                f"expected one entry for each of {list(self.names)}, got "
                f"{jax.tree.structure(packed, is_leaf=lambda node: node is not packed)}. Make "
                "the state with `initialize_state`, and pass on what the module returned."
            ) from error
        return dict(zip(jax.tree.leaves(template), values, strict=True))

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(
                f"`{type(self).__name__}` has no child `{name}`; its children are "
                f"{list(self.names)}."
            )
        return self.names.index(name)


@final
class Call:
    """What `Container.wire` runs its children through, for one step or one sequence."""

    def __init__(
        self,
        container: Container,
        states: dict[str, State],
        extras: dict[str, Extras],
        lead: tuple[int, ...],
        done: Bool[Array, "T B"] | None,
    ):
        self._container = container
        self._states = states
        self._extras = extras
        self._lead = lead
        self._done = done
        self._results: dict[str, StatefulModuleOutput] = {}
        self.inputs: dict[str, Tree] = {}  # of the children called so far

    def __call__(self, name: str, x: Tree) -> Tree:
        """Runs the child `name` on `x` and returns its output.

        **Raises:** `ValueError` for an unknown child, a second call of one child (it has one
        state and one slot for extras), and leaves that do not lead with the batch axes.
        """
        child = self._container[name]
        with at_path(self._container.segment(name), child, x):
            if name in self._results:
                raise ValueError(
                    f"The child `{name}` of `{type(self._container).__name__}` was called twice "
                    "in one step. It has one state and one slot for extras, so the replay would "
                    "be wrong. Use two children; `call.local` is for arithmetic."
                )
            check_lead("The input", x, self._lead)
            self.inputs[name] = x
            check_lead("The state", self._states[name], self._lead[-1:])
            result = self._run(child, self._states[name], x, self._extras[name])
            self._check(result)
            check_closed("`next_state`", result.next_state, self._states[name])
        self._results[name] = result
        return result.output

    def local(self, fn: Callable[..., Tree], *xs: Tree) -> Tree:
        """Applies `fn` to trees whose leaves are `[B, *feat]`, in a step and a sequence.

        Parameters and constants have no batch axis: close over them in `fn`.
        """
        check_lead("An argument of `call.local` (`fn` closes over parameters)", xs, self._lead)
        if self._done is None:
            return fn(*xs)
        return split_time(fn(*(merge_time(x) for x in xs)), self._done.shape[0])

    def finish(self, output: Tree) -> StatefulModuleOutput:
        """The container's own result, from what its children returned."""
        called = [name for name in self._container.names if name in self._results]
        penalties = [self._results[name].regularization_loss for name in called]
        penalties = [penalty for penalty in penalties if penalty is not None]
        return StatefulModuleOutput(
            output=output,
            next_state=self._container.pack(
                {name: self._next_state(name) for name in self._container.names}
            ),
            rollout_extras=self._container.pack(
                {
                    name: self._results[name].rollout_extras if name in self._results else None
                    for name in self._container.names
                }
            ),
            regularization_loss=sum(penalties[1:], penalties[0]) if penalties else None,
            metrics=self._metrics(called),
        )

    def _run(
        self, child: StatefulModule, state: State, x: Tree, extras: Extras
    ) -> StatefulModuleOutput:
        if self._done is None:
            return child(state, x, extras)
        return child.unroll(state, x, self._done, extras)

    def _next_state(self, name: str) -> State:
        if name in self._results:
            return self._results[name].next_state
        state = self._states[name]
        if self._done is None:
            return state
        reset = self._container[name].reset_state(state)
        return tree_where(jnp.any(self._done, axis=0), reset, state)

    def _metrics(self, called: list[str]) -> Metrics | None:
        metrics = {name: self._results[name].metrics for name in called}
        metrics = {name: metric for name, metric in metrics.items() if metric is not None}
        return metrics or None

    def _check(self, result: StatefulModuleOutput) -> None:
        if not isinstance(result, StatefulModuleOutput):
            raise TypeError(
                f"A module must return a `StatefulModuleOutput`, but got `{type(result).__name__}`."
            )
        check_lead("The output", result.output, self._lead)
        check_lead("`next_state`", result.next_state, self._lead[-1:])
        check_lead("`rollout_extras`", result.rollout_extras, self._lead)
        check_lead("The metrics", result.metrics, self._lead)
        penalty = result.regularization_loss
        if penalty is not None and jnp.shape(penalty) != self._lead:
            raise ValueError(
                f"`regularization_loss` must have one value per environment, shape {self._lead}, "
                f"but has shape {jnp.shape(penalty)}. Sum or average over features only."
            )


def batch_of(state: State, x: Tree) -> tuple[int, ...]:
    """`(B,)`, read from the first array of the state or else of the input."""
    for leaf in jax.tree.leaves((state, x)):
        if jnp.ndim(leaf) > 0:
            return jnp.shape(leaf)[:1]
    raise ValueError(
        "A module needs at least one input or state leaf with a batch axis [B, ...], but got "
        f"the input {jax.tree.structure(x)} with shapes {jax.tree.map(jnp.shape, x)}."
    )
