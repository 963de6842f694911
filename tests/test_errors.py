"""Errors carry their facts, name the cure, and survive a trip between processes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from devconv import errors
from devconv.errors import DevconvError, Refusal

pytestmark = pytest.mark.lane("cpu")

NAMES = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
CLASSES = [getattr(errors, name) for name in NAMES if issubclass(getattr(errors, name), DevconvError)]

# A value for every annotation that a constructor uses; a new one has to be added here.
VALUES = {
    "str": "a fact",
    "str | None": "a fact",
    "int": 3,
    "object": [1, 2],
    "BaseException": ValueError("a fact"),
    "Sequence[str]": ["first", "second"],
    "Sequence[int]": (2, 3),
    "Iterable[Refusal]": [Refusal("layer.weight", "xla:0", "it would be lost", "Keep it.")],
}


def made(cls, **chosen):
    if cls is DevconvError:
        return cls("a fact")
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return cls(**{parameter.name: VALUES[parameter.annotation] for parameter in parameters} | chosen)


def test_every_exception_is_listed():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == set(NAMES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_is_caught_as_devconv_error_and_as_a_builtin_one(cls):
    builtins = [
        base for base in cls.__mro__ if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
    ]
    assert issubclass(cls, DevconvError)
    assert builtins or cls is DevconvError


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "trip",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_error_keeps_message_and_facts_on_a_trip(cls, trip):
    error = made(cls)
    there = trip(error)
    assert type(there) is cls
    assert str(there) == str(error)
    assert set(vars(there)) == set(vars(error))


@pytest.mark.parametrize(
    "cls",
    [cls for cls in CLASSES if "cure" in inspect.signature(cls.__init__).parameters],
    ids=lambda cls: cls.__name__,
)
def test_cure_stands_in_the_message(cls):
    assert "Turn it off and on again." in str(made(cls, cure="Turn it off and on again."))


def test_refused_conversion_lists_every_reason_with_name_device_and_cure():
    reasons = [
        Refusal("encoder.weight", "cpu", "a view of it is held elsewhere", "Drop the view."),
        Refusal("", "xla:0", "float8 cannot be stored there", "Pass dtype=."),
    ]
    error = errors.ConversionRefused(iter(reasons))
    assert error.reasons == tuple(reasons)
    assert str(error).splitlines() == [
        "conversion refused, nothing was changed (2 reasons):",
        "  - encoder.weight (cpu): a view of it is held elsewhere. Drop the view.",
        "  - the model (xla:0): float8 cannot be stored there. Pass dtype=.",
    ]


def test_unknown_device_names_the_known_ones():
    error = errors.UnknownDeviceError("banana", ["cpu", "xla"])
    assert "'banana'" in str(error)
    assert "known: cpu, xla" in str(error)
    assert error.known == ("cpu", "xla")
