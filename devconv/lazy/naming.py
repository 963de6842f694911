"""Names for errors about a tensor or module that arrived alone, without the model it belongs to.

The garbage collector knows every module that is alive; one walk over them finds the owners. For errors only.
"""

from __future__ import annotations

import gc

from torch import Tensor, nn

from devconv import torch_internals as internals

__all__ = ["module_name", "name_in", "tensor_name"]


def module_name(module: nn.Module) -> str:
    """`module` by its full name in the largest model that holds it, with its class: ``body.0 (LazyLinear)``."""
    path = _path_of(module, _modules())
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


def name_in(module: nn.Module, key: str) -> str:
    """The full name of `module`'s tensor `key`; of a model that is this very module, ``LazyLinear.weight``."""
    return f"{_path_of(module, _modules()) or type(module).__name__}.{key}"


def tensor_name(tensor: Tensor, otherwise: str) -> str:
    """The full name of a module's tensor, `otherwise` if no module holds it."""
    for module in _modules():
        for table in (internals.parameters_of(module), internals.buffers_of(module)):
            for key, held in table.items():
                if held is tensor:
                    return name_in(module, key)
    return otherwise


def _modules() -> list[nn.Module]:
    # By type(): asking an object for its class can run its code. A module whose constructor failed has no tables.
    found = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    return [module for module in found if internals.has_tables(module)]


def _path_of(module: nn.Module, modules: list[nn.Module]) -> str:
    parents: dict[int, tuple[nn.Module, str]] = {}
    for owner in modules:
        for key, child in internals.children_of(owner).items():
            if child is not None:
                parents.setdefault(id(child), (owner, key))
    parts: list[str] = []
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        module, key = parents[id(module)]
        parts.append(key)
    return ".".join(reversed(parts))
