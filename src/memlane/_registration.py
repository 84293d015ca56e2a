"""Registers the native environments with Gymnasium: ``gymnasium.make("memlane/CartPole-v1")``, ``gymnasium.make_vec``.

``import memlane`` must not import gymnasium, which takes longer to import than memlane. If gymnasium is not imported
yet, an import hook registers the environments when it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from memlane import _native

NAMESPACE = "memlane"


def register_envs() -> None:
    """Register the built-in environments now, or as soon as gymnasium is imported."""
    if "gymnasium" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _GymnasiumHook())


def _register() -> None:
    from gymnasium import register, registry

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


class _GymnasiumHook(MetaPathFinder):
    """Lets the other finders find gymnasium, and registers the environments after its module has been executed."""

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
