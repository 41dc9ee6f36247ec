"""Makes transformers' Auto classes know converted models, once something imports them.

`import retrofox` calls `register_when_imported` and stays light: it imports neither torch nor transformers. The config
classes are registered when transformers' Auto classes are there; a family's model classes when a config of it is read.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AUTO = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"


class _AfterImport(MetaPathFinder):
    """Finds AUTO and MODELS as the finders after it do, and registers the families when they have been imported."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in (AUTO, MODELS):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                # MODELS imports AUTO and needs to be whole before a family's config can be imported
                if self in sys.meta_path and (fullname == MODELS or MODELS not in sys.modules):
                    sys.meta_path.remove(self)
                    register(sys.modules[AUTO])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Registers the families now if the Auto classes are imported, else as soon as they are."""
    if AUTO in sys.modules:
        register(sys.modules[AUTO])
    else:
        sys.meta_path.insert(0, _AfterImport())


def register(auto: Any) -> None:
    """Registers the config classes of all families with `auto`, the module AUTO; reading one registers its models."""
    configs = importlib.import_module("retrofox.model.configuration_fox")
    for model_type, prefix in configs.SUPPORTED.items():
        config_class = getattr(configs, f"Fox{prefix}Config")
        auto.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        config_class.from_dict = classmethod(_with_models(model_type, config_class.from_dict.__func__))


def _with_models(model_type: str, read: Any) -> Any:
    def from_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        importlib.import_module("retrofox.anatomy").lm_class(model_type)
        return read(cls, *args, **kwargs)

    return from_dict
