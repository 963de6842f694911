"""devconv: a model, and everything that hangs on it, arrives on another device or dtype whole, or does not leave.

Importing this package imports no backend, installs no hook and starts no runtime; the names below load their modules
on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import __future__ as __future__
    from . import distributed as distributed
    from . import lazy as lazy
    from .backend import Backend as Backend
    from .backend import Capabilities as Capabilities
    from .conversion import convert as convert
    from .conversion import last_report as last_report
    from .conversion import move as move
    from .conversion import plan as plan
    from .conversion import prepare as prepare
    from .errors import AlreadyReplicatedError as AlreadyReplicatedError
    from .errors import BackendLoadError as BackendLoadError
    from .errors import BackendProtocolError as BackendProtocolError
    from .errors import BatchError as BatchError
    from .errors import ContractError as ContractError
    from .errors import ConversionError as ConversionError
    from .errors import ConversionRefused as ConversionRefused
    from .errors import DevconvError as DevconvError
    from .errors import DuplicateBackendError as DuplicateBackendError
    from .errors import GatherError as GatherError
    from .errors import InvalidDeviceError as InvalidDeviceError
    from .errors import LazyCheckpointError as LazyCheckpointError
    from .errors import LazyDeviceError as LazyDeviceError
    from .errors import LazyShapeError as LazyShapeError
    from .errors import MeshTooLateError as MeshTooLateError
    from .errors import NotAModuleError as NotAModuleError
    from .errors import NotReplicatedError as NotReplicatedError
    from .errors import OptimizerMismatchError as OptimizerMismatchError
    from .errors import PartialConversionError as PartialConversionError
    from .errors import PendingBackwardError as PendingBackwardError
    from .errors import ProcessGroupError as ProcessGroupError
    from .errors import RankLostError as RankLostError
    from .errors import RanksDisagreeError as RanksDisagreeError
    from .errors import Refusal as Refusal
    from .errors import ReplicationRefused as ReplicationRefused
    from .errors import ShapeInferenceError as ShapeInferenceError
    from .errors import UnavailableDeviceError as UnavailableDeviceError
    from .errors import UninitializedTensorError as UninitializedTensorError
    from .errors import UnknownDeviceError as UnknownDeviceError
    from .errors import UnusedParametersError as UnusedParametersError
    from .following import follow as follow
    from .hook import get_registry_conversion as get_registry_conversion
    from .hook import registry_conversion as registry_conversion
    from .lazy.materialization import materialize as materialize
    from .lazy.outcome import MaterializeReport as MaterializeReport
    from .lazy.spec import TensorSpec as TensorSpec
    from .parallel.data_parallel import DataParallel as DataParallel
    from .parallel.replicator import Replicator as Replicator
    from .parallel.replicator import replicate as replicate
    from .planning import Plan as Plan
    from .policy import Route as Route
    from .registry import backend_for as backend_for
    from .registry import known as known
    from .registry import probe as probe
    from .registry import register as register
    from .registry import registrations as registrations
    from .registry import resolve as resolve
    from .registry import unregister as unregister
    from .report import Item as Item
    from .report import Report as Report

__version__ = "0.1.0"

_HOME = {
    "AlreadyReplicatedError": "errors",
    "Backend": "backend",
    "BackendLoadError": "errors",
    "BackendProtocolError": "errors",
    "BatchError": "errors",
    "Capabilities": "backend",
    "ContractError": "errors",
    "ConversionError": "errors",
    "ConversionRefused": "errors",
    "DataParallel": "parallel.data_parallel",
    "DevconvError": "errors",
    "DuplicateBackendError": "errors",
    "GatherError": "errors",
    "InvalidDeviceError": "errors",
    "Item": "report",
    "LazyCheckpointError": "errors",
    "LazyDeviceError": "errors",
    "LazyShapeError": "errors",
    "MaterializeReport": "lazy.outcome",
    "MeshTooLateError": "errors",
    "NotAModuleError": "errors",
    "NotReplicatedError": "errors",
    "OptimizerMismatchError": "errors",
    "PartialConversionError": "errors",
    "PendingBackwardError": "errors",
    "Plan": "planning",
    "ProcessGroupError": "errors",
    "RankLostError": "errors",
    "RanksDisagreeError": "errors",
    "Refusal": "errors",
    "ReplicationRefused": "errors",
    "Replicator": "parallel.replicator",
    "Report": "report",
    "Route": "policy",
    "ShapeInferenceError": "errors",
    "TensorSpec": "lazy.spec",
    "UnavailableDeviceError": "errors",
    "UninitializedTensorError": "errors",
    "UnknownDeviceError": "errors",
    "UnusedParametersError": "errors",
    "backend_for": "registry",
    "convert": "conversion",
    "follow": "following",
    "get_registry_conversion": "hook",
    "known": "registry",
    "last_report": "conversion",
    "materialize": "lazy.materialization",
    "move": "conversion",
    "plan": "conversion",
    "prepare": "conversion",
    "probe": "registry",
    "register": "registry",
    "registrations": "registry",
    "registry_conversion": "hook",
    "replicate": "parallel.replicator",
    "resolve": "registry",
    "unregister": "registry",
}
"""Public name -> the module that defines it. A module's name is never a public name too: importing the module would
put it where the function was."""

_SUBPACKAGES = frozenset({"__future__", "distributed", "lazy", "parallel"})


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBPACKAGES})
