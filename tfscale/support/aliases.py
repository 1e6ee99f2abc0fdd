"""Short names of packages: ``tfscale.optimizers`` is ``tfscale.training.optimizers``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Aliases(MetaPathFinder, Loader):
    """Finder of modules that have a second name; both names give the same module.

    Modules inside such a package have a second name, too: otherwise Python would load
    ``tfscale.optimizers.lamb`` beside ``tfscale.training.optimizers.lamb``, and there would be two
    classes LAMB.

    Args:
        homes: the module's name for each short name.
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def install(self) -> None:
        """Let import statements find the short names."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a short name, None for all other names."""
        return ModuleSpec(name, self) if self._home(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that the short name stands for."""
        module = importlib.import_module(self._home(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which Python has replaced by the short name's."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def _home(self, name: str) -> str:
        for short, home in self._homes.items():
            if name == short or name.startswith(f"{short}."):
                return home + name.removeprefix(short)
        return ""
