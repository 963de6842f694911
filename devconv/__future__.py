"""The flag: whether every ``nn.Module`` conversion of the process goes by the registry."""

from __future__ import annotations

from .hook import get_registry_conversion, set_registry_conversion

__all__ = ["get_registry_conversion", "set_registry_conversion"]
