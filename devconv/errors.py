"""Every exception of devconv.

Each error keeps its facts as attributes, for programs, and says in its message what happened, where (the tensor's
full name, the device) and the cure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "AlreadyReplicatedError",
    "BackendLoadError",
    "BackendProtocolError",
    "BatchError",
    "ContractError",
    "ConversionError",
    "ConversionRefused",
    "DevconvError",
    "DuplicateBackendError",
    "GatherError",
    "InvalidDeviceError",
    "LazyCheckpointError",
    "LazyDeviceError",
    "LazyShapeError",
    "MeshTooLateError",
    "NotAModuleError",
    "NotReplicatedError",
    "OptimizerMismatchError",
    "PartialConversionError",
    "PendingBackwardError",
    "ProcessGroupError",
    "RankLostError",
    "RanksDisagreeError",
    "Refusal",
    "ReplicationRefused",
    "ShapeInferenceError",
    "UnavailableDeviceError",
    "UninitializedTensorError",
    "UnknownDeviceError",
    "UnusedParametersError",
]


class DevconvError(Exception):
    """Base class of every error that devconv raises itself."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own way calls the class with the message alone; these classes take facts and make the message.
        return _restore, (type(self), self.args, self.__dict__.copy())


def _restore(cls: type[DevconvError], args: tuple[object, ...], facts: dict[str, object]) -> DevconvError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class UnknownDeviceError(DevconvError, LookupError):
    """No backend serves a device type, and torch does not know the type either."""

    def __init__(self, device_type: str, known: Sequence[str]) -> None:
        self.device_type, self.known = device_type, tuple(known)
        super().__init__(
            f"no backend serves device type {device_type!r} (known: {', '.join(known)}). Install the vendor's "
            f"package, or call devconv.register(...) before the first conversion."
        )


class InvalidDeviceError(DevconvError, ValueError):
    """A value that names no device, or a device index that does not exist."""

    def __init__(self, device: object, why: str, cure: str) -> None:
        self.device, self.why, self.cure = device, why, cure
        super().__init__(f"{device!r} is not a usable device: {why}. {cure}")


class UnavailableDeviceError(DevconvError, RuntimeError):
    """A backend is installed, but its hardware, driver or runtime is not there."""

    def __init__(self, device_type: str, why: str, cure: str) -> None:
        self.device_type, self.why, self.cure = device_type, why, cure
        super().__init__(f"device type {device_type!r} is not available here: {why}. {cure}")


class BackendLoadError(DevconvError, ImportError):
    """A backend's package failed while it was loaded; other devices are not affected."""

    def __init__(self, device_type: str, distribution: str, cause: str, cure: str) -> None:
        self.device_type, self.distribution, self.cause, self.cure = device_type, distribution, cause, cure
        super().__init__(
            f"the backend for device type {device_type!r} (from {distribution}) could not be loaded: {cause}. {cure}"
        )


class BackendProtocolError(DevconvError, RuntimeError):
    """A backend returned something that its contract does not allow."""

    def __init__(self, device_type: str, method: str, why: str) -> None:
        self.device_type, self.method, self.why = device_type, method, why
        super().__init__(
            f"the backend for device type {device_type!r} broke its contract in {method}(): {why}. "
            f"Report it to the backend's vendor; `devconv check {device_type}` shows what else it breaks."
        )


class DuplicateBackendError(DevconvError, ValueError):
    """Two backends claim one device type."""

    def __init__(self, device_type: str, first: str, second: str) -> None:
        self.device_type, self.first, self.second = device_type, first, second
        super().__init__(
            f"device type {device_type!r} is claimed twice, by {first} and by {second}. Uninstall one of them, or "
            f"call devconv.register(backend, replace=True) to say which one counts."
        )


class NotAModuleError(DevconvError, TypeError):
    """Something other than an ``nn.Module`` was to be converted."""

    def __init__(self, value: object) -> None:
        self.value_type = type(value).__qualname__
        super().__init__(
            f"expected a torch.nn.Module, got {self.value_type}. For tensors and nested inputs use devconv.move(...)."
        )


class OptimizerMismatchError(DevconvError, ValueError):
    """An optimizer was passed that holds no parameter of the module (or is no optimizer at all)."""

    def __init__(self, optimizer: object, why: str) -> None:
        self.optimizer_type = type(optimizer).__qualname__
        super().__init__(
            f"optimizers= got a {self.optimizer_type} that {why}. Pass the optimizers that were built on this "
            f"module's parameters; nothing was changed."
        )


