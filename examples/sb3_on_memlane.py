"""Stable-Baselines3 on memlane: SB3VecEnv in the place of SubprocVecEnv, everything else as it was.

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
    parser.add_argument("--env", default="CartPole-v1", help="an id of Gymnasium")
    parser.add_argument("--steps", type=int, default=40_000, help="environment steps of the training")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, help="processes that step them (default: one for each core)")
    told = parser.parse_args()
    if importlib.util.find_spec("stable_baselines3") is None:
        sys.exit("stable_baselines3 is not installed: pip install 'memlane[sb3]'")

    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor

    from memlane.vector.adapters.sb3 import SB3VecEnv

    torch.set_num_threads(1)
    # Was: SubprocVecEnv([lambda: gymnasium.make(told.env)] * told.num_envs)
    workers = SB3VecEnv([lambda: gymnasium.make(told.env)] * told.num_envs, num_workers=told.num_workers)
    envs = VecMonitor(workers)
    # The settings of rl-zoo for CartPole.
    model = PPO(
        "MlpPolicy", envs, n_steps=32, batch_size=32 * told.num_envs, n_epochs=20, gamma=0.98, gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.2 * left, seed=1, device="cpu",
    )  # fmt: skip
    try:
        before, _ = evaluate_policy(model, envs, n_eval_episodes=20)
        print(f"before: a return of {before:.1f}")
        begin = time.perf_counter()
        model.learn(told.steps)
        seconds = time.perf_counter() - begin
        after, _ = evaluate_policy(model, envs, n_eval_episodes=20)
        print(f"after: a return of {after:.1f}")
        print(f"{model.num_timesteps:,} steps in {seconds:.1f} s: {model.num_timesteps / seconds:,.0f} a second")
    finally:
        envs.close()


if __name__ == "__main__":
    main()
