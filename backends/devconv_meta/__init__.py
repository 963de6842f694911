"""The device of shapes without values: moving there keeps everything about a model but its numbers."""

from __future__ import annotations

import torch

from devconv import Backend, Capabilities

__all__ = ["MetaBackend"]


class MetaBackend(Backend):
    """Backend for ``meta``. There is no way back with values; ``to_empty`` gives a meta model storage."""

    device_type = "meta"
    capabilities = Capabilities(values=False)

    def current_index(self) -> int | None:
        return None

    def resolve(self, device: torch.device) -> torch.device:
        super().resolve(device)
        return torch.device("meta")
