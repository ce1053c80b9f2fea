"""A carry and the extras of a network in the form of its ancestor's twin."""

import functools

import jax.numpy as jnp

from eqx_ppo import networks as nets


@functools.singledispatch
def state_to_ancestor(module, state):
    """The carry of `module` in the ancestor's form; leaves `[B, ...]`."""
    del module
    return state


@state_to_ancestor.register
def _(module: nets.LSTM, state):
    return state.cell, state.hidden


@state_to_ancestor.register
def _(module: nets.Delay, state):
    return {"buffer": state.buffer, "idx": state.position}


@state_to_ancestor.register
def _(module: nets.AR1VariationalBottleneck, state):
    known = state.has_previous[:, None]
    return {"keys": state.random, "last_z": jnp.where(known, state.previous, jnp.nan)}


@state_to_ancestor.register
def _(module: nets.NormalTanhSampler, state):
    return ()


@state_to_ancestor.register
def _(module: nets.Container, state):
    return _by_child(module, state, state_to_ancestor)


@state_to_ancestor.register
def _(module: nets.Sequential, state):
    return list(_by_child(module, state, state_to_ancestor).values())


@state_to_ancestor.register
def _(module: nets.PopulationGraph, state):
    buffers = {
        name: {"buffer": ring.buffer, "buffer_idx": ring.position} if ring else {}
        for name, ring in state["populations"].items()
    }
    inner = _by_child(module.connections, state["connections"], state_to_ancestor)
    return {"populations": buffers, "connections": list(inner.values())}


@functools.singledispatch
def extras_to_ancestor(module, extras):
    """What `module` emitted in the ancestor's form; leaves `[T, B, ...]` or `[B, ...]`."""
    del module
    return extras


@extras_to_ancestor.register
def _(module: nets.Container, extras):
    return _by_child(module, extras, extras_to_ancestor)


@extras_to_ancestor.register
def _(module: nets.Sequential, extras):
    return list(_by_child(module, extras, extras_to_ancestor).values())


@extras_to_ancestor.register
def _(module: nets.PopulationGraph, extras):
    inner = _by_child(module.connections, extras["connections"], extras_to_ancestor)
    return {"connections": list(inner.values())}


def _by_child(container, packed, translate):
    parts = packed if isinstance(packed, dict) else dict(zip(container.names, packed, strict=True))
    return {name: translate(container[name], parts[name]) for name in container.names}
