"""What replicating a module leaves alone, compared before and after: its class, its names, its tensors, its keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from devconv.errors import ContractError

__all__ = ["unchanged"]


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Check that the block leaves `module` as it is.

    Raises:
        ContractError: with what changed first.
    """
    before = _snapshot(module)
    yield
    after = _snapshot(module)
    for what, was in before.items():
        if after[what] != was:
            raise ContractError(what, *_first_difference(was, after[what]))


def _snapshot(module: nn.Module) -> dict[str, list[Any]]:
    return {
        "its class": [type(module)],
        "its modules": [(name, id(child)) for name, child in module.named_modules(remove_duplicate=False)],
        "its parameters": [(name, id(tensor)) for name, tensor in module.named_parameters(remove_duplicate=False)],
        "its buffers": [(name, id(tensor)) for name, tensor in module.named_buffers(remove_duplicate=False)],
        "the keys of its state_dict": list(module.state_dict(keep_vars=True)),
    }


def _first_difference(before: list[Any], after: list[Any]) -> tuple[object, object]:
    for was, is_ in zip(before, after, strict=False):
        if was != is_:
            return _shown(was), _shown(is_)
    longer = before if len(before) > len(after) else after
    extra = _shown(longer[min(len(before), len(after))])
    return (extra, None) if longer is before else (None, extra)


def _shown(value: object) -> object:
    return value[0] if isinstance(value, tuple) else value
