"""How a check says what it expects. Plain functions, since ``assert`` says nothing outside pytest or under ``-O``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BrokenPromise", "NotApplicable", "expect", "expect_close", "expect_equal", "expect_raises"]


class BrokenPromise(AssertionError):
    """What was promised is not so. The message says what was seen."""


class NotApplicable(Exception):
    """The promise makes no sense on this device. The message says why."""


def expect(true: object, seen: str) -> None:
    """Fail with `seen` unless `true`."""
    if not true:
        raise BrokenPromise(seen)


def expect_equal(got: object, wanted: object, what: str) -> None:
    """Fail unless two values are equal (for types, devices, lists; not for tensors)."""
    if got != wanted:
        raise BrokenPromise(f"{what}: got {got!r}, wanted {wanted!r}")


def expect_close(got: Tensor, wanted: Tensor, what: str, tolerance: float = 0.0) -> None:
    """Fail unless two tensors hold the same numbers.

    Args:
        got: any device; compared on the host.
        wanted: the same shape.
        what: what they are, for the message.
        tolerance: relative to the largest number wanted; 0 asks for bit equality (NaN equals NaN).
    """
    got, wanted = got.detach().cpu(), wanted.detach().cpu()
    if got.shape != wanted.shape:
        raise BrokenPromise(f"{what}: got shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}")
    if not got.numel():
        return
    wide = torch.complex128 if got.is_complex() or wanted.is_complex() else torch.float64
    difference = (got.to(wide) - wanted.to(wide)).abs()
    # Not by writing through the mask: a vendor's modes see operations of the host too, and may know no such write.
    alike = (got.to(wide) == wanted.to(wide)) | (got.isnan() & wanted.isnan())
    difference = torch.where(alike, torch.zeros_like(difference), difference)
    worst = float(difference.max())
    allowed = tolerance * max(1.0, float(wanted.to(wide).abs().max())) if tolerance else 0.0
    if not worst <= allowed:
        raise BrokenPromise(f"{what}: differs by up to {worst:.3g} (allowed: {allowed:.3g})")


def expect_raises(
    errors: type[BaseException] | tuple[type[BaseException], ...], action: Callable[[], object], what: str
) -> BaseException:
    """Fail unless `action` raises one of `errors`.

    Returns:
        What it raised.
    """
    names = " or ".join(error.__name__ for error in (errors if isinstance(errors, tuple) else (errors,)))
    try:
        action()
    except errors as error:
        return error
    except Exception as error:
        raise BrokenPromise(f"{what}: raised {type(error).__name__} ({error}), wanted {names}") from error
    raise BrokenPromise(f"{what}: raised nothing, wanted {names}")
