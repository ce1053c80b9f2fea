"""Trains a multilayer perceptron on MuJoCo Playground's CartpoleBalance.

    python examples/quickstart.py [--seed 0] [--total-steps 1500000]

Prints a line per evaluation and ends with the return of the trained policy (of 1000).
"""

import argparse

import jax

import eqx_ppo as ep


def main() -> None:
    """Trains, then evaluates the trained policy on fresh episodes."""
    parser = argparse.ArgumentParser(description="Train a network on MuJoCo Playground.")
    parser.add_argument("--env", default="CartpoleBalance", help="a DM Control environment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=1_500_000)
    arguments = parser.parse_args()

    env = ep.EpisodeWrapper(ep.load_playground(arguments.env), 1000)
    network = ep.make_mlp_actor_critic(
        env.observation_size,
        env.action_size,
        actor_hidden_sizes=[64] * 4,
        critic_hidden_sizes=[256] * 2,
        key=jax.random.key(arguments.seed),
    )
    config = ep.TrainConfig(
        seed=arguments.seed,
        ppo=ep.PPOConfig(
            n_envs=256,
            rollout_length=20,
            total_steps=arguments.total_steps,
            learning_rate=3e-4,
            gradient_clipping=1.0,
        ),
        eval=ep.EvalConfig(every_steps=100_000, n_envs=32),
    )
    print(f"Compiling, then training on {arguments.env} ...", flush=True)
    result = ep.train_ppo(env, network, config)

    final = result.final_metrics["eval/episode_reward/mean"]
    print(f"Final return: {final:.1f} of 1000, after {result.total_steps:,} steps.")


if __name__ == "__main__":
    main()
