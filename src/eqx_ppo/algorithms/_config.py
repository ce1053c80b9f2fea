"""Configuration records of the algorithm: frozen, validated when built, passed whole."""

import dataclasses
import enum
import math
from typing import Literal, final

import numpy as np
import optax
from jaxtyping import Array, ScalarLike

from eqx_ppo.envs import PooledReset, ResetStrategy
from eqx_ppo.ops import AdvantageNormalization

Truncation = Literal["bootstrap", "mask"]
"""What a step at a time limit is worth: bootstrapped, or left out of the advantages."""


@final
class LoggingLevel(enum.Flag):
    """Families of metrics; combine with `|`. What is not asked for is not computed."""

    LOSSES = enum.auto()
    """The terms of the loss, the first-minibatch ratio error, skipped updates."""
    CRITIC_EXTRA = enum.auto()
    """Explained variance, advantages and predicted values."""
    ACTOR_EXTRA = enum.auto()
    """Clipping fraction, approximate KL divergence, log-likelihoods."""
    ROLLOUT_STATS = enum.auto()
    """Rewards, actions, and the rates of episode ends."""
    ROLLOUT_OBS = enum.auto()
    """Observations, leaf by leaf; not part of `ALL`."""
    ENV_METRICS = enum.auto()
    """What the environment reports in `state.metrics`."""
    NETWORK_METRICS = enum.auto()
    """What the modules report."""
    GRAD_NORM = enum.auto()
    """The global norm of the gradient, before clipping."""
    WEIGHTS = enum.auto()
    """The distribution of the trained weights."""
    THROUGHPUT = enum.auto()
    """Environment steps per second (measured by the training loop)."""
    NONE = 0
    BASIC = LOSSES
    ALL = (
        LOSSES
        | CRITIC_EXTRA
        | ACTOR_EXTRA
        | ROLLOUT_STATS
        | ENV_METRICS
        | NETWORK_METRICS
        | GRAD_NORM
        | WEIGHTS
        | THROUGHPUT
    )


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Parameters of PPO.

    Python numbers are validated when the record is built. Array-valued hyperparameters
    (traced, so that they can be vmapped over) are taken as they are; of the fields below
    that is `gae_lambda`, `discounting_factor`, `clip_range`, `value_clip_range`,
    `learning_rate`, `critic_loss_weight`, `gradient_clipping` and `weight_decay`.

    **Arguments:**

    - `n_envs`: environments stepped in parallel.
    - `rollout_length`: steps of each environment per iteration.
    - `total_steps`: environment steps of a whole training run; it ends with the first
        iteration that reaches them.
    - `gae_lambda`, `discounting_factor`: of the advantage estimates.
    - `clip_range`: the likelihood ratio is clipped to `1 +- clip_range`.
    - `value_clip_range`: clips the change of the value estimate; `None` for no clipping.
    - `learning_rate`: a number or an `optax` schedule over updates, of the default optimizer
        (Adam); `None` for 3e-4.
    - `gradient_clipping`: largest global gradient norm; `None` for no clipping.
    - `weight_decay`: turns Adam into AdamW; `None` for none.
    - `normalize_advantages`: over each `"minibatch"`, over the whole `"batch"`, or
        `"none"`; `True` and `False` stand for the first and the last.
    - `combine_advantages`: sums the advantages of all rewards into one for every sampler.
    - `advantages`: computed once per `"rollout"`, or again in each `"minibatch"` with the
        current critic (values at truncated steps and segment ends stay the rollout's).
    - `truncation`: at a time limit `"bootstrap"` from the value of the true next observation,
        or `"mask"` the step: its temporal difference counts as 0, so that its advantage is 0
        and its value target the value itself (what brax and nnx-ppo do; it saves evaluating
        those observations). A step that also terminated counts as terminated.
    - `n_epochs`, `n_minibatches`: passes over a rollout, and parts per pass.
    - `segment_length`: backpropagate through at most this many steps, and make minibatches
        of segments; it divides `rollout_length`. `None` for the whole rollout.
    - `replay_chunks`: runs the replay of a minibatch in this many parts, one after another,
        and again in the backward pass, so that activations of one part at a time are held:
        less memory for the time of a second forward pass. It does not change results.
    - `critic_loss_weight`: weight of the value loss.
    - `reset_strategy`: where the next episode starts.
    - `iterations_per_call`: iterations that the training loop runs per compiled call, at
        most; it does not change results.
    - `logging_level`, `logging_percentiles`: which metrics, and percentiles (0 to 100) to
        give besides mean and deviation.

    **Raises:** `ValueError` for numbers out of range or that do not fit each other.
    """

    n_envs: int = 256
    rollout_length: int = 20
    total_steps: int = 512_000
    gae_lambda: ScalarLike = 0.95
    discounting_factor: ScalarLike = 0.99
    clip_range: ScalarLike = 0.2
    value_clip_range: ScalarLike | None = None
    learning_rate: optax.ScalarOrSchedule | None = None
    gradient_clipping: float | Array | None = None
    weight_decay: optax.ScalarOrSchedule | None = None
    normalize_advantages: AdvantageNormalization | bool = "minibatch"
    combine_advantages: bool = False
    advantages: Literal["rollout", "minibatch"] = "rollout"
    truncation: Truncation = "bootstrap"
    n_epochs: int = 4
    n_minibatches: int = 4
    segment_length: int | None = None
    replay_chunks: int = 1
    critic_loss_weight: ScalarLike = 1.0
    reset_strategy: ResetStrategy = PooledReset()
    iterations_per_call: int = 8
    logging_level: LoggingLevel = LoggingLevel.LOSSES
    logging_percentiles: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.normalize_advantages, bool):
            choice = "minibatch" if self.normalize_advantages else "none"
            object.__setattr__(self, "normalize_advantages", choice)
        for name in (
            "n_envs",
            "rollout_length",
            "n_epochs",
            "n_minibatches",
            "replay_chunks",
            "iterations_per_call",
        ):
            _check_whole(self, name, 1)
        _check_whole(self, "total_steps", 0)
        for name in ("gae_lambda", "discounting_factor"):
            _check_number(self, name, 0.0, 1.0)
        for name in ("clip_range", "value_clip_range", "gradient_clipping"):
            _check_number(self, name, 0.0, math.inf, strict=True)
        for name in ("learning_rate", "weight_decay", "critic_loss_weight"):
            _check_number(self, name, 0.0, math.inf)
        _check_choice(self, "normalize_advantages", ("minibatch", "batch", "none"))
        _check_choice(self, "advantages", ("rollout", "minibatch"))
        _check_choice(self, "truncation", ("bootstrap", "mask"))
        _check_percentiles(self)
        _check_kind(self, "reset_strategy", ResetStrategy, "such as `PooledReset()`")
        _check_kind(self, "logging_level", LoggingLevel, "such as `LoggingLevel.ALL`")
        self._check_division()

    @property
    def n_segments(self) -> int:
        """Segments per rollout."""
        return self.rollout_length // (self.segment_length or self.rollout_length)

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps per iteration."""
        return self.n_envs * self.rollout_length

    def _check_division(self) -> None:
        if self.segment_length is not None:
            _check_whole(self, "segment_length", 1)
            if self.rollout_length % self.segment_length:
                raise ValueError(
                    "`segment_length` must divide `rollout_length`, but got "
                    f"segment_length={self.segment_length} and "
                    f"rollout_length={self.rollout_length}."
                )
        samples = self.n_envs * self.n_segments
        if samples % self.n_minibatches:
            raise ValueError(
                f"`n_minibatches` must divide n_envs * segments per rollout, but got "
                f"n_minibatches={self.n_minibatches} for n_envs={self.n_envs} * "
                f"{self.n_segments} = {samples}. No environment is dropped: choose a divisor."
            )
        if (samples // self.n_minibatches) % self.replay_chunks:
            raise ValueError(
                "`replay_chunks` must divide the samples of a minibatch, but got replay_chunks="
                f"{self.replay_chunks} for {samples} / n_minibatches={self.n_minibatches} = "
                f"{samples // self.n_minibatches}."
            )
        if self.advantages == "minibatch" and self.normalize_advantages == "batch":
            raise ValueError(
                '`normalize_advantages="batch"` needs advantages of the whole rollout, but '
                '`advantages="minibatch"` computes them in each minibatch. Choose '
                '`advantages="rollout"` or `normalize_advantages="minibatch"`.'
            )


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Parameters of an evaluation: one episode in each of `n_envs` environments.

    **Arguments:**

    - `enabled`: whether `train_ppo` evaluates at all.
    - `every_steps`: evaluate when training has passed another multiple of this many
        environment steps (and before and after training).
    - `n_envs`: episodes per evaluation.
    - `max_episode_length`: an episode that has not ended is counted as it stands then.
    - `deterministic`: act by the mode (`equinox.nn.inference_mode`) instead of sampling.
    - `vary_key`: whether every evaluation of a run starts from other initial states, so that
        their average is that over all of them. Otherwise all start from the same, so that a
        difference between two evaluations is one of the policy.
    - `logging_level`: `ENV_METRICS` and `NETWORK_METRICS` add the mean over each episode.
    - `logging_percentiles`: percentiles of returns and lengths to give besides the mean.
    """

    enabled: bool = True
    every_steps: int = 100_000
    n_envs: int = 32
    max_episode_length: int = 1000
    deterministic: bool = True
    vary_key: bool = True
    logging_level: LoggingLevel = LoggingLevel.NONE
    logging_percentiles: tuple[int, ...] | None = (0, 25, 50, 75, 100)

    def __post_init__(self) -> None:
        for name in ("every_steps", "n_envs", "max_episode_length"):
            _check_whole(self, name, 1)
        _check_percentiles(self)
        _check_kind(self, "logging_level", LoggingLevel, "such as `LoggingLevel.ENV_METRICS`")


def _check_whole(record: object, name: str, at_least: int) -> None:
    value = vars(record)[name]
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(
            f"`{type(record).__name__}.{name}` must be an int of at least {at_least}, but got "
            f"{value!r}."
        )


def _check_number(
    record: object, name: str, low: float, high: float, *, strict: bool = False
) -> None:
    value = vars(record)[name]
    if not isinstance(value, int | float | np.number):
        return  # an array, a schedule or None
    inside = low < value <= high if strict else low <= value <= high
    if not inside:
        left = "(" if strict else "["
        raise ValueError(
            f"`{type(record).__name__}.{name}` must be in {left}{low}, {high}], but got {value!r}."
        )


def _check_choice(record: object, name: str, choices: tuple[str, ...]) -> None:
    value = vars(record)[name]
    if value not in choices:
        raise ValueError(
            f"`{type(record).__name__}.{name}` must be one of {choices}, but got {value!r}."
        )


def _check_kind(record: object, name: str, kind: type, example: str) -> None:
    value = vars(record)[name]
    if not isinstance(value, kind):
        raise TypeError(
            f"`{type(record).__name__}.{name}` must be a `{kind.__name__}`, {example}, but got "
            f"`{value!r}`."
        )


def _check_percentiles(record: object) -> None:
    values = vars(record)["logging_percentiles"]
    if values is not None and not all(0 <= value <= 100 for value in values):
        raise ValueError(
            f"`{type(record).__name__}.logging_percentiles` must lie in 0 to 100, but got "
            f"{values!r}."
        )
