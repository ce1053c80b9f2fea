"""PPO's update for a plain MLP, written out without this library's networks and trees.

What its compiled form needs in memory is what an update needs. The formulas of loss and
likelihood are those of `eqx_ppo.ops`, so that both do the same arithmetic.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from benchmarks._environments import Sizes
from benchmarks._floors import layer_sizes
from benchmarks._settings import Setting
from eqx_ppo import ops
from eqx_ppo._typing import Tree


class Experience(NamedTuple):
    """A rollout, arrays `[T, B, ...]` or their shapes: what an update cannot do without."""

    obs: Tree
    raw_actions: Tree
    log_likelihoods: Tree
    rewards: Tree
    values: Tree
    next_values: Tree
    terminated: Tree
    truncated: Tree


class Sample(NamedTuple):
    """What a gradient step learns from, `[T, M, ...]`."""

    obs: Array
    raw_actions: Array
    log_likelihoods: Array
    advantages: Array
    targets: Array


Layers = list[tuple[Array, Array]]


def experience_shapes(setting: Setting, sizes: Sizes) -> Experience:
    """The abstract rollout of a setting."""
    batch = (setting.rollout_length, setting.n_envs)

    def floats(*features):
        return jax.ShapeDtypeStruct((*batch, *features), jnp.float32)

    flags = jax.ShapeDtypeStruct(batch, jnp.bool_)
    one = floats()
    return Experience(floats(sizes.obs), floats(sizes.action), one, one, one, one, flags, flags)


def make_experience(shapes: Experience) -> Experience:
    """Some numbers in these shapes; an update takes the same time for any."""
    keys = jax.random.split(jax.random.key(0), len(shapes))

    def fill(key, shape):
        numbers = jax.random.normal(key, shape.shape, jnp.float32)
        return numbers.astype(shape.dtype) if shape.dtype == jnp.float32 else numbers > 3.0

    return Experience(*(fill(key, shape) for key, shape in zip(keys, shapes, strict=True)))


def init(setting: Setting, sizes: Sizes, key: Array) -> dict[str, Layers]:
    """LeCun-uniform kernels and zero biases."""
    params = {}
    for name, widths in layer_sizes(setting, sizes).items():
        layers = []
        for inner, outer in itertools.pairwise(widths):
            key, one = jax.random.split(key)
            kernel = jax.nn.initializers.lecun_uniform()(one, (inner, outer), jnp.float32)
            layers.append((kernel, jnp.zeros(outer, jnp.float32)))
        params[name] = layers
    return params


def make_update(setting: Setting) -> tuple[optax.GradientTransformation, Callable]:
    """The optimizer, and `update(params, optimizer_state, experience, key)`."""
    optimizer = optax.adam(setting.learning_rate)

    def step(experience, carry, envs):
        params, optimizer_state = carry
        batch = jax.tree.map(lambda leaf: jnp.take(leaf, envs, axis=1), experience)
        grads = jax.grad(_loss)(params, batch, setting)
        with jax.numpy_dtype_promotion("standard"):  # optax fails under "strict"
            updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), None

    def update(params, optimizer_state, experience: Experience, key):
        advantages = ops.gae(
            experience.rewards,
            experience.values,
            experience.next_values,
            experience.terminated,
            experience.truncated,
            gamma=setting.discounting,
            lambda_=setting.gae_lambda,
        )
        data = Sample(
            experience.obs,
            experience.raw_actions,
            experience.log_likelihoods,
            advantages,
            experience.values + advantages,
        )
        bits = jax.random.bits(key, (setting.n_epochs, setting.n_envs), jnp.uint32)
        order = jnp.argsort(bits, axis=1).reshape(setting.counts.gradient_steps, -1)
        return jax.lax.scan(
            lambda carry, envs: step(data, carry, envs), (params, optimizer_state), order
        )[0]

    return optimizer, update


def _loss(params: dict[str, Layers], batch: Sample, setting: Setting) -> Array:
    batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
    mean, pre_std = jnp.split(_mlp(params["actor"], batch.obs), 2, axis=-1)
    std = jax.nn.softplus(pre_std) + 0.1
    log_likelihood = ops.tanh_normal_log_likelihood(batch.raw_actions, mean, std).sum(-1)
    ratio = ops.likelihood_ratio(log_likelihood, batch.log_likelihoods)
    advantages = ops.normalize_advantages(batch.advantages)
    value = _mlp(params["critic"], batch.obs)[:, 0]
    actor = -jnp.mean(ops.clipped_surrogate(ratio, advantages, setting.clip_range))
    critic = 0.5 * jnp.mean(jnp.square(value - batch.targets))
    entropy = jnp.mean(ops.tanh_normal_entropy(mean, std).sum(-1))
    return actor + critic - setting.entropy_weight * entropy


def _mlp(layers: Layers, x: Array) -> Array:
    *hidden, (kernel, bias) = layers
    for weight, offset in hidden:
        x = jax.nn.swish(x @ weight + offset[None])
    return x @ kernel + bias[None]
