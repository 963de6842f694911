"""Names for errors about a tensor or module that arrived alone, without the model it belongs to."""

from __future__ import annotations

import gc

from torch import Tensor, nn

from devconv import torch_internals as internals

__all__ = ["module_name", "name_in", "tensor_name"]


def module_name(module: nn.Module) -> str:
    """`module` by its full name in the largest model that holds it, with its class: ``body.0 (LazyLinear)``.

    Asks the garbage collector who holds the module, which takes milliseconds: for errors only.
    """
    path = _path_of(module)
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


def tensor_name(tensor: Tensor, otherwise: str) -> str:
    """The full name of a module's tensor, `otherwise` if no module holds it. For errors only."""
    for table in gc.get_referrers(tensor):
        if not isinstance(table, dict):
            continue
        for module in _owners(table):
            for key, held in (*internals.parameters_of(module).items(), *internals.buffers_of(module).items()):
                if held is tensor:
                    return name_in(module, key)
    return otherwise


def name_in(module: nn.Module, key: str) -> str:
    """The full name of `module`'s tensor `key`; of a model that is this very module, ``LazyLinear.weight``."""
    return f"{_path_of(module) or type(module).__name__}.{key}"


def _path_of(module: nn.Module) -> str:
    parts: list[str] = []
    seen = {id(module)}
    while True:
        parent = _parent_of(module)
        if parent is None or id(parent[0]) in seen:
            return ".".join(reversed(parts))
        seen.add(id(parent[0]))
        module = parent[0]
        parts.append(parent[1])


def _parent_of(module: nn.Module) -> tuple[nn.Module, str] | None:
    for table in gc.get_referrers(module):
        if not isinstance(table, dict):
            continue
        for owner in _owners(table):
            for key, child in internals.children_of(owner).items():
                if child is module and internals.children_of(owner) is table:
                    return owner, key
    return None


def _owners(table: dict[object, object]) -> list[nn.Module]:
    """The modules among whose attributes a dict of tensors or children is."""
    owners = []
    for attributes in gc.get_referrers(table):
        if isinstance(attributes, dict):
            owners += [
                holder
                for holder in gc.get_referrers(attributes)
                if isinstance(holder, nn.Module) and holder.__dict__ is attributes
            ]
    return owners
