"""Promise: every kind of tensor that a module can hold arrives: complex, integer, bool, fp8, scalar, empty, sparse,
conjugated, channels-last, quantised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.moves import Move, close, host, named_tensors, same
from tests.promises import where, with_same_objects, with_values
from tests.zoo import mlp

KINDS: dict[str, Callable[[], Tensor]] = {
    "float16": lambda: torch.ones(3, dtype=torch.float16),
    "float64": lambda: torch.ones(3, dtype=torch.float64),
    "bool": lambda: torch.tensor([True, False]),
    "uint8": lambda: torch.arange(4, dtype=torch.uint8),
    "int8": lambda: torch.arange(-2, 2, dtype=torch.int8),
    "int16": lambda: torch.arange(4, dtype=torch.int16),
    "int32": lambda: torch.arange(4, dtype=torch.int32),
    "int64": lambda: torch.arange(4) * 2**40,
    "fp8-e4m3": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "fp8-e5m2": lambda: torch.ones(4).to(torch.float8_e5m2),
    "scalar": lambda: torch.tensor(3.0),
    "integer-scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.zeros(0, 4),
    "empty-integer": lambda: torch.zeros(0, dtype=torch.int64),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def cast(move: Move, kind: str, value: Tensor) -> Tensor:
    """What stock torch makes of a tensor of this kind: the device changes, and the dtype of floating ones."""
    for hop in move.conversion.hops:
        if hop.dtype is not None and value.is_floating_point():
            value = value.to(hop.dtype)
    return value


@every_kind
def test_a_buffer_arrives(move: Move, kind: str) -> None:
    model = move.build(mlp)
    value = KINDS[kind]()
    model.register_buffer("it", value.to(move.source))

    move(model)

    wanted = cast(move, kind, value)
    assert (model.it.device, model.it.dtype, model.it.shape) == (move.device, wanted.dtype, wanted.shape)
    if move.conversion.has_values:
        assert torch.equal(host(model.it).to(torch.float64), wanted.to(torch.float64))


@every_kind
def test_a_frozen_parameter_arrives(move: Move, kind: str) -> None:
    model = move.build(mlp)
    value = KINDS[kind]()
    model.it = nn.Parameter(value.to(move.source), requires_grad=False)
    before = model.it

    move(model)

    wanted = cast(move, kind, value)
    assert (model.it.device, model.it.dtype, model.it.shape) == (move.device, wanted.dtype, wanted.shape)
    assert not model.it.requires_grad
    if move.conversion.keeps_objects:
        assert model.it is before


def test_a_model_of_mixed_dtypes_keeps_them_on_the_way_to_a_device(move: Move) -> None:
    if move.conversion.keeps_device:
        pytest.skip("not applicable: the dtype is what changes")
    with torch.device(move.source):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).half(), nn.Linear(2, 2).bfloat16()])

    move(model)

    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.float16, torch.bfloat16]


class Complex(nn.Module):
    """A trainable complex parameter and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("phase", torch.tensor([1j]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x * self.phase).abs().sum()


@where(lambda conversion: conversion.keeps_dtype)
def test_complex_tensors_arrive(move: Move) -> None:
    model = Complex()
    if move.source.type != "cpu":
        pytest.skip("not applicable: torch makes no complex constants there")
    weight = model.weight

    move(model)

    assert (model.weight.device, model.weight.dtype) == (move.device, torch.complex64)
    if move.conversion.keeps_objects:
        assert model.weight is weight
    if move.conversion.has_values:
        assert torch.equal(torch.view_as_real(host(model.weight)), torch.tensor([[1.0, 2.0], [3.0, -1.0]]))


@where(lambda conversion: conversion.name.startswith("float64"))
def test_complex_to_real_is_refused_by_name(move: Move) -> None:
    # Stock torch drops the imaginary part with a warning.
    model = Complex()

    with move.refuses("weight", "phase"):
        move(model)


@where(lambda conversion: conversion.name.startswith("float64"))
def test_the_door_that_leaves_complex_tensors_alone_leaves_them_alone(move: Move) -> None:
    import devconv

    if move.mode != "flag":
        pytest.skip("not applicable: the door is nn.Module's")
    model = nn.ModuleList([Complex(), nn.Linear(2, 2)])

    with devconv.registry_conversion():
        model.double()

    assert model[0].weight.dtype is torch.complex64
    assert model[1].weight.dtype is torch.float64


class Sparse(nn.Module):
    """Sparse tensors as buffers and as a frozen parameter."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]])
        value = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr}[layout]()
        self.register_buffer("table", value)
        self.weight = nn.Parameter(value.clone(), requires_grad=False)
        self.layer = nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@where(lambda conversion: "xla" not in (conversion.source.partition(":")[0], conversion.device.type))
@where(lambda conversion: conversion.needs not in ("xla", "acme"))
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors_arrive(move: Move, layout: str) -> None:
    model = Sparse(layout)

    move(model, route=None)

    for tensor in (model.table, model.weight):
        assert (tensor.device, tensor.dtype) == (move.device, move.dtype)
        assert tensor.layout is {"coo": torch.sparse_coo, "csr": torch.sparse_csr}[layout]
        # CSR through .data= gets a new outer dtype and keeps the old inner one.
        assert tensor.values().dtype is move.dtype if layout == "csr" else tensor._values().dtype is move.dtype
    if move.conversion.has_values:
        assert close(model.weight.to_dense(), torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]]))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@with_same_objects
@where(lambda conversion: conversion.needs not in ("xla", "acme"))
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_parameter_is_the_object_it_was(move: Move, layout: str) -> None:
    model = Sparse(layout)
    weight = model.weight

    move(model, route=None)

    assert model.weight is weight


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@where(lambda conversion: conversion.needs == "xla" and conversion.source == "cpu" and len(conversion.hops) == 1)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_tensor_that_the_device_lacks_is_refused_by_name(move: Move, layout: str) -> None:
    model = Sparse(layout)

    with move.refuses("weight", "table"):
        move(model)


@where(lambda conversion: conversion.keeps_dtype and conversion.source == "cpu")
def test_a_conjugated_view_arrives_with_its_value(move: Move) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turned", torch.tensor([1 + 2j, 3 - 1j]).conj())

    move(model)

    assert model.turned.device == move.device
    if move.conversion.has_values:
        assert torch.equal(host(model.turned).resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]))


@where(lambda conversion: conversion.source == "cpu")
def test_a_negated_view_arrives_with_its_value(move: Move) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("negated", torch.tensor([1 + 2j, 3 - 1j]).conj().imag)

    move(model)

    assert model.negated.device == move.device
    if move.conversion.has_values:
        assert close(host(model.negated).resolve_neg(), torch.tensor([-2.0, 1.0]))


@where(lambda conversion: conversion.needs != "xla" and conversion.device.type in ("cpu", "cuda", "meta"))
@where(lambda conversion: conversion.source == "cpu")
def test_channels_last_is_kept_where_the_device_has_strides(move: Move) -> None:
    model = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)

    move(model)

    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@where(lambda conversion: conversion.device.type == "xla" and conversion.source == "cpu")
def test_channels_last_that_is_lost_on_the_device_is_a_line_of_the_report(move: Move) -> None:
    model = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    expected = model.weight.detach().clone()

    move(model)

    assert same(model.weight, expected)
    if move.by_devconv:
        said = [*move.report.notes, *(item.note for item in move.report.items)]
        assert any("stride" in each or "contiguous" in each or "channels" in each for each in said), said


@where(lambda conversion: conversion.needs == "xla" and conversion.source == "cpu" and len(conversion.hops) == 1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantised_tensor_that_the_device_leaves_behind_is_refused_by_name(move: Move) -> None:
    # Stock torch returns without an error, and the tensor is still on the host.
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))

    with move.refuses("table"):
        move(model)


@where(lambda conversion: conversion.name == "float64")
def test_meta_without_to_empty_is_refused_by_name(move: Move) -> None:
    import devconv

    model = mlp().to("meta")

    with devconv.registry_conversion(), pytest.raises(devconv.ConversionRefused) as caught:
        model.to("cpu")

    assert {reason.name for reason in caught.value.reasons} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all("to_empty" in str(reason) for reason in caught.value.reasons)
    assert {tensor.device.type for _, tensor in named_tensors(model)} == {"meta"}


@with_values
def test_numbers_that_do_not_fit_become_infinite_as_in_stock_torch(move: Move) -> None:
    model = move.build(mlp)
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    expected = move.cast(model[0].weight)

    move(model)

    assert same(model[0].weight, expected)
