"""PPO's loss once more, in plain NumPy and float64, one sample at a time where it can be."""

import numpy as np

from eqx_ppo.algorithms import Transition


def as_numpy(tree):
    """A dict, array or NamedTuple of arrays, in float64 where it is floating."""
    if isinstance(tree, dict):
        return {name: as_numpy(value) for name, value in tree.items()}
    array = np.asarray(tree)
    return array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array


def by_name(tree):
    """A dictionary for a dictionary or for a single array."""
    return tree if isinstance(tree, dict) else {"": tree}


def entropy(mean, std):
    """Of the tanh-squashed normal, by a fine grid, summed over the last axis."""
    z = np.linspace(-10, 10, 4001)
    weights = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    u = mean[..., None] + std[..., None] * z
    log_slope = 2 * (np.log(2) - np.logaddexp(u, -u))
    gaussian = 0.5 * np.log(2 * np.pi * np.e) + np.log(std)
    return np.sum(gaussian + np.sum(weights * log_slope, axis=-1), axis=-1)


def log_likelihood(pre_tanh, mean, std):
    gaussian = -0.5 * ((pre_tanh - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    log_slope = 2 * (np.log(2) - np.logaddexp(pre_tanh, -pre_tanh))
    return np.sum(gaussian - log_slope, axis=-1)


def gae(rewards, values, next_values, terminated, truncated, valid, gamma, lambda_):
    advantages = np.zeros(rewards.shape)
    n_steps, n_envs = rewards.shape
    for env in range(n_envs):
        following = 0.0
        for t in reversed(range(n_steps)):
            ended = terminated[t, env] or truncated[t, env]
            next_value = 0.0 if terminated[t, env] else next_values[t, env]
            delta = rewards[t, env] + gamma * next_value - values[t, env]
            delta = delta if valid[t, env] else 0.0
            following = delta + (0.0 if ended else gamma * lambda_ * following)
            advantages[t, env] = following
    return advantages


def normalize(advantages, valid):
    chosen = advantages[valid]
    return (advantages - chosen.mean()) / (chosen.std() + 1e-8)


def actor_critic(network, obs, pre_tanh, entropy_weight):
    """Of `Sequential([Dense(tanh), PPOAdapter(policies, values)])`: likelihoods, values, penalty.

    `network` is `{"trunk": (kernel, bias), "action": {name: ...}, "value": {name: ...}}`.
    """
    kernel, bias = network["trunk"]
    features = np.tanh(obs @ kernel + bias)
    likelihoods, values, penalty = {}, {}, 0.0
    for name, (kernel, bias) in network["action"].items():
        mean, pre_std = np.split(features @ kernel + bias, 2, axis=-1)
        std = np.logaddexp(0, pre_std) + 0.1
        likelihoods[name] = log_likelihood(pre_tanh[name], mean, std)
        penalty = penalty - entropy_weight * entropy(mean, std)
    for name, (kernel, bias) in network["value"].items():
        values[name] = (features @ kernel + bias)[..., 0]
    return likelihoods, values, penalty


def ppo_losses(network, transitions: Transition, pre_tanh, envs, config, entropy_weight):
    """The terms of the loss of a minibatch of whole rollouts of some environments."""
    t = transitions
    names = sorted(by_name(as_numpy(t.rewards)))
    rewards, next_values, old_values, old_likelihoods, pre_tanh = (
        by_name(as_numpy(tree))
        for tree in (
            t.rewards,
            t.next_values,
            t.network_output.value_estimates,
            t.network_output.log_likelihoods,
            pre_tanh,
        )
    )
    terminated, truncated, valid = map(np.asarray, (t.terminated, t.truncated, t.valid))
    likelihoods, values, penalty = actor_critic(network, as_numpy(t.obs), pre_tanh, entropy_weight)
    gamma, lambda_ = float(config.discounting_factor), float(config.gae_lambda)
    counted = valid & ~truncated if config.truncation == "mask" else valid
    advantages, targets = {}, {}
    for name in names:
        base, following = old_values[name], next_values[name]
        if config.advantages == "minibatch":
            base = values[name]
            following = np.where(
                truncated, next_values[name], np.concatenate([base[1:], next_values[name][-1:]])
            )
        advantages[name] = gae(
            rewards[name], base, following, terminated, truncated, counted, gamma, lambda_
        )
        targets[name] = base + advantages[name]
    if config.combine_advantages:
        total = sum(advantages.values())
        advantages = dict.fromkeys(likelihoods, total)
    if config.normalize_advantages == "batch":
        advantages = {name: normalize(value, valid) for name, value in advantages.items()}

    chosen = np.ix_(np.arange(valid.shape[0]), envs)
    valid = valid[chosen]
    actor, critic, worst = {}, {}, 0.0
    for name, likelihood in likelihoods.items():
        ratio = np.exp(likelihood[chosen] - old_likelihoods[name][chosen])
        advantage = advantages[name][chosen]
        if config.normalize_advantages == "minibatch":
            advantage = normalize(advantage, valid)
        limit = float(config.clip_range)
        clipped = np.clip(ratio, 1 - limit, 1 + limit)
        actor[name] = -np.minimum(ratio * advantage, clipped * advantage)[valid].mean()
        worst = max(worst, np.abs(ratio - 1)[valid].max())
    for name in names:
        value, target, old = (part[name][chosen] for part in (values, targets, old_values))
        error = (value - target) ** 2
        if config.value_clip_range is not None:
            limit = float(config.value_clip_range)
            near = old + np.clip(value - old, -limit, limit)
            error = np.maximum(error, (near - target) ** 2)
        critic[name] = 0.5 * error[valid].mean()
    penalty = penalty[chosen][valid].mean()
    weight = float(config.critic_loss_weight)
    return {
        "actor": actor,
        "critic": critic,
        "regularization": penalty,
        "ratio_error": worst,
        "total": sum(actor.values()) + weight * sum(critic.values()) + penalty,
    }
