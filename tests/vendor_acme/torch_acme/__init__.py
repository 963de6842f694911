"""The vendor's library: a device named ``acme`` for torch, two of them unless ``ACME_DEVICES`` says otherwise.

Importing it registers the device and ``torch.acme``. Its memory cannot be read by the host, everything it does is
counted (`ledger`), and it can be told to fail (`faults`). ``ACME_KIND=set-data`` makes a process start with the kind of
device whose tensors and the host's can take each other's place by ``param.data = new``.
"""

from __future__ import annotations

import os

import torch

from . import _C, device_module
from .failing import KINDS, clear_faults, fail_copy, faults, memory_limit, refuse_float64, set_kind, set_memory_limit
from .ledger import Ledger, Traffic, ledger, reset_peak

__all__ = [
    "KINDS",
    "Ledger",
    "Traffic",
    "clear_faults",
    "copy_list",
    "device_count",
    "fail_copy",
    "faults",
    "ledger",
    "memory_limit",
    "refuse_float64",
    "reset_peak",
    "set_kind",
    "set_memory_limit",
]

copy_list = _C.copy_list
"""``copy_list(tensors, device, dtypes)``: detached copies of a list on an acme device or the host, in one call; an empty
``dtypes`` keeps each tensor's own."""
device_count = _C.device_count


def _register() -> None:
    torch.utils.rename_privateuse1_backend("acme")
    torch._register_device_module("acme", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    set_kind(os.environ.get("ACME_KIND", "foreign"))


_register()
