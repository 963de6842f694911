"""Which backend serves which device type.

Two sources, in this order: what a program registered with `register`, and what installed distributions declare under
the entry-point group ``devconv.backends``. Listing reads metadata only; a backend is imported and made on the first
use of its device, and a broken one breaks its own device and no other. A device type that torch knows and nobody
serves gets the defaults of `Backend`.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from importlib import metadata

import torch

from . import probing
from .backend import API_VERSION, OLDEST_API_VERSION, Backend
from .errors import (
    BackendLoadError,
    DevconvError,
    DuplicateBackendError,
    InvalidDeviceError,
    UnavailableDeviceError,
    UnknownDeviceError,
)

__all__ = [
    "GROUP",
    "Registration",
    "backend_for",
    "known",
    "probe",
    "register",
    "registrations",
    "resolve",
    "unregister",
]

GROUP = "devconv.backends"
_log = logging.getLogger("devconv")


@dataclass(eq=False)
class Registration:
    """One device type and where its backend comes from.

    Attributes:
        device_type: the ``torch.device.type``.
        origin: distribution and version, or ``"register()"`` with the class's name.
        backend: the loaded backend, None before its first use.
        error: why loading failed, None if it did not.
    """

    device_type: str
    origin: str
    backend: Backend | None = None
    error: DevconvError | None = None
    _make: type[Backend] | metadata.EntryPoint | Backend | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def status(self) -> str:
        """What this process knows of it: ``"installed"`` (not used yet), ``"loaded"``, ``"missing hardware"`` or
        ``"broken"``. `probe` finds out more."""
        if self.backend is not None:
            return "loaded"
        if self.error is None:
            return "installed"
        return "missing hardware" if isinstance(self.error, UnavailableDeviceError) else "broken"

    def load(self) -> Backend:
        """The backend, imported and made on the first call.

        Raises:
            BackendLoadError: with the distribution, the cause and the cure; the same error on every later call.
            DuplicateBackendError: two installed distributions claim the type.
            UnavailableDeviceError: the hardware is not there; a later call looks again.
        """
        if self.backend is not None:
            return self.backend
        with self._lock:
            if self.error is not None and not isinstance(self.error, UnavailableDeviceError):
                # The traceback of an earlier caller is no business of this one, and would grow with every call.
                raise self.error.with_traceback(None)
            if self.backend is None:
                try:
                    backend = self._instance()
                    if backend.probe_timeout is not None:
                        probing.require(self.device_type, self.origin, type(backend), backend.probe_timeout)
                    backend.load()
                    backend.prepare()
                except DevconvError as error:
                    self.error = error
                    raise
                except (Exception, SystemExit) as error:
                    # SystemExit: some libraries end the program where their driver is missing.
                    self.error = BackendLoadError(
                        self.device_type,
                        self.origin,
                        f"{type(error).__name__}: {error}",
                        "Repair or uninstall that package; every other device keeps working.",
                    )
                    raise self.error from error
                self.backend, self.error = backend, None
                _log.debug("loaded the backend for %s from %s", self.device_type, self.origin)
            return self.backend

    def backend_class(self) -> type[Backend]:
        """The backend's class. Imports its module, not the vendor's library.

        Raises:
            TypeError: it is no `Backend`.
        """
        made = self._make.load() if isinstance(self._make, metadata.EntryPoint) else self._make
        cls = made if isinstance(made, type) else type(made)
        if not issubclass(cls, Backend):
            raise TypeError(f"{made!r} is not a devconv.Backend")
        return cls

    def _instance(self) -> Backend:
        made = self._make.load() if isinstance(self._make, metadata.EntryPoint) else self._make
        backend = made() if isinstance(made, type) else made
        if not isinstance(backend, Backend):
            raise TypeError(f"{made!r} is not a devconv.Backend")
        if backend.device_type != self.device_type:
            raise TypeError(f"it serves {backend.device_type!r}, its entry point says {self.device_type!r}")
        if not OLDEST_API_VERSION <= backend.api_version <= API_VERSION:
            newer = backend.api_version > API_VERSION
            raise BackendLoadError(
                self.device_type,
                self.origin,
                f"it was written for version {backend.api_version} of devconv's backend contract, this devconv serves "
                f"versions {OLDEST_API_VERSION} to {API_VERSION}",
                "Upgrade devconv." if newer else "Upgrade that package, or ask its vendor to.",
            )
        return backend

    def _target(self) -> str:
        if isinstance(self._make, metadata.EntryPoint):
            return f"{self._make.module}:{self._make.attr}"
        cls = self._make if isinstance(self._make, type) else type(self._make)
        return f"{cls.__module__}:{cls.__qualname__}"


_lock = threading.RLock()
_registered: dict[str, Registration] = {}
_discovered: dict[str, Registration] | None = None
_defaults: dict[str, Registration] = {}


def _origin(entry_point: metadata.EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist is not None else entry_point.value


def _entry_points() -> dict[str, Registration]:
    global _discovered
    with _lock:
        if _discovered is None:
            found: dict[str, Registration] = {}
            for entry_point in metadata.entry_points(group=GROUP):
                name, origin = entry_point.name, _origin(entry_point)
                first = found.get(name)
                if first is None:
                    found[name] = Registration(name, origin, _make=entry_point)
                elif first._make != entry_point:
                    # One distribution can be seen twice, by an editable install and by its own folder on sys.path.
                    first.error = DuplicateBackendError(name, first.origin, origin)
            _discovered = found
        return _discovered


def register(backend: type[Backend] | Backend, *, replace: bool = False) -> None:
    """Serve ``backend.device_type`` with `backend`, in this process.

    A registered backend beats an installed one. Nothing is loaded before the device's first use.

    Args:
        backend: a `Backend` subclass or an instance of one.
        replace: take the place of a backend registered earlier in this process.

    Raises:
        TypeError: `backend` is neither.
        DuplicateBackendError: the device type was registered already and `replace` is False.
    """
    cls = backend if isinstance(backend, type) else type(backend)
    if not issubclass(cls, Backend):
        raise TypeError(f"register() takes a devconv.Backend subclass or an instance of one, got {backend!r}")
    if not cls.device_type:
        raise TypeError(f"{cls.__qualname__} names no device: set its class attribute `device_type`")
    origin = f"register({cls.__module__}.{cls.__qualname__})"
    with _lock:
        present = _registered.get(cls.device_type)
        if present is not None and not replace:
            raise DuplicateBackendError(cls.device_type, present.origin, origin)
        _registered[cls.device_type] = Registration(cls.device_type, origin, _make=backend)


def unregister(device_type: str) -> None:
    """Take back a `register`; an installed backend for the type, if there is one, counts again.

    Raises:
        UnknownDeviceError: the type was not registered in this process.
    """
    with _lock:
        if device_type not in _registered:
            raise UnknownDeviceError(device_type, sorted(_registered))
        del _registered[device_type]


def registrations() -> list[Registration]:
    """Every device type with its origin, sorted by type. Imports no backend."""
    with _lock:
        merged = {**_entry_points(), **_registered}
        return [merged[name] for name in sorted(merged)]


def known() -> list[str]:
    """The device types that have a backend, sorted. Imports no backend.

    >>> {"cpu", "meta"} <= set(known())
    True
    """
    return [registration.device_type for registration in registrations()]


def backend_for(device_type: str) -> Backend:
    """The backend that serves a device type, loaded on first use.

    Raises:
        UnknownDeviceError: nobody serves the type, and torch does not know it.
        BackendLoadError: its backend is installed and broken.
        DuplicateBackendError: two installed distributions claim it.
    """
    registration = _registered.get(device_type)
    if registration is None:
        registration = _entry_points().get(device_type) or _default(device_type)
    return registration.backend or registration.load()


def probe(device_type: str, *, timeout: float = 60.0) -> probing.Presence:
    """Whether a device is there, found out by loading its backend in a process of its own.

    Loads nothing in this process, so a backend that aborts or hangs takes nothing with it.

    Args:
        device_type: a type that has a backend (`known`).
        timeout: seconds after which the backend counts as hanging.

    Returns:
        ``"there"`` with the number of devices, ``"missing"`` or ``"broken"`` with the reason and the cure.

    Raises:
        UnknownDeviceError: nobody serves the type.
    """
    found = {registration.device_type: registration for registration in registrations()}.get(device_type)
    if found is None:
        raise UnknownDeviceError(device_type, known())
    if isinstance(found.error, DuplicateBackendError):
        return probing.Presence("broken", why=str(found.error))
    return probing.ask_a_process(found._target(), timeout)


def _default(device_type: str) -> Registration:
    with _lock:
        present = _defaults.get(device_type)
        if present is not None:
            return present
        try:
            parsed = torch.device(device_type)
        except RuntimeError:
            raise UnknownDeviceError(device_type, known()) from None
        if parsed.type != device_type:
            raise UnknownDeviceError(device_type, known())
        cls = type(f"Default{device_type.title()}Backend", (_DefaultBackend,), {"device_type": device_type})
        _log.info(
            "no backend is installed for device type %r: using the defaults of devconv.Backend (torch's own copies)",
            device_type,
        )
        made = _defaults[device_type] = Registration(device_type, "devconv's defaults", _make=cls)
        return made


class _DefaultBackend(Backend):
    """For a type that torch knows and nobody registered: torch itself says which devices exist."""

    def device_count(self) -> int:
        module = getattr(torch, self.device_type, None)
        count = getattr(module, "device_count", None)
        return int(count()) if callable(count) else 1

    def current_index(self) -> int | None:
        module = getattr(torch, self.device_type, None)
        current = getattr(module, "current_device", None)
        return int(current()) if callable(current) else 0


def resolve(device: str | torch.device | int) -> tuple[torch.device, Backend]:
    """A device as its tensors will report it, and the backend that serves it.

    Args:
        device: anything that ``torch.device`` takes.

    Returns:
        The device with its index (``cuda`` becomes ``cuda:0``), and its loaded backend.

    Raises:
        InvalidDeviceError: `device` names no device, or its index does not exist.
        UnknownDeviceError: no backend serves the type.
        BackendLoadError: its backend is installed and broken.
        UnavailableDeviceError: its hardware is not there.

    >>> resolve("cpu")[0]
    device(type='cpu')
    """
    parsed = device if isinstance(device, torch.device) else _parse(device)
    backend = backend_for(parsed.type)
    return backend.resolve(parsed), backend


def _parse(device: object) -> torch.device:
    if not isinstance(device, str | int) or isinstance(device, bool):
        raise InvalidDeviceError(device, f"it is a {type(device).__qualname__}", "Pass a torch.device or its name.")
    if isinstance(device, str):
        # A vendor's device type becomes a name that torch can parse when its library is loaded, so load first.
        head = device.split(":", 1)[0]
        if head in _registered or head in _entry_points():
            backend_for(head)
    try:
        return torch.device(device)
    except (RuntimeError, ValueError) as error:
        head = str(device).split(":", 1)[0]
        types = known()
        if head not in types and head.isidentifier():
            raise UnknownDeviceError(head, types) from error
        raise InvalidDeviceError(
            device, "torch cannot read it", f"Write TYPE or TYPE:INDEX with one of: {', '.join(types)}."
        ) from error
