"""Training: learners and collectors, one readable file for each algorithm."""

from memlane.train.appo import APPO, APPOConfig
from memlane.train.networks import ActorCritic, NetworkConfig
from memlane.train.run import Metrics, Run

__all__ = ["APPO", "APPOConfig", "ActorCritic", "Metrics", "NetworkConfig", "Run"]
