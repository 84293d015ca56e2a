"""Adapters: vector environments with the interfaces of other libraries, one module per library.

``gymnasium`` (``as_gymnasium_async``), ``pettingzoo`` (``AgentsVectorEnv``), ``sb3`` (``SB3VecEnv``) and ``torch``
(``as_tensors``). Importing this package imports neither pettingzoo nor stable_baselines3 nor torch.
"""
