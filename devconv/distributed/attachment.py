"""What hangs on a replicated module, and what it does around the module's forward pass."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from devconv import torch_internals as internals

from .collecting import MARK

__all__ = ["Attachment", "Role"]


class Role(Protocol):
    """What a replicated module does around its forward pass."""

    quiet: int

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pass of `module` is about to run."""

    def after(self, output: Any) -> Any:
        """It has run; what it returns."""

    def release(self, module: nn.Module) -> None:
        """Let go of the module's tensors."""


class Attachment:
    """What hangs on a replicated module: two hooks and one entry in its ``__dict__``.

    A copy of the module, or a pickled one, carries no role: it is an ordinary module, and can be replicated itself.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.role: Role | None = None
        if module is not None:
            # First, so that it sees the inputs that the caller passed, as a call of the module would.
            module.register_forward_pre_hook(_Before(self), prepend=True, with_kwargs=True)
            module.register_forward_hook(_After(self))
            module.__dict__[MARK] = self

    @property
    def active(self) -> bool:
        """Whether the module is replicated."""
        return self.role is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return Attachment, ()


class _Before:
    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    @internals.without_compiler
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.attachment.role is not None:
            self.attachment.role.before(module, args, kwargs)


class _After:
    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    @internals.without_compiler
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self.attachment.role is None else self.attachment.role.after(output)
