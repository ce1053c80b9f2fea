"""Standard actor-critic networks, composed of the modules of this package."""

import functools
import operator
from collections.abc import Sequence

import equinox as eqx
import jax
from jax.core import Tracer
from jaxtyping import Array, Key

from eqx_ppo._keys import as_key
from eqx_ppo._typing import Activation, Initializer, KeyLike
from eqx_ppo.networks._adapter import PPOAdapter
from eqx_ppo.networks._dense import Dense
from eqx_ppo.networks._module import StatefulModule
from eqx_ppo.networks._normalizer import Normalizer
from eqx_ppo.networks._recurrent import GRU, LSTM
from eqx_ppo.networks._samplers import ActionSampler, NormalTanhSampler
from eqx_ppo.networks._sequential import Sequential

_SMALL_OUTPUT = 1e-2  # scale of the last actor layer: first actions near 0, deviations alike


def make_mlp_layers(
    sizes: Sequence[int],
    *,
    activation: Activation | None = jax.nn.swish,
    activation_last_layer: bool = True,
    kernel_init: Initializer | None = None,
    last_kernel_init: Initializer | None = None,
    key: KeyLike,
) -> list[Dense]:
    """A list of `Dense` layers, to be spread into a `Sequential`.

    **Arguments:**

    - `sizes`: sizes from the input to the output; `n + 1` sizes give `n` layers.
    - `activation`: the function between layers, `None` for none.
    - `activation_last_layer`: whether it also follows the last layer.
    - `kernel_init`, `last_kernel_init`: initializers of all kernels and of the last one;
        LeCun uniform by default.
    - `key`: a PRNG key.

    **Raises:** `ValueError` for fewer than two sizes.
    """
    if len(sizes) < 2:
        raise ValueError(
            f"`sizes` needs at least an input and an output size, but got {list(sizes)}."
        )
    n_layers = len(sizes) - 1
    layers = []
    for index, layer_key in enumerate(jax.random.split(as_key(key), n_layers)):
        is_last = index == n_layers - 1
        layers.append(
            Dense(
                sizes[index],
                sizes[index + 1],
                activation=None if is_last and not activation_last_layer else activation,
                kernel_init=last_kernel_init if is_last and last_kernel_init else kernel_init,
                key=layer_key,
            )
        )
    return layers


def make_mlp(
    sizes: Sequence[int],
    *,
    activation: Activation | None = jax.nn.swish,
    activation_last_layer: bool = True,
    kernel_init: Initializer | None = None,
    last_kernel_init: Initializer | None = None,
    key: KeyLike,
) -> Sequential:
    """A multilayer perceptron as one module; arguments as for `make_mlp_layers`."""
    layers = make_mlp_layers(
        sizes,
        activation=activation,
        activation_last_layer=activation_last_layer,
        kernel_init=kernel_init,
        last_kernel_init=last_kernel_init,
        key=key,
    )
    return Sequential(layers)


def make_mlp_actor_critic(
    obs_size: int,
    action_size: int,
    actor_hidden_sizes: Sequence[int],
    critic_hidden_sizes: Sequence[int],
    *,
    key: KeyLike,
    activation: Activation = jax.nn.swish,
    normalize_obs: bool = True,
    sampler: ActionSampler | None = None,
) -> StatefulModule:
    """The standard network: `Sequential([Normalizer, PPOAdapter(action=..., value=...)])`.

    Actor and critic share the normalizer and nothing else. The last actor layer starts at a
    hundredth of LeCun's scale.

    **Arguments:**

    - `obs_size`, `action_size`: sizes of the flat observation and action. A discrete action
        is one number.
    - `actor_hidden_sizes`, `critic_hidden_sizes`: hidden layers of the two.
    - `key`: a PRNG key.
    - `activation`: the function after each hidden layer.
    - `normalize_obs`: whether observations are standardized by running statistics.
    - `sampler`: the action distribution; `NormalTanhSampler(entropy_weight=1e-2)` by default.
        The last actor layer has as many outputs as it takes.

    **Raises:** `ValueError` for a sampler that is made for another `action_size`.
    """
    sampler = _or_default(sampler)
    actor_sizes = [obs_size, *actor_hidden_sizes, sampler.input_size(action_size)]
    critic_sizes = [obs_size, *critic_hidden_sizes, 1]
    keys = jax.random.split(as_key(key))
    actor, critic = _dense_layers(actor_sizes, critic_sizes, activation, keys)
    return _assemble(obs_size, actor, critic, normalize_obs, sampler)


