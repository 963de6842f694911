"""Pure transfers are recognised exactly, or not at all."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from devconv.transfer import Transfer, capture, recognise

META = torch.device("meta")
DEVICES = iter(["meta", "cpu"] * 10)
CALLS: list[object] = []


class _Settings:
    @property
    def device(self):
        CALLS.append("read")
        return "meta"


SETTINGS = _Settings()


@pytest.mark.parametrize(
    ("door", "arguments", "keywords", "expected"),
    [
        ("to", ("meta",), {}, Transfer(META)),
        ("to", ("meta", torch.float64), {}, Transfer(META, torch.float64)),
        ("to", (torch.float16,), {"non_blocking": True}, Transfer(None, torch.float16, non_blocking=True)),
        ("to", (torch.ones(1, dtype=torch.float64),), {}, Transfer(torch.device("cpu"), torch.float64)),
        ("to", (), {"memory_format": torch.channels_last}, Transfer(memory_format=torch.channels_last)),
        ("half", (), {}, Transfer(None, torch.float16, "floating")),
        ("bfloat16", (), {}, Transfer(None, torch.bfloat16, "floating")),
        ("float", (), {}, Transfer(None, torch.float32, "floating")),
        ("double", (), {}, Transfer(None, torch.float64, "floating")),
        ("type", (torch.float64,), {}, Transfer(None, torch.float64, "all")),
        ("cpu", (), {}, Transfer(torch.device("cpu"))),
        ("cuda", (), {}, Transfer(torch.device("cuda"))),
        ("cuda", (1,), {}, Transfer(torch.device("cuda:1"))),
        ("to_empty", (), {"device": "meta"}, Transfer(META, empty=True)),
    ],
)
def test_what_stock_torch_s_doors_hand_over_is_recognised(door, arguments, keywords, expected):
    fn, _ = capture(getattr(nn.Module, door), arguments, keywords)

    assert fn is not None
    assert recognise(fn) == expected


def test_share_memory_is_no_transfer():
    fn, _ = capture(nn.Module.share_memory, (), {})

    assert fn is not None
    assert recognise(fn) is None


def test_a_type_by_name_is_no_pure_transfer():
    fn, _ = capture(nn.Module.type, ("torch.DoubleTensor",), {})

    assert fn is not None
    assert recognise(fn) is None


def test_to_empty_keeps_its_recurse():
    assert capture(nn.Module.to_empty, (), {"device": "meta", "recurse": False})[1] is False


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        pytest.param(lambda t: t.to(META), Transfer(META, casts="all"), id="to"),
        pytest.param(
            lambda t: t.to("cpu", torch.float64), Transfer(torch.device("cpu"), torch.float64, "all"), id="both"
        ),
        pytest.param(lambda t: t.to(dtype=torch.float16), Transfer(None, torch.float16, "all"), id="keyword"),
        pytest.param(lambda t: t.half(), Transfer(None, torch.float16, "all"), id="half"),
        pytest.param(lambda t: t.cpu(), Transfer(torch.device("cpu")), id="cpu"),
    ],
)
def test_a_lambda_that_can_only_convert_is_recognised(fn, expected):
    assert recognise(fn) == expected


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda t: t.to(META) if t.dim() == 2 else t, id="looks-at-the-tensor"),
        pytest.param(lambda t: t if t is None else t.to(META), id="tells-tensors-apart"),
        pytest.param(lambda t: t.to(next(DEVICES)), id="another-device-each-time"),
        pytest.param(lambda t: t.to(SETTINGS.device), id="a-property-that-runs-code"),
        pytest.param(lambda t: CALLS.append(t), id="counts-its-calls"),
        pytest.param(lambda t: (CALLS.append(t), t.to(META))[1], id="counts-and-converts"),
        pytest.param(lambda t: t.to(META).double(), id="converts-twice"),
        pytest.param(lambda t: t.to(t), id="uses-the-tensor-twice"),
        pytest.param(lambda t: t.mul(2), id="computes"),
        pytest.param(lambda t: torch.empty_like(t), id="makes-another"),
        pytest.param(lambda t: t.to(META, copy=True), id="asks-for-a-copy"),
        pytest.param(lambda t: t, id="identity"),
        pytest.param(lambda t, device=META: t.to(device), id="has-a-default"),
        pytest.param(lambda *t: t[0].to(META), id="takes-any-number"),
        pytest.param(functools.partial(torch.Tensor.to, device=META), id="partial"),
        pytest.param(torch.Tensor.double, id="method"),
    ],
)
def test_whatever_may_be_anything_else_is_not_and_is_not_called(fn):
    CALLS.clear()

    assert recognise(fn) is None
    assert CALLS == []


@pytest.mark.parametrize(
    ("casts", "dtype", "expected"),
    [
        ("floating", torch.float32, torch.float64),
        ("floating", torch.complex64, torch.complex64),
        ("inexact", torch.int64, torch.int64),
        ("all", torch.int64, torch.float64),
    ],
)
def test_a_cast_reaches_the_dtypes_that_its_door_casts(casts, dtype, expected):
    assert Transfer(None, torch.float64, casts).dtype_for(dtype) is expected
