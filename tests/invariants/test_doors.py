"""Promise: every door of ``nn.Module`` that converts a model goes by the registry while the flag is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import devconv
from tests.moves import device_is_here, named_tensors
from tests.zoo import Tied, fill, train


@dataclass(frozen=True)
class Door:
    """One way to call a conversion, with where the model has to be afterwards."""

    call: Callable[[nn.Module], nn.Module]
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    has_values: bool = True
    needs: str = "cpu"


def doors_to(device: str) -> dict[str, Door]:
    needs = device.partition(":")[0]
    there = {"device": device, "needs": needs}
    return {
        f"to-{device}": Door(lambda m: m.to(device), **there),
        f"to-{device}-keyword": Door(lambda m: m.to(device=device), **there),
        f"to-{device}-object": Door(lambda m: m.to(torch.device(device)), **there),
        f"to-{device}-non-blocking": Door(lambda m: m.to(device, non_blocking=True), **there),
        f"to-{device}-positional": Door(lambda m: m.to(device, torch.bfloat16, True), dtype=torch.bfloat16, **there),
        f"to-{device}-dtype": Door(lambda m: m.to(device, torch.bfloat16), dtype=torch.bfloat16, **there),
        f"to-{device}-tensor": Door(
            lambda m: m.to(torch.empty(1, dtype=torch.bfloat16, device=device)), dtype=torch.bfloat16, **there
        ),
        f"to-{device}-memory-format": Door(lambda m: m.to(device, memory_format=torch.channels_last), **there),
        f"to-empty-{device}": Door(lambda m: m.to_empty(device=device), has_values=False, **there),
        f"apply-{device}": Door(lambda m: m._apply(lambda t: t.to(device)), **there),
        f"apply-{device}-arithmetic": Door(lambda m: m._apply(lambda t: (t * 1).to(device)), **there),
    }


DOORS = {
    "to-dtype": Door(lambda m: m.to(torch.float64), dtype=torch.float64),
    "to-dtype-keyword": Door(lambda m: m.to(dtype=torch.bfloat16), dtype=torch.bfloat16),
    "to-tensor": Door(lambda m: m.to(torch.empty(0, dtype=torch.float64)), dtype=torch.float64),
    "to-memory-format": Door(lambda m: m.to(memory_format=torch.channels_last)),
    "half": Door(lambda m: m.half(), dtype=torch.float16),
    "float": Door(lambda m: m.double().float()),
    "double": Door(lambda m: m.double(), dtype=torch.float64),
    "bfloat16": Door(lambda m: m.bfloat16(), dtype=torch.bfloat16),
    "cpu": Door(lambda m: m.cpu()),
    "type-dtype": Door(lambda m: m.type(torch.float64), dtype=torch.float64),
    "type-name": Door(lambda m: m.type("torch.DoubleTensor"), dtype=torch.float64),
    "type-class": Door(lambda m: m.type(torch.DoubleTensor), dtype=torch.float64),
    "share-memory": Door(lambda m: m.share_memory()),
    "apply-dtype": Door(lambda m: m._apply(lambda t: t.to(torch.float64)), dtype=torch.float64),
    "apply-conditional": Door(lambda m: m._apply(lambda t: t.double() if t.dim() > 0 else t), dtype=torch.float64),
    "apply-identity": Door(lambda m: m._apply(lambda t: t)),
    "to-meta": Door(lambda m: m.to("meta"), device="meta", has_values=False),
    "to-empty-same": Door(lambda m: m.to_empty(device="cpu"), has_values=False),
    "meta-to-empty": Door(lambda m: m.to("meta").to_empty(device="cpu"), has_values=False),
    "to-xla-and-cpu": Door(lambda m: m.to("xla:0").cpu(), needs="xla"),
    "cuda": Door(lambda m: m.cuda(), device="cuda:0", needs="cuda"),
    "cuda-index": Door(lambda m: m.cuda(0), device="cuda:0", needs="cuda"),
    "cuda-and-cpu": Door(lambda m: m.cuda().cpu(), needs="cuda"),
    **doors_to("xla:0"),
    **doors_to("xla:1"),
    **doors_to("cuda:0"),
    **doors_to("acme:0"),
}

every_door = pytest.mark.parametrize(
    "door", [pytest.param(door, id=name) for name, door in DOORS.items() if device_is_here(door.needs)]
)


def model_for(door: Door) -> nn.Module:
    devconv.prepare(door.needs)
    return fill(Tied())


def through(door: Door, model: nn.Module) -> nn.Module:
    with devconv.registry_conversion():
        return door.call(model)


@every_door
def test_a_door_returns_the_model(door: Door) -> None:
    model = model_for(door)

    assert through(door, model) is model


@every_door
def test_a_door_leads_where_it_says(door: Door) -> None:
    model = model_for(door)

    through(door, model)

    wanted = {(torch.device(door.device), door.dtype)}
    assert {(tensor.device, tensor.dtype) for _, tensor in named_tensors(model)} == wanted


@every_door
def test_a_door_keeps_parameters_and_ties(door: Door) -> None:
    model = model_for(door)
    before = dict(model.named_parameters(remove_duplicate=False))

    through(door, model)

    after = dict(model.named_parameters(remove_duplicate=False))
    assert [name for name in before if after[name] is not before[name]] == []
    assert model.decoder.mask is model.encoder.mask


@pytest.mark.parametrize(
    "door",
    [pytest.param(d, id=name) for name, d in DOORS.items() if device_is_here(d.needs) and d.has_values],
)
def test_a_door_keeps_values(door: Door) -> None:
    model, twin = model_for(door), fill(Tied())

    through(door, model)

    for name, tensor in named_tensors(twin):
        moved = dict(named_tensors(model))[name]
        assert torch.equal(moved.detach().cpu(), tensor.detach().to(door.dtype)), name


@pytest.mark.parametrize(
    "door",
    [
        pytest.param(d, id=name)
        for name, d in DOORS.items()
        if device_is_here(d.needs) and d.has_values and d.dtype is not torch.float16
    ],
)
def test_a_model_trains_behind_every_door(door: Door) -> None:
    model, twin = model_for(door), fill(Tied())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    train(model, optimizer, range(2))
    train(twin, reference, range(4))

    through(door, model)
    train(model, optimizer, range(2, 4))

    tolerance = {"rtol": 6e-2, "atol": 6e-2} if door.dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    trained = model.decoder.weight.detach().cpu().to(torch.float32)
    assert torch.allclose(trained, twin.decoder.weight.detach(), **tolerance)


@every_door
def test_hooks_fire_behind_every_door(door: Door) -> None:
    if door.dtype is torch.float16 and door.device == "cpu":
        pytest.skip("not applicable: no backward in half precision on the host")
    model = model_for(door)
    fired: list[str] = []
    model.encoder.weight.register_hook(lambda _: fired.append("hook"))

    through(door, model)
    model(torch.ones(1, 4, device=door.device, dtype=door.dtype)).sum().backward()

    assert fired == ["hook"]


def test_share_memory_shares_it() -> None:
    model = fill(Tied())

    with devconv.registry_conversion():
        model.share_memory()

    assert all(tensor.is_shared() for _, tensor in named_tensors(model))


@pytest.mark.parametrize("door", ["to_empty", "_apply"])
def test_without_recursion_only_the_modules_own_tensors_move(door: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model.register_parameter("own", nn.Parameter(torch.ones(2)))
    own, child = model.own, model[0].weight

    with devconv.registry_conversion():
        if door == "to_empty":
            model.to_empty(device="meta", recurse=False)
        else:
            model._apply(lambda tensor: tensor.to("meta"), recurse=False)

    assert model.own is own
    assert own.device.type == "meta"
    assert model[0].weight is child
    assert child.device.type == "cpu"


@pytest.mark.parametrize("call", [lambda m: m.to("cpu", "meta"), lambda m: m.to(torch.int64)])
def test_what_torch_refuses_is_refused_with_torchs_own_error(call: Callable[[nn.Module], nn.Module]) -> None:
    model = fill(Tied())
    with pytest.raises(Exception) as stock:  # noqa: PT011 - whatever torch raises is the reference
        call(fill(Tied()))

    with devconv.registry_conversion(), pytest.raises(type(stock.value)):
        call(model)

    assert model.encoder.weight.dtype is torch.float32


def test_apply_with_a_function_that_returns_its_argument_changes_nothing() -> None:
    model = fill(Tied())
    before = dict(named_tensors(model))

    with devconv.registry_conversion():
        model._apply(lambda tensor: tensor)

    assert [name for name, tensor in named_tensors(model) if tensor is not before[name]] == []