def make_recurrent_actor_critic(  # noqa: PLR0913 (a network is this many choices)
    obs_size: int,
    action_size: int,
    hidden_features: int,
    *,
    key: KeyLike,
    cell: type[LSTM] | type[GRU] = LSTM,
    actor_hidden_sizes: Sequence[int] = (),
    critic_hidden_sizes: Sequence[int] = (),
    activation: Activation = jax.nn.swish,
    trainable_initial_state: bool = False,
    normalize_obs: bool = True,
    sampler: ActionSampler | None = None,
) -> StatefulModule:
    """The recurrent twin of `make_mlp_actor_critic`: a cell, then dense layers, in each port.

    **Arguments:** as for `make_mlp_actor_critic`, and

    - `hidden_features`: size of the recurrent state in the actor and in the critic.
    - `cell`: `LSTM` or `GRU`.
    - `actor_hidden_sizes`, `critic_hidden_sizes`: dense layers after the cell.
    - `trainable_initial_state`: see `LSTM`.
    """
    sampler = _or_default(sampler)
    actor_sizes = [hidden_features, *actor_hidden_sizes, sampler.input_size(action_size)]
    critic_sizes = [hidden_features, *critic_hidden_sizes, 1]

    def make_cell(key):
        return cell(
            obs_size, hidden_features, trainable_initial_state=trainable_initial_state, key=key
        )

    keys = jax.random.split(as_key(key), 4)
    actor, critic = _dense_layers(actor_sizes, critic_sizes, activation, keys[2:])
    return _assemble(
        obs_size,
        [make_cell(keys[0]), *actor],
        [make_cell(keys[1]), *critic],
        normalize_obs,
        sampler,
    )


def _or_default(sampler: ActionSampler | None) -> ActionSampler:
    return NormalTanhSampler(entropy_weight=1e-2) if sampler is None else sampler


def _dense_layers(
    actor_sizes: Sequence[int],
    critic_sizes: Sequence[int],
    activation: Activation,
    keys: Key[Array, " networks"],
) -> tuple[list[Dense], list[Dense]]:
    """The dense layers of actor and critic."""
    sizes = (tuple(map(operator.index, widths)) for widths in (actor_sizes, critic_sizes))
    draw = _draw_traced if isinstance(keys, Tracer) else _draw_eagerly
    actor, critic = (_with_activation(layers, activation) for layers in draw(*sizes, *keys))
    return actor, critic


def _draw(
    actor_sizes: tuple[int, ...],
    critic_sizes: tuple[int, ...],
    actor_key: Key[Array, ""],
    critic_key: Key[Array, ""],
) -> tuple[list[Dense], list[Dense]]:
    """All weights in one compiled function, and no activations.

    One by one, every shape of a kernel would be a function of its own to compile. That takes a
    second for a network of usual size.
    """
    small = jax.nn.initializers.variance_scaling(_SMALL_OUTPUT**2, "fan_in", "uniform")
    make = functools.partial(make_mlp_layers, activation=None)
    return (
        make(actor_sizes, last_kernel_init=small, key=actor_key),
        make(critic_sizes, key=critic_key),
    )


_draw_traced = jax.jit(_draw, static_argnums=(0, 1))
_draw_eagerly = jax.jit(
    _draw, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}
)
"""Compiles in half the time, and gives the same weights. Not for use under `jax.jit` and the like:
within another function JAX refuses `compiler_options`."""


def _with_activation(layers: list[Dense], activation: Activation) -> list[Dense]:
    """The layers with `activation` after all but the last one."""
    hidden = [
        eqx.tree_at(lambda layer: layer.activation, layer, activation, is_leaf=lambda x: x is None)
        for layer in layers[:-1]
    ]
    return [*hidden, layers[-1]]


def _assemble(
    obs_size: int,
    actor: Sequence[StatefulModule],
    critic: Sequence[StatefulModule],
    normalize_obs: bool,
    sampler: ActionSampler,
) -> StatefulModule:
    adapter = PPOAdapter(action=Sequential([*actor, sampler]), value=Sequential(critic))
    return Sequential([Normalizer(obs_size), adapter] if normalize_obs else [adapter])
