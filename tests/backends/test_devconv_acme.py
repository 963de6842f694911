"""Models on a device that is neither the host nor XLA: its backend, and conversions that are made to fail at every point.

The device is tests/vendor_acme; tests/backends/test_acme.py holds it to its own promises.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import devconv
from devconv import planning

pytestmark = pytest.mark.needs("acme", 2)

ROADS = {
    "cpu-acme:0": ("cpu", "acme:0", None),
    "acme:0-cpu": ("acme:0", "cpu", None),
    "acme:0-acme:1": ("acme:0", "acme:1", None),
    "acme:1-bfloat16": ("acme:1", None, torch.bfloat16),
    "cpu-acme:1-float64": ("cpu", "acme:1", torch.float64),
}
ROUTES = {
    ("foreign", "cpu-acme:0"): "swap",
    ("foreign", "acme:0-cpu"): "swap",
    ("foreign", "acme:0-acme:1"): "set-data",
    ("foreign", "acme:1-bfloat16"): "set-data",
    ("foreign", "cpu-acme:1-float64"): "swap",
}
"""Of the set-data kind, every parameter goes by set-data."""

KINDS = ["foreign", "set-data"]
DOORS = ["flag", "convert"]


@pytest.fixture
def acme():
    import torch_acme

    devconv.prepare("acme")
    planning._works.clear()
    yield torch_acme
    torch_acme.clear_faults()
    torch_acme.set_kind(os.environ.get("ACME_KIND", "foreign"))
    planning._works.clear()


@pytest.fixture
def claim(acme):
    """Serve acme with a backend that says what it is told to say."""
    from devconv_acme import claiming

    def register(**said):
        devconv.register(claiming(**said), replace=True)
        devconv.prepare("acme")

    yield register
    if any(entry.device_type == "acme" and entry.origin.startswith("register") for entry in devconv.registrations()):
        devconv.unregister("acme")


class Model(nn.Module):
    """A tie, running statistics, a buffer that views a parameter, and a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("window", self.scale.detach()[2:6])

    def forward(self, x):
        x = self.norm(self.second(torch.tanh(self.first(x))))
        return (self.rnn(x.unsqueeze(1))[0][:, 0] * self.window * self.scale[:4]).sum(1)


def model_on(device):
    torch.manual_seed(0)
    model = Model()
    if device != "cpu":
        devconv.convert(model, device)
    return model


