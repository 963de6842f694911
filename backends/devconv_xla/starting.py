"""What must be right before the first XLA tensor: the pair of libraries, the runtime, and autograd's threads."""

from __future__ import annotations

import os
import threading
import warnings
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.version import Version

from devconv import BackendLoadError, UnavailableDeviceError

__all__ = ["check_pair", "choose_runtime", "enable_backward"]

_GOOGLE = "0x1ae0"  # vendor of TPU chips on the PCI bus, and of some network cards: then torch_xla has to look closer

_CURE = 'Install the pair that belongs together: pip install "torch==2.9.*" "torch_xla==2.9.0".'


def check_pair() -> None:
    """Refuse a torch_xla that was built for another torch.

    Its metadata pins no torch, and with a wrong one it fails to import, with undefined symbols.

    Raises:
        UnavailableDeviceError: torch_xla is not installed.
        BackendLoadError: it belongs to another torch; both versions are named.
    """
    try:
        xla_version = metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        raise UnavailableDeviceError(
            "xla", f"torch_xla is not installed (torch is {torch.__version__})", _CURE
        ) from None
    wanted, have = Version(xla_version).release[:2], Version(torch.__version__).release[:2]
    if wanted != have:
        raise BackendLoadError(
            "xla",
            f"torch_xla {xla_version}",
            f"torch_xla {xla_version} was built for torch {'.'.join(map(str, wanted))}, this is torch {torch.__version__}",
            _CURE,
        )


def choose_runtime() -> None:
    """Take the CPU without a word where nothing else can be meant; torch_xla does the same with a warning.

    It does so while it is imported, so its own look for chips cannot be asked first.
    """
    if "PJRT_DEVICE" in os.environ or os.environ.get("PJRT_SELECT_DEFAULT_DEVICE") == "0" or find_spec("libneuronxla"):
        return
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if not any(vendor.read_text().strip() == _GOOGLE for vendor in vendors):
        os.environ["PJRT_DEVICE"] = "CPU"


_warned = threading.Lock()
_thread = threading.local()


def enable_backward() -> None:
    """Make ``backward()`` through XLA tensors work in the calling thread.

    A backward pass on the CPU before the XLA runtime existed leaves autograd without threads for XLA's devices, and
    every later XLA backward fails with an internal assertion. If that has happened, backward passes of this thread run
    without autograd's threads from now on, which gives the same results. Moving a model to XLA does this for the
    thread that moves it; call it in any other thread that trains.

    Raises:
        UnavailableDeviceError: backward fails all the same.
    """
    if getattr(_thread, "backward_works", False):
        return
    if torch.is_inference_mode_enabled():
        # Nothing can be learnt in here, and what is set is undone on the way out. Start the runtime, for the first
        # backward pass of a thread, and look again at the next move.
        torch.empty(1, device="xla")
        return
    if _backward_works():
        _thread.backward_works = True
        return
    torch.autograd.set_multithreading_enabled(False)
    if not _backward_works():
        torch.autograd.set_multithreading_enabled(True)
        raise UnavailableDeviceError(
            "xla",
            "a backward pass ran in this process before the XLA runtime was started, and XLA backward passes fail now",
            'Call devconv.prepare("xla") at the start of the program, before the first backward().',
        )
    _thread.backward_works = True
    if _warned.acquire(blocking=False):
        warnings.warn(
            "a backward pass ran before the XLA runtime was started; XLA backward passes run without autograd's "
            'device threads in this thread from now on. Call devconv.prepare("xla") at the start of the program to '
            "avoid it, and devconv_xla.enable_backward() in other threads that train.",
            RuntimeWarning,
            stacklevel=2,
        )


def _backward_works() -> bool:
    with torch.enable_grad():
        probe = torch.ones((), device="xla", requires_grad=True)
        try:
            (probe * 2).backward()
        except RuntimeError:
            return False
    return probe.grad is not None
