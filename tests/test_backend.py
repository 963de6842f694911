"""The vendor's contract: what a subclass gets without writing it, and what `resolve` checks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from devconv import Backend, Capabilities, InvalidDeviceError, UnavailableDeviceError

pytestmark = pytest.mark.lane("cpu")


class Plain(Backend):
    device_type = "cpu"


class Counted(Backend):
    """Two devices, the second one current; no tensor is ever made there."""

    device_type = "acme"

    def __init__(self, count=2, current=1):
        self.count, self.current = count, current

    def device_count(self):
        return self.count

    def current_index(self):
        return self.current


class Device:
    """A device of a type that torch cannot parse here."""

    def __init__(self, index):
        self.type, self.index = "acme", index

    def __str__(self):
        return f"acme:{self.index}"


TENSORS = {
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(2, 0, 3),
    "bfloat16": torch.randn(4).bfloat16(),
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([2**62 + 1, -(2**63)]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels_last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(3, 3),
    "sliced": torch.arange(12.0)[2::3],
}
METHODS = ("send", "fetch", "copy")


def call(method, tensors, **options):
    backend = Plain()
    return (
        backend.fetch(tensors, **options)
        if method == "fetch"
        else getattr(backend, method)(tensors, torch.device("cpu"), **options)
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", TENSORS)
def test_default_copy_keeps_shape_dtype_and_values(method, kind):
    (copied,) = call(method, [TENSORS[kind]])
    assert copied.dtype == TENSORS[kind].dtype
    assert copied.shape == TENSORS[kind].shape
    assert torch.equal(copied, TENSORS[kind])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["transposed", "channels_last"])
def test_default_copy_keeps_strides(method, kind):
    (copied,) = call(method, [TENSORS[kind]])
    assert copied.stride() == TENSORS[kind].stride()


@pytest.mark.parametrize("method", METHODS)
def test_default_copies_come_in_order_with_the_dtypes_asked_for(method):
    tensors = [torch.full((2,), float(index)) for index in range(4)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int32]
    copied = call(method, tensors, dtypes=dtypes)
    assert [tensor.dtype for tensor in copied] == dtypes
    assert [tensor[0].item() for tensor in copied] == [0, 1, 2, 3]


@pytest.mark.parametrize("method", METHODS)
def test_default_copy_is_no_alias(method):
    source = torch.zeros(3)
    (copied,) = call(method, [source])
    copied.fill_(1)
    assert source.tolist() == [0, 0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_default_copy_carries_no_graph(method):
    source = torch.ones(3, requires_grad=True)
    (leaf, inner) = call(method, [source, source * 2])
    assert (leaf.requires_grad, inner.requires_grad, inner.grad_fn) == (False, False, None)


@pytest.mark.parametrize("method", METHODS)
def test_default_copy_of_nothing_is_nothing(method):
    assert call(method, []) == []


@pytest.mark.parametrize("method", METHODS)
def test_dtypes_of_another_length_are_an_error(method):
    with pytest.raises(ValueError, match="zip"):
        call(method, [torch.zeros(1), torch.zeros(1)], dtypes=[torch.float32])


def test_index_out_of_range_names_the_devices_there_are():
    with pytest.raises(InvalidDeviceError, match=r"acme:0 \.\. acme:1") as caught:
        Counted().resolve(Device(2))
    assert caught.value.device == "acme:2"


def test_type_without_devices_is_unavailable():
    with pytest.raises(UnavailableDeviceError, match="the process has no acme device"):
        Counted(count=0).resolve(Device(None))


def test_default_broadcast_gives_each_device_its_own_copies():
    sources = [torch.zeros(2), torch.ones(3)]
    copies = Plain().broadcast(sources, [torch.device("cpu"), torch.device("cpu")])
    copies[0][0].fill_(7)
    assert [len(copied) for copied in copies] == [2, 2]
    assert copies[1][0].tolist() == sources[0].tolist() == [0, 0]


def test_default_accumulate_adds_each_group_in_order():
    sums = Plain().accumulate(
        [[torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)], [torch.full((1,), 5.0)]], torch.device("cpu")
    )
    assert [total.tolist() for total in sums] == [[6, 6], [5]]


def test_default_accumulate_leaves_its_terms_alone():
    terms = [torch.ones(2), torch.ones(2)]
    Plain().accumulate([terms], torch.device("cpu"))
    assert [term.tolist() for term in terms] == [[1, 1], [1, 1]]


def test_repr_names_class_and_type():
    assert repr(Counted()) == f"<{__name__}.Counted for 'acme'>"


def test_capabilities_hold_what_is_not_listed():
    capabilities = Capabilities(unsupported_dtypes=frozenset({torch.float64}))
    assert (capabilities.holds(torch.float32), capabilities.holds(torch.float64)) == (True, False)


def test_capabilities_do_not_change_under_a_plan():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities().strides = False
