"""Registers the native environments with Gymnasium: ``gymnasium.make("memlane/CartPole-v1")`` and ``make_vec``.

``import memlane`` must not import gymnasium, which takes longer than all of memlane. If gymnasium is not imported yet,
a hook on the import system registers them when it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMESPACE = "memlane"


def register_envs() -> None:
    """Register now if gymnasium is imported already, else as soon as it is."""
    if sys.modules.get("gymnasium"):  # None where its import is blocked
        _register()
    else:
        sys.meta_path.insert(0, _GymnasiumHook())


def _register() -> None:
    from gymnasium import register, registry

    from memlane import _native

    for name, (_, max_episode_steps, _) in _native.built_in_envs().items():
        env_id = f"{NAMESPACE}/{name}"
        if env_id not in registry:
            register(
                env_id,
                entry_point="memlane.native:NativeEnv",
                vector_entry_point="memlane.native:make",
                max_episode_steps=max_episode_steps or None,
                kwargs={"name": name},
            )


class _GymnasiumHook:
    """A finder that leaves finding gymnasium to the others and calls ``_register`` after gymnasium was executed.

    It does not derive from ``importlib.abc.MetaPathFinder``: importing that module takes 6 ms.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
