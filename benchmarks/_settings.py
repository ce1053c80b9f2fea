"""What is measured: workloads, and how thoroughly they are timed."""

import dataclasses
from typing import Literal, final

NetworkKind = Literal["mlp", "lstm"]


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One workload: an environment, a network and the size of an iteration.

    Every peer derives its own arguments from this record alone.

    **Arguments:**

    - `env`: a name of MuJoCo Playground (loaded with `impl="jax"`), or `"Pendulum"` or
        `"Recall"` (a memory task) of this library.
    - `network`: `"mlp"`, or `"lstm"` for the same layers after a cell, in actor and in critic.
    - `n_envs`, `rollout_length`: environment steps per iteration.
    - `n_epochs`, `n_minibatches`: gradient steps per iteration.
    - `actor_sizes`, `critic_sizes`: hidden dense layers.
    - `lstm_features`: size of the recurrent state.
    - `episode_length`: time limit, in steps.
    - `epoch_iterations`: iterations that a peer runs without coming back to the host's
        control; a timing is a multiple of it.
    - `learning_rate`, `discounting`, `gae_lambda`, `clip_range`, `entropy_weight`: of PPO.
    - `begin_alike`: whether the last layer of this library's actor begins at the size of the
        others, as in nnx-ppo and brax; by default it is a hundredth of that. It changes no time.
    """

    env: str = "CartpoleBalance"
    network: NetworkKind = "mlp"
    n_envs: int = 256
    rollout_length: int = 20
    n_epochs: int = 4
    n_minibatches: int = 4
    actor_sizes: tuple[int, ...] = (64, 64, 64, 64)
    critic_sizes: tuple[int, ...] = (256, 256)
    lstm_features: int = 64
    episode_length: int = 1000
    epoch_iterations: int = 16
    learning_rate: float = 3e-4
    discounting: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_weight: float = 1e-2
    begin_alike: bool = False

    @property
    def name(self) -> str:
        """A short label, such as `CartpoleBalance mlp 256x20`."""
        alone = not (self.actor_sizes or self.critic_sizes)
        network = f"{self.network} alone" if alone else self.network
        begin = ", begun alike" if self.begin_alike else ""
        return f"{self.env} {network} {self.n_envs}x{self.rollout_length}{begin}"

    @property
    def counts(self) -> "Counts":
        """What an iteration consists of."""
        steps = self.n_envs * self.rollout_length
        return Counts(
            env_steps=steps,
            gradient_steps=self.n_epochs * self.n_minibatches,
            samples_per_gradient=steps // self.n_minibatches,
        )


@final
@dataclasses.dataclass(frozen=True)
class Counts:
    """The work of one iteration, as a peer's own arguments define it.

    - `env_steps`: steps over all environments.
    - `gradient_steps`: updates of the weights.
    - `samples_per_gradient`: environment steps that each of them learns from.
    """

    env_steps: int
    gradient_steps: int
    samples_per_gradient: int


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run of the suites measures.

    **Arguments:**

    - `repeats`: timings of each thing; peers take turns, so that a ratio is one of
        neighbors in time.
    - `seconds`: what one timing should about take; as many iterations as that needs.
    - `envs`: the environments to measure in; those of the suite if empty.
    - `networks`: kinds of network (`mlp`, `lstm`) to measure; all if empty.
    - `quick`: tiny workloads, to see that everything runs. The figures mean nothing.
    - `peers`: names of the peers to run.
    - `seeds`, `total_steps`: runs per peer and steps per run of the suite `learning`.
    """

    repeats: int = 5
    seconds: float = 1.0
    envs: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    quick: bool = False
    peers: tuple[str, ...] = ("eqx-ppo", "nnx-ppo", "brax")
    seeds: int = 5
    total_steps: int = 1_000_000

    def workloads(self, *defaults: Setting) -> list[Setting]:
        """The settings of a suite: its own, or those of `envs` and `networks`; tiny if `quick`."""
        chosen = [setting for setting in defaults if not self.envs or setting.env in self.envs]
        known = {setting.env for setting in defaults}
        chosen += [setting_for(env) for env in self.envs if env not in known]
        chosen = [one for one in chosen if not self.networks or one.network in self.networks]
        return [tiny(setting) for setting in chosen] if self.quick else chosen


def setting_for(env: str) -> Setting:
    """The usual workload in `env`: 256 environments, or 64 where the physics is slow."""
    return Setting(env=env, n_envs=64 if env in SLOW_ENVS else 256)


def tiny(setting: Setting) -> Setting:
    """The same kind of workload in a few seconds."""
    return dataclasses.replace(
        setting,
        n_envs=8,
        rollout_length=4,
        n_epochs=2,
        n_minibatches=2,
        epoch_iterations=2,
        episode_length=20,
    )


SLOW_ENVS = ("CheetahRun", "HopperHop", "HopperStand", "WalkerRun", "WalkerStand", "WalkerWalk")

CARTPOLE = setting_for("CartpoleBalance")
CARTPOLE_64 = dataclasses.replace(CARTPOLE, n_envs=64)
CARTPOLE_LSTM = dataclasses.replace(CARTPOLE, network="lstm")
CARTPOLE_LSTM_ALONE = dataclasses.replace(CARTPOLE_LSTM, actor_sizes=(), critic_sizes=())
CHEETAH = setting_for("CheetahRun")
LARGE = dataclasses.replace(CARTPOLE, n_envs=4096, rollout_length=100, epoch_iterations=1)
