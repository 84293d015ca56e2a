"""Stable-Baselines3 on memlane: replace SubprocVecEnv by SB3VecEnv and keep everything else.

Use it if you train with Stable-Baselines3 and want faster environment workers. It trains PPO on CartPole-v1 and prints
the mean return before and after, and the training speed.

    pip install 'memlane[sb3]'
    python examples/sb3_on_memlane.py
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time

import gymnasium


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1", help="Gymnasium environment id")
    parser.add_argument("--steps", type=int, default=40_000, help="environment steps to train for")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, help="worker processes (default: one per core)")
    args = parser.parse_args()
    if importlib.util.find_spec("stable_baselines3") is None:
        sys.exit("stable_baselines3 is not installed: pip install 'memlane[sb3]'")

    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor

    from memlane.vector.adapters.sb3 import SB3VecEnv

    torch.set_num_threads(1)
    # Before: SubprocVecEnv([lambda: gymnasium.make(args.env)] * args.num_envs)
    envs = VecMonitor(SB3VecEnv([lambda: gymnasium.make(args.env)] * args.num_envs, num_workers=args.num_workers))
    # The hyperparameters of RL Baselines3 Zoo for CartPole-v1.
    model = PPO(
        "MlpPolicy", envs, n_steps=32, batch_size=32 * args.num_envs, n_epochs=20, gamma=0.98, gae_lambda=0.8,
        learning_rate=lambda progress: 1e-3 * progress, clip_range=lambda progress: 0.2 * progress,
        seed=1, device="cpu",
    )  # fmt: skip
    try:
        before, _ = evaluate_policy(model, envs, n_eval_episodes=20)
        print(f"mean return before training: {before:.1f}")
        start = time.perf_counter()
        model.learn(args.steps)
        seconds = time.perf_counter() - start
        after, _ = evaluate_policy(model, envs, n_eval_episodes=20)
        print(f"mean return after training: {after:.1f}")
        print(f"{model.num_timesteps:,} steps in {seconds:.1f} s: {model.num_timesteps / seconds:,.0f} steps/s")
    finally:
        envs.close()


if __name__ == "__main__":
    main()
