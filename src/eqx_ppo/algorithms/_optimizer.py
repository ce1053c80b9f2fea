"""The default optimizer."""

import optax

from eqx_ppo.algorithms._config import PPOConfig

_LEARNING_RATE = 3e-4


def make_optimizer(
    config: PPOConfig, optimizer: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Adam as `config` describes it, or the given optimizer.

    That is: clipping of the global gradient norm if `gradient_clipping` is set, then Adam, or
    AdamW if `weight_decay` is set, with `learning_rate` (3e-4 by default).

    **Raises:** `ValueError` if an optimizer is given and one of these fields is set too: it
    would have no effect.
    """
    if optimizer is not None:
        fields = ("learning_rate", "gradient_clipping", "weight_decay")
        unused = [name for name in fields if vars(config)[name] is not None]
        if unused:
            raise ValueError(
                f"`PPOConfig` sets {unused}, but an optimizer was given too, which they do not "
                "reach. Build them into the optimizer (`optax.chain`), or leave them `None`."
            )
        return optimizer
    rate = _LEARNING_RATE if config.learning_rate is None else config.learning_rate
    if config.weight_decay is None:
        descent = optax.adam(rate)
    else:
        descent = optax.adamw(rate, weight_decay=config.weight_decay)
    if config.gradient_clipping is None:
        return descent
    return optax.chain(optax.clip_by_global_norm(config.gradient_clipping), descent)