@dataclass(frozen=True)
class Refusal:
    """One reason why a conversion was refused.

    Attributes:
        name: full name of the tensor or module, as in ``named_parameters()``; ``""`` for the whole model.
        device: the device that the tensor is on or should go to.
        why: what would be lost.
        cure: what the caller can do.
    """

    name: str
    device: str
    why: str
    cure: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.device}): {self.why}. {self.cure}"


_SHOWN = 20
"""Reasons that a message shows; a model has thousands of tensors."""


class ConversionRefused(DevconvError, RuntimeError):
    """A conversion that stock torch would break was refused before anything was touched."""

    def __init__(self, reasons: Iterable[Refusal]) -> None:
        self.reasons = tuple(reasons)
        shown = self.reasons[:_SHOWN]
        listed = "\n".join(f"  - {reason}" for reason in shown)
        if len(self.reasons) > len(shown):
            listed += f"\n  - ... and {len(self.reasons) - len(shown)} more in the exception's `reasons`"
        plural = "reason" if len(self.reasons) == 1 else "reasons"
        super().__init__(f"conversion refused, nothing was changed ({len(self.reasons)} {plural}):\n{listed}")


class ConversionError(DevconvError, RuntimeError):
    """A conversion failed for a reason of devconv's or a backend's; the model is what it was before.

    Failures of user code and of torch (``fn`` raising, out of memory, KeyboardInterrupt) keep their own type; a note
    on them says that the model was put back.
    """

    def __init__(self, name: str, device: str, why: str, cure: str) -> None:
        self.name, self.device, self.why, self.cure = name, device, why, cure
        super().__init__(f"{name or 'the model'} ({device}): {why}. The model is unchanged. {cure}")


class ShapeInferenceError(DevconvError, RuntimeError):
    """The shapes of lazy tensors could not be found without running the model. Every module is as lazy as before."""

    def __init__(self, module: str, place: str, why: str, cure: str) -> None:
        self.module, self.place, self.why, self.cure = module, place, why, cure
        where = " at ".join(part for part in (module or "the model", place) if part)
        super().__init__(f"no shapes for lazy tensors from {where}: {why}. Every module is as lazy as before. {cure}")


class UninitializedTensorError(DevconvError, RuntimeError, ValueError):
    """Something needs the shapes of tensors that are still lazy."""

    def __init__(self, names: Sequence[str], action: str, cure: str) -> None:
        self.names, self.action, self.cure = tuple(names), action, cure
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(f"{action} needs the shapes of lazy tensors: {shown}. {cure}")


class LazyDeviceError(DevconvError, RuntimeError):
    """A lazy module's first input is on another device than the one that its tensors are going to be on."""

    def __init__(self, name: str, input_device: str, device: str) -> None:
        self.name, self.input_device, self.device = name, input_device, device
        super().__init__(
            f"the first input of the lazy module {name} is on {input_device}, its tensors are to be on {device}. The "
            f'module is as lazy as before. Move the input with .to("{device}"), or the model with .to("{input_device}").'
        )


class LazyShapeError(DevconvError, RuntimeError):
    """A tensor that a lazy module got from a checkpoint does not fit the module's first input."""

    def __init__(self, name: str, loaded: Sequence[int], needed: Sequence[int]) -> None:
        self.name, self.loaded, self.needed = name, tuple(loaded), tuple(needed)
        super().__init__(
            f"{name} was filled with shape {tuple(loaded)}, the first input needs {tuple(needed)}. The module is as lazy "
            f"as before. Pass an input of the size that the checkpoint was made with, or leave {name} out of it."
        )


