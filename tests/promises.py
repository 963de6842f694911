"""Which conversions a promise is applicable to. The marks are read by tests/invariants/conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.moves import Conversion


def where(chosen: Callable[[Conversion], bool]) -> pytest.MarkDecorator:
    """Run a test for the conversions that `chosen` picks; for the others its promise is not applicable."""
    return pytest.mark.conversions(chosen)


with_values = where(lambda conversion: conversion.has_values)
"""For promises about numbers: on ``meta`` they are not applicable, which is not the same as kept."""
with_same_objects = where(lambda conversion: conversion.keeps_objects)
"""For promises about a parameter's identity: the overwrite route gives it up by definition."""
from_host = where(lambda conversion: conversion.source == "cpu")