def step(model, optimizer, seed):
    weight = model.first.weight
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(weight)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained_on(device):
    model = model_on(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


def slots(model):
    return [
        (f"{prefix}.{key}", tensor)
        for prefix, module in model.named_modules()
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
    ]


def state_of(model, optimizer):
    """Objects, places, values and gradients of a model and its optimizer's state."""
    tensors = slots(model)
    tensors += [(f"{name}.grad", p.grad) for name, p in model.named_parameters()]
    tensors += [
        (f"state {i} {key}", value) for i, state in enumerate(optimizer.state.values()) for key, value in state.items()
    ]
    return {
        name: (id(tensor), tensor.device, tensor.dtype, tensor.data_ptr(), tensor.detach().cpu().tolist())
        for name, tensor in tensors
    }


def convert(model, road, door="convert", optimizer=None):
    _, device, dtype = ROADS[road]
    if door == "convert":
        return devconv.convert(model, device, dtype, optimizers=None if optimizer is None else [optimizer])
    with devconv.registry_conversion():
        model.to(device=device, dtype=dtype)
    return devconv.last_report()


def live(acme, expected=None):
    """Bytes alive on each device; the collector, which is slow, runs only if they are not the expected ones."""
    found = [acme.ledger(index).live_bytes for index in range(2)]
    if found != expected:
        gc.collect()
        found = [acme.ledger(index).live_bytes for index in range(2)]
    return found


# The backend


def test_a_model_crosses_in_one_batch_and_no_byte_twice(acme):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    sizes = [tensor.nbytes for _, tensor in slots(model)]
    before = acme.ledger()

    devconv.convert(model, "acme:1")

    spent = acme.ledger() - before
    assert (spent.batches, spent.sent) == (1, acme.Traffic(len(sizes), sum(sizes)))
    assert (spent.live_bytes, spent.fallback_calls, spent.fetched) == (sum(sizes), 0, acme.Traffic())


def test_the_way_through_the_host_and_back_frees_the_device(acme):
    before = live(acme)
    model = model_on("acme:0")
    devconv.convert(model, "acme:1")

    devconv.convert(model, "cpu")

    assert live(acme) == before


def test_a_held_loss_keeps_no_memory_of_the_old_device(acme):
    before = live(acme)
    model = model_on("acme:0")
    loss = model(torch.randn(6, 4, device="acme:0")).sum()
    loss.backward()

    devconv.convert(model, "cpu")

    assert live(acme)[0] - before[0] < 256, "only the loss itself may be left"
    assert loss.device == torch.device("acme:0")


def test_a_backward_before_the_device_was_loaded_does_not_break_it():
    code = (
        "import torch, devconv\n"
        "model = torch.nn.Linear(2, 2); model(torch.ones(1, 2)).sum().backward()\n"
        "devconv.convert(model, 'acme:1')\n"
        "model(torch.ones(1, 2, device='acme:1')).sum().backward(); print(model.bias.grad.tolist())"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)

    assert done.stdout == "[2.0, 2.0]\n", done.stderr


def test_a_device_index_without_a_device_is_refused():
    with pytest.raises(devconv.InvalidDeviceError, match=r"acme:0 \.\. acme:1"):
        devconv.convert(nn.Linear(2, 2), "acme:7")


def test_inside_its_scope_the_bare_name_means_the_device():
    with devconv.backend_for("acme").scope(torch.device("acme:1")):
        assert torch.ones(1, device="acme").device == torch.device("acme:1")


# Conversions


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_takes_the_route_of_the_devices_kind(acme, kind, road, door):
    acme.set_kind(kind)
    model = model_on(ROADS[road][0])

    report = convert(model, road, door)

    routes = {item.route for item in report.items if item.kind == "parameter"}
    assert routes == {ROUTES.get((kind, road), "set-data")}


@pytest.mark.parametrize("in_place", [True, False, None])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_backend_claims_of_its_kind_never_breaks_a_model(acme, claim, kind, in_place):
    claim(in_place=in_place)
    acme.set_kind(kind)
    model, optimizer = trained_on("cpu")
    twin, twin_optimizer = trained_on("cpu")

    convert(model, "cpu-acme:0", optimizer=optimizer)

    losses = [step(model, optimizer, seed) for seed in range(5, 8)]
    assert losses == pytest.approx([step(twin, twin_optimizer, seed) for seed in range(5, 8)], rel=1e-5)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("road", ["cpu-acme:0", "acme:0-cpu", "acme:0-acme:1"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_the_model_had_never_moved(acme, kind, road, door):
    acme.set_kind(kind)
    model, optimizer = trained_on(ROADS[road][0])
    twin, twin_optimizer = trained_on("cpu")
    before = [tensor for _, tensor in slots(model) if isinstance(tensor, nn.Parameter)]
    grads = [p.grad for p in before]

    # The flag's hook on optimizers outlives its scope, so that what the optimizer has follows at the next step.
    convert(model, road, door, optimizer)

    after = [tensor for _, tensor in slots(model) if isinstance(tensor, nn.Parameter)]
    assert all(new is old for new, old in zip(after, before, strict=True))
    assert all(p.grad is grad for p, grad in zip(after, grads, strict=True))
    assert all(p.grad.device == p.device == torch.device(ROADS[road][1]) for p in after)
    assert model.second.weight is model.first.weight
    assert model.window.untyped_storage().data_ptr() == model.scale.untyped_storage().data_ptr()
    losses = [step(model, optimizer, seed) for seed in range(5, 8)]
    assert losses == pytest.approx([step(twin, twin_optimizer, seed) for seed in range(5, 8)], rel=1e-5)


def test_the_method_that_torch_generates_for_the_device_is_a_door(acme):
    model, optimizer = trained_on("cpu")
    weight = model.first.weight

    with devconv.registry_conversion():
        model.acme(1)

    assert model.first.weight is model.second.weight is weight
    assert weight.device == torch.device("acme:1")
    assert step(model, optimizer, 5) > 0


def test_a_model_on_two_devices_comes_together(acme):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    devconv.convert(model[0], "acme:0")
    devconv.convert(model[1], "acme:1")
    values = [p.tolist() for p in model.parameters()]

    devconv.convert(model, "acme:1")

    assert {p.device for p in model.parameters()} == {torch.device("acme:1")}
    assert [p.tolist() for p in model.parameters()] == values


@pytest.mark.needs("xla", 1)
def test_a_model_goes_on_to_another_foreign_device(acme):
    model, optimizer = trained_on("acme:1")
    twin, twin_optimizer = trained_on("cpu")

    devconv.convert(model, "xla:0", optimizers=[optimizer])

    assert step(model, optimizer, 5) == pytest.approx(step(twin, twin_optimizer, 5), rel=1e-4)


# All or nothing


def copies_of(acme, road, kind):
    """Number of copies that a conversion makes."""
    model, optimizer = trained_on(ROADS[road][0])
    before = acme.ledger()
    convert(model, road, optimizer=optimizer)
    spent = acme.ledger() - before
    return spent.sent.copies + spent.fetched.copies + spent.copied.copies


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from-there-on"])
@pytest.mark.parametrize("road", ["cpu-acme:0", "acme:0-cpu", "acme:0-acme:1"])
@pytest.mark.parametrize("kind", KINDS)
def test_whichever_copy_fails_the_model_and_its_optimizer_are_what_they_were(acme, kind, road, forever):
    acme.set_kind(kind)
    number = copies_of(acme, road, kind)
    model, optimizer = trained_on(ROADS[road][0])
    before, memory = state_of(model, optimizer), live(acme)
    assert number >= len({id(tensor) for _, tensor in slots(model)})

    for ordinal in range(1, number + 1):
        acme.fail_copy(ordinal, from_there_on=forever)
        with pytest.raises(RuntimeError, match="failed, as it was told to"):
            convert(model, road, optimizer=optimizer)
        acme.fail_copy(None)
        assert state_of(model, optimizer) == before, f"copy {ordinal} of {number}"
        assert live(acme, memory) == memory, f"copy {ordinal} of {number} left memory behind"

    convert(model, road, optimizer=optimizer)
    assert step(model, optimizer, 9) > 0


@pytest.mark.parametrize("tells", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("road", ["cpu-acme:0", "acme:0-acme:1"])
def test_memory_that_runs_out_anywhere_changes_nothing(acme, claim, road, tells):
    claim(tells_memory=tells)
    index = torch.device(ROADS[road][1]).index
    model, optimizer = trained_on(ROADS[road][0])
    before, memory = state_of(model, optimizer), live(acme)
    need = sum(tensor.nbytes for _, tensor in slots(model))
    refused = 0

    for room in range(0, 4 * need, 48):
        acme.set_memory_limit(memory[index] + room, index)
        try:
            convert(model, road, optimizer=optimizer)
        except (torch.OutOfMemoryError, devconv.ConversionRefused):
            refused += 1
        else:
            break
        finally:
            acme.set_memory_limit(None)
        assert state_of(model, optimizer) == before, f"{room} bytes of room"
        assert live(acme, memory) == memory, f"{room} bytes of room"

    assert refused > need // 48
    assert model.first.weight.device == torch.device(ROADS[road][1])
    assert step(model, optimizer, 9) > 0


def test_a_device_that_tells_its_memory_refuses_with_the_numbers(acme):
    model = nn.Linear(100, 100)
    acme.set_memory_limit(live(acme)[0] + 1000, 0)

    with pytest.raises(devconv.ConversionRefused, match="acme:0"):
        devconv.convert(model, "acme:0")

    assert model.weight.device.type == "cpu"


@pytest.mark.parametrize("honest", [True, False])
def test_float64_that_the_device_lacks_changes_nothing(acme, claim, honest):
    claim(float64=None if honest else True)
    acme.refuse_float64()
    devconv.prepare("acme")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    values = [p.tolist() for p in model.parameters()]

    expected = pytest.raises(devconv.ConversionRefused, match=r"1\.weight") if honest else pytest.raises(TypeError)
    with expected:
        devconv.convert(model, "acme:0")

    assert [p.device.type for p in model.parameters()] == ["cpu"] * 4
    assert [p.tolist() for p in model.parameters()] == values


def test_a_tensor_made_while_the_device_was_of_another_kind_still_converts_or_stays(acme):
    # devconv tried a scratch parameter once and remembers; this parameter is not like it.
    acme.set_kind("foreign")
    model, optimizer = trained_on("acme:0")
    acme.set_kind("set-data")
    planning.set_data_works(torch.device("acme:0"), torch.float32, torch.device("cpu"), torch.float32)
    before = state_of(model, optimizer)

    try:
        devconv.convert(model, "cpu", optimizers=[optimizer])
    except RuntimeError:
        assert state_of(model, optimizer) == before
    else:
        assert model.first.weight.device.type == "cpu"
    with nullcontext():
        assert step(model, optimizer, 5) > 0
