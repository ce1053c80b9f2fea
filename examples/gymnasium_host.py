"""Trains on Gymnasium's CartPole-v1, whose environments are Python objects on the host.

    python examples/gymnasium_host.py [--seed 0] [--total-steps 80000] [--env CartPole-v1]

The rollout is compiled like any other, and calls the host once per step for all environments.
Training and evaluation each need a vector environment of their own, and the reset strategy is
`HostReset`.

Expect a return of 500 (the greatest there is) within half a minute.
"""

import argparse

import jax
import optax

import eqx_ppo as ep
from eqx_ppo.algorithms import make_sampler
from eqx_ppo.envs import HostReset, load_gymnasium

N_ENVS = 16
ROLLOUT_LENGTH = 32


def main() -> None:
    """Trains, then evaluates by the mode of the policy."""
    parser = argparse.ArgumentParser(description="Train on an environment of Gymnasium.")
    parser.add_argument("--env", default="CartPole-v1", help="an environment of Gymnasium")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=80_000)
    arguments = parser.parse_args()

    env = load_gymnasium(arguments.env, N_ENVS)
    eval_env = load_gymnasium(arguments.env, N_ENVS)
    network = ep.make_mlp_actor_critic(
        env.observation_size,
        env.action_size,
        actor_hidden_sizes=[64, 64],
        critic_hidden_sizes=[64, 64],
        sampler=make_sampler(env.actions, entropy_weight=1e-2),
        key=jax.random.key(arguments.seed),
    )
    n_iterations = -(-arguments.total_steps // (N_ENVS * ROLLOUT_LENGTH))
    updates = n_iterations * 4 * 4  # epochs and minibatches, by default
    config = ep.TrainConfig(
        seed=arguments.seed,
        ppo=ep.PPOConfig(
            n_envs=N_ENVS,
            rollout_length=ROLLOUT_LENGTH,
            total_steps=arguments.total_steps,
            learning_rate=optax.linear_schedule(2.5e-3, 0.0, updates),
            gradient_clipping=0.5,
            reset_strategy=HostReset(),
        ),
        eval=ep.EvalConfig(every_steps=20_000, n_envs=N_ENVS, max_episode_length=500),
    )
    result = ep.train_ppo(env, network, config, eval_env=eval_env)
    final = result.final_metrics["eval/episode_reward/mean"]
    print(f"Final return: {final:.1f}, after {result.total_steps:,} steps.")
    env.close()
    eval_env.close()


if __name__ == "__main__":
    main()