class LazyCheckpointError(DevconvError, RuntimeError):
    """A checkpoint holds lazy tensors where the model is initialised."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(
            f"the checkpoint was saved before these tensors had a shape, and the model has values there: {shown}. "
            f"Nothing was loaded. Save the checkpoint after devconv.materialize(model, *inputs), or load it into a "
            f"model that is still lazy."
        )


class PartialConversionError(ConversionError):
    """A conversion with ``atomic=False`` failed after some of its batches had been committed."""

    def __init__(self, converted: Sequence[str], cause: BaseException) -> None:
        self.converted = tuple(converted)
        DevconvError.__init__(
            self,
            f"{type(cause).__name__}: {cause}. With atomic=False these {len(self.converted)} tensors had been converted "
            f"before it, and stay so; all others are unchanged: {', '.join(self.converted)}. Convert again to finish, "
            f"or convert back.",
        )
        self.name, self.device, self.why, self.cure = "", "", str(cause), "Convert again to finish, or convert back."


class ReplicationRefused(DevconvError, RuntimeError):
    """A module cannot be replicated as it is: lazy, without values, half moved, or managed by another API."""

    def __init__(self, reasons: Iterable[Refusal]) -> None:
        self.reasons = tuple(reasons)
        listed = "\n".join(f"  - {reason}" for reason in self.reasons)
        plural = "reason" if len(self.reasons) == 1 else "reasons"
        super().__init__(f"the module cannot be replicated ({len(self.reasons)} {plural}):\n{listed}")


class AlreadyReplicatedError(DevconvError, RuntimeError):
    """`replicate` was called on a module that is replicated already."""

    def __init__(self, module: object) -> None:
        self.module_type = type(module).__qualname__
        super().__init__(
            f"this {self.module_type} is replicated already, and a second reducer would average its gradients twice. "
            f"Call replicate() once, on the outermost module; a copy.deepcopy() of it can be replicated anew."
        )


class NotReplicatedError(DevconvError, RuntimeError):
    """Something that needs a replicated module got another one."""

    def __init__(self, module: object, action: str) -> None:
        self.module_type, self.action = type(module).__qualname__, action
        super().__init__(
            f"{action} needs a module that devconv.distributed.replicate() was called on, and this {self.module_type} "
            f"is not one. Pass the object that was replicated, not one of its children or a copy."
        )


class ProcessGroupError(DevconvError, RuntimeError):
    """There is no process group, or it cannot reduce the tensors of the module's device."""

    def __init__(self, device_type: str, why: str, cure: str) -> None:
        self.device_type, self.why, self.cure = device_type, why, cure
        super().__init__(f"no process group for {device_type or 'this process'}: {why}. {cure}")


class RanksDisagreeError(DevconvError, RuntimeError):
    """The ranks of a process group do not hold the same module. Raised on every rank, before anything is reduced."""

    def __init__(self, rank: int, name: str, why: str) -> None:
        self.rank, self.name, self.why = rank, name, why
        super().__init__(
            f"rank {rank} and rank 0 do not hold the same module: {name}: {why}. Build, move, freeze and materialise "
            f"the module alike on every rank before its next forward pass."
        )


class RankLostError(DevconvError, RuntimeError):
    """A rank did not answer: it has died, hangs, or runs another part of the program."""

    def __init__(self, action: str, rank: int, size: int, cause: object) -> None:
        self.action, self.rank, self.size, self.cause = action, rank, size, str(cause)
        super().__init__(
            f"rank {rank} of {size} could not go on with {action}, because another rank did not answer ({cause}). It has "
            f"died (its own log says why), hangs, or has left the training loop earlier. Start all ranks again; the time "
            f"that is waited for a rank is init_process_group(timeout=...)."
        )


class PendingBackwardError(DevconvError, RuntimeError):
    """The reducer was to go while a forward pass still waited for its backward: its gradients would not be averaged."""

    def __init__(self, module: object) -> None:
        self.module_type = type(module).__qualname__
        super().__init__(
            f"a forward pass of this {self.module_type} still waits for its backward, whose gradients would not be "
            f"averaged after the change. Run backward() or drop the outputs first, or run such a forward pass under "
            f"torch.no_grad()."
        )


class ContractError(DevconvError, RuntimeError):
    """Replicating a module changed what it promises to leave alone: its class, its names or its tensors."""

    def __init__(self, what: str, before: object, after: object) -> None:
        self.what, self.before, self.after = what, before, after
        super().__init__(
            f"replicating the module changed {what}: {before!r} became {after!r}. A hook or an override of the module "
            f"does this while forward hooks are registered; make it leave the module's structure alone."
        )


class MeshTooLateError(DevconvError, RuntimeError):
    """The device's runtime was started for single devices, and cannot change to a mesh any more."""

    def __init__(self, device_type: str, cure: str) -> None:
        self.device_type, self.cure = device_type, cure
        super().__init__(
            f"it is too late in this process to use all {device_type} devices as one mesh: the runtime was started for "
            f"single devices, has no way back, and would crash. {cure}"
        )


class UnusedParametersError(DevconvError, RuntimeError):
    """The last backward pass reached only a part of the parameters, and the ranks still wait for the rest."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(
            f"the last backward pass left parameters without a gradient, so their average is still waited for: "
            f"{shown or 'torch does not say which'}. Use every output in the loss, freeze what is not used, or call "
            f"replicate(..., find_unused_parameters=True)."
        )


class BatchError(DevconvError, ValueError):
    """The inputs of a call cannot be cut into one batch for each replica."""

    def __init__(self, path: str, why: str, cure: str) -> None:
        self.path, self.why, self.cure = path, why, cure
        super().__init__(f"{path}: {why}. {cure}")


class GatherError(DevconvError, TypeError):
    """The outputs of the replicas cannot be put together into one."""

    def __init__(self, path: str, why: str, cure: str) -> None:
        self.path, self.why, self.cure = path, why, cure
        super().__init__(f"{path}: {why}. {cure}")
