"""The device of tests/vendor_acme, by itself: a foreign device must be right before it can prove anything about devconv."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.needs("acme", 2)

DEVICES = ["acme:0", "acme:1"]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.complex64, torch.int8, torch.int32, torch.int64, torch.bool]


@pytest.fixture
def acme():
    import torch_acme

    yield torch_acme
    torch_acme.clear_faults()
    torch_acme.set_kind(os.environ.get("ACME_KIND", "foreign"))
    torch_acme.device_module.set_device(0)


def run(code, **variables):
    """Run `code` in a process of its own: for what ends a process, or must happen before the device is loaded."""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def sample(dtype=torch.float32, shape=(3, 4)):
    return (torch.randn(shape) * 10).to(dtype)


class Net(nn.Module):
    """Convolution, normalisation with running statistics, and a head: every kind of kernel that training needs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.body(x))


def train(net, optimizer, device, steps=3):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, 1, 6, 6, generator=generator).to(device)
    y = torch.randint(0, 3, (5,), generator=generator).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(ours, theirs):
    __tracebackhide__ = True
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach().cpu(), rtol=1e-6, atol=1e-6)


# Making tensors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.ones(2, 3, dtype=torch.int64, device=d),
        lambda d: torch.full((2,), 3.5, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=d),
        lambda d: torch.tensor(7, device=d),
        lambda d: torch.zeros(0, 3, device=d),
        lambda d: torch.zeros_like(torch.ones(2, 3, device=d).t()),
        lambda d: torch.empty(2, 3, 4, 5, device=d, memory_format=torch.channels_last).fill_(1),
        lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(2),
    ],
)
def test_a_factory_makes_what_it_makes_on_the_host(make, device):
    made, twin = make(device), make("cpu")

    assert made.device == torch.device(device)
    assert (made.dtype, made.shape, made.stride()) == (twin.dtype, twin.shape, twin.stride())
    assert torch.equal(made.cpu(), twin)


def test_a_device_without_index_is_the_current_one(acme):
    torch.acme.set_device(1)

    assert torch.ones(1, device="acme").device == torch.device("acme:1")


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match="acme:2 does not exist"):
        torch.ones(1, device="acme:2")


def test_the_current_device_belongs_to_its_thread(acme):
    seen = []
    torch.acme.set_device(1)
    thread = threading.Thread(target=lambda: seen.append(torch.acme.current_device()))

    thread.start()
    thread.join(30)

    assert seen == [0]


def test_a_device_block_goes_back_to_the_device_before(acme):
    with torch.acme.device("acme:1"):
        inside = torch.acme.current_device()

    assert (inside, torch.acme.current_device()) == (1, 0)


@pytest.mark.parametrize("count", ["0", "1", "3"])
def test_the_number_of_devices_is_set_before_loading(count):
    done = run(
        "import torch, torch_acme; print(torch.acme.device_count(), torch.acme.is_available())", ACME_DEVICES=count
    )

    assert done.stdout.split() == [count, str(count != "0")]


# Copies


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [["acme:0"], ["acme:1"], ["acme:0", "acme:1"], ["acme:1", "acme:1"]], ids=" ".join)
def test_values_come_back_as_they_left(path, dtype):
    values = sample(dtype)
    there = values
    for device in path:
        there = there.to(device, copy=True)

    assert there.device == torch.device(path[-1])
    assert torch.equal(there.cpu(), values)


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t.expand(2, 3, 4),
        lambda t: t[:, None, :, None].to(memory_format=torch.channels_last),
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: torch.view_as_complex(t.reshape(6, 2)).conj(),
        lambda t: torch.view_as_complex(t.reshape(6, 2)).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "channels_last", "scalar", "empty", "conj", "neg"],
)
@pytest.mark.parametrize("road", ["there", "back", "across"])
def test_a_copy_keeps_values_and_strides_as_torch_does_on_the_host(look, road):
    source = look(sample() if road == "there" else sample().to("acme:0"))
    target = {"there": "acme:0", "back": "cpu", "across": "acme:1"}[road]
    twin = source.cpu().clone() if road == "there" else source.cpu()

    arrived = source.to(target)

    assert arrived.device == torch.device(target)
    assert arrived.stride() == twin.stride()
    assert torch.equal(arrived.cpu().resolve_conj().resolve_neg(), twin.resolve_conj().resolve_neg())


@pytest.mark.parametrize("there", [True, False], ids=["there", "back"])
def test_a_copy_converts_and_broadcasts_on_the_way(there):
    source = torch.arange(4, dtype=torch.int32, device="cpu" if there else "acme:0")
    target = torch.zeros(3, 4, dtype=torch.float64, device="acme:0" if there else "cpu")

    target.copy_(source)

    assert torch.equal(target.cpu(), torch.arange(4, dtype=torch.float64).expand(3, 4))


def test_a_copy_into_a_view_leaves_the_rest(acme):
    base = torch.zeros(3, 4, device="acme:1")

    base[:, 1].copy_(torch.ones(3))

    assert torch.equal(base.cpu(), torch.tensor([[0.0, 1.0, 0.0, 0.0]]).expand(3, 4))


def test_the_host_cannot_read_device_memory():
    done = run(
        "import ctypes, torch, torch_acme\n"
        "t = torch.ones(4, device='acme:0'); print(t.sum().item(), flush=True)\n"
        "print(ctypes.c_float.from_address(t.data_ptr()).value)"
    )

    assert done.stdout == "4.0\n"
    assert done.returncode < 0, "reading a device address from the host must end the process"


# Views and storages


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.view(4, 6),
        lambda t: t.reshape(2, 12),
        lambda t: t.transpose(0, 2),
        lambda t: t.permute(2, 0, 1),
        lambda t: t[1, :, 1:3],
        lambda t: t.narrow(2, 1, 2),
        lambda t: t.select(1, 2),
        lambda t: t.unfold(2, 2, 1),
        lambda t: t.as_strided((2, 2), (5, 2), 3),
        lambda t: t.diagonal(0, 1, 2),
        lambda t: t.split(2, 2)[1],
        lambda t: t.chunk(3, 1)[2],
        lambda t: t.unbind(0)[1],
        lambda t: t.squeeze(0).unsqueeze(1),
        lambda t: t.expand(3, 2, 3, 4),
        lambda t: t.detach(),
        lambda t: t.view(torch.int32),
        lambda t: torch.view_as_complex(t.view(2, 3, 2, 2)),
        lambda t: torch.view_as_real(torch.view_as_complex(t.view(2, 3, 2, 2))),
        lambda t: t.flatten().movedim(0, 0),
    ],
)
def test_a_view_has_the_geometry_and_the_storage_of_its_base(look):
    host = torch.arange(24.0).reshape(2, 3, 4)
    base = host.to("acme:1")

    view, twin = look(base), look(host)

    assert (view.shape, view.stride(), view.storage_offset()) == (twin.shape, twin.stride(), twin.storage_offset())
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert torch.equal(view.cpu(), twin)


def test_a_write_through_a_view_shows_in_the_base():
    base = torch.zeros(2, 3, device="acme:0")

    base.t()[1:].add_(5)

    assert torch.equal(base.cpu(), torch.tensor([[0.0, 5.0, 5.0]]).expand(2, 3))


def test_resize_keeps_what_fits():
    tensor = torch.arange(4.0, device="acme:0")

    tensor.resize_(2, 4)

    assert tensor.shape == (2, 4)
    assert torch.equal(tensor[0].cpu(), torch.arange(4.0))


@pytest.mark.parametrize("form", ["tensor", "storage", "geometry", "nothing"])
def test_set_points_a_tensor_at_another_storage(form):
    source = torch.arange(6.0, device="acme:0")
    tensor = torch.zeros(2, device="acme:0")

    if form == "tensor":
        tensor.set_(source)
    elif form == "storage":
        tensor.set_(source.untyped_storage())
    elif form == "geometry":
        tensor.set_(source.untyped_storage(), 1, (2, 2), (1, 3))
    else:
        tensor.set_()

    expected = {"geometry": torch.tensor([[1.0, 4.0], [2.0, 5.0]]), "nothing": torch.empty(0)}.get(
        form, torch.arange(6.0)
    )
    assert torch.equal(tensor.cpu(), expected)


def test_a_storage_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="devices must match"):
        torch.zeros(2, device="acme:0").set_(torch.zeros(2, device="acme:1").untyped_storage())


# Computing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    ],
    ids=["SGD", "momentum", "AdamW-foreach", "AdamW-single", "AdamW-fused"],
)
def test_training_gives_the_numbers_of_the_host(optimizer, device):
    twin = Net()
    net = copy.deepcopy(twin).to(device)

    losses = train(net, optimizer(net.parameters()), device)
    expected = train(twin, optimizer(twin.parameters()), "cpu")

    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in net.state_dict().items():
        assert_same(value, twin.state_dict()[name])


def test_gradients_flow_between_two_devices():
    net = Net()
    twin = copy.deepcopy(net)
    net.body.to("acme:0")
    net.head.to("acme:1")
    x = torch.randn(4, 1, 6, 6)

    net.head(net.body(x.to("acme:0")).to("acme:1")).sum().backward()
    twin(x).sum().backward()

    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert ours.grad.device == ours.device
        assert_same(ours.grad, theirs.grad)


def test_two_threads_train_on_two_devices():
    twin = Net()
    expected = train(copy.deepcopy(twin), torch.optim.SGD([torch.zeros(1)], 0.1), "cpu", steps=1)
    nets = {device: copy.deepcopy(twin).to(device) for device in DEVICES}
    losses = {}

    def work(device):
        losses[device] = train(nets[device], torch.optim.SGD(nets[device].parameters(), 0.1), device, steps=5)

    threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert losses["acme:0"] == losses["acme:1"]
    assert losses["acme:0"][0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_recurrent_layers_give_the_gradients_of_the_host(kind, bias):
    twin = kind(3, 4, num_layers=2, bias=bias, bidirectional=True)
    layer = copy.deepcopy(twin).to("acme:1")
    x = torch.randn(5, 2, 3)
    there = x.to("acme:1").requires_grad_()
    x.requires_grad_()

    outputs, expected = layer(there)[0], twin(x)[0]
    (outputs * outputs).sum().backward()
    (expected * expected).sum().backward()

    assert_same(outputs, expected)
    assert_same(there.grad, x.grad)
    for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_transformer_layer_computes_as_on_the_host(training):
    twin = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    layer = copy.deepcopy(twin).to("acme:0")
    x = torch.randn(2, 5, 8)

    with torch.set_grad_enabled(training):
        torch.testing.assert_close(layer(x.to("acme:0")).cpu(), twin(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", ["cpu", "acme:1"])
def test_operands_of_two_devices_are_refused(other):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 3, device="acme:0").matmul(torch.ones(3, 2, device=other))


def test_scalars_and_indices_come_from_the_host():
    values = torch.arange(4.0, device="acme:0")

    picked = (values * torch.tensor(2.0))[torch.tensor([3, 1])]

    assert picked.tolist() == [6.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_runs_linear_in_half_and_its_loss_in_float32(dtype):
    layer = nn.Linear(3, 2).to("acme:0")

    with torch.autocast("acme", dtype=dtype):
        outputs = layer(torch.randn(4, 3, device="acme:0"))
        loss = functional.mse_loss(outputs, torch.zeros(4, 2, device="acme:0"))
    loss.backward()

    assert (outputs.dtype, loss.dtype, layer.weight.grad.dtype) == (dtype, torch.float32, torch.float32)


def test_a_checkpointed_block_draws_the_same_dropout_twice():
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to("acme:1")
    x = torch.randn(4, 8, device="acme:1", requires_grad=True)

    y = checkpoint(block, x, use_reentrant=False)
    y.sum().backward()

    reached = (y != 0).float()
    torch.testing.assert_close(x.grad.cpu(), (2 * reached @ block[0].weight).detach().cpu())


def test_dynamo_runs_a_model_on_the_device():
    torch._dynamo.reset()
    twin = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    net = torch.compile(copy.deepcopy(twin).to("acme:0"), backend="aot_eager")
    x = torch.randn(2, 3)

    net(x.to("acme:0")).sum().backward()
    twin(x).sum().backward()

    assert_same(net.get_parameter("_orig_mod.0.weight").grad, twin[0].weight.grad)


# Random numbers


def test_one_seed_seeds_every_device():
    torch.manual_seed(3)
    first = [torch.randn(4, device=device).tolist() for device in DEVICES]
    torch.manual_seed(3)
    second = [torch.randn(4, device=device).tolist() for device in DEVICES]

    assert first == second


def test_drawing_on_the_device_leaves_the_host_generator_alone():
    state = torch.get_rng_state()

    torch.rand(4, device="acme:0")
    nn.Dropout(0.5)(torch.ones(8, device="acme:0"))
    torch.randperm(5, device="acme:1")
    torch.bernoulli(torch.full((4,), 0.5, device="acme:1"))

    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_state_can_be_put_back():
    state = torch.acme.get_rng_state("acme:1")
    first = torch.rand(4, device="acme:1").tolist()

    torch.acme.set_rng_state(state, "acme:1")

    assert torch.rand(4, device="acme:1").tolist() == first


def test_a_generator_of_ones_own_is_independent():
    generator = torch.Generator(device="acme:0").manual_seed(5)
    twin = torch.Generator().manual_seed(5)
    state = torch.acme.get_rng_state(0)

    drawn = torch.randn(20, device="acme:0", generator=generator)

    assert torch.equal(drawn.cpu(), torch.randn(20, generator=twin))
    assert torch.equal(torch.acme.get_rng_state(0), state)


def test_a_generator_of_the_host_is_refused():
    with pytest.raises(RuntimeError, match="generator"):
        torch.zeros(3, device="acme:0").normal_(generator=torch.Generator())


# Copies of objects


def test_deepcopy_keeps_device_values_and_ties():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net.to("acme:1")
    net[1].weight = net[0].weight

    twin = copy.deepcopy(net)

    assert twin[1].weight is twin[0].weight is not net[0].weight
    assert twin[0].weight.device == torch.device("acme:1")
    assert_same(twin[0].weight, net[0].weight)


def test_pickle_keeps_device_and_values():
    parameter = nn.Parameter(torch.randn(2, 3, device="acme:1"))

    loaded = pickle.loads(pickle.dumps(parameter))

    assert type(loaded) is nn.Parameter
    assert loaded.device == parameter.device
    assert_same(loaded, parameter)


@pytest.mark.parametrize("map_location", [None, "cpu", "acme:0", {"acme:1": "acme:0"}], ids=str)
def test_a_saved_tensor_loads_where_it_is_asked_to(map_location):
    values = torch.arange(6.0, device="acme:1").reshape(2, 3)
    file = io.BytesIO()
    torch.save({"whole": values, "view": values.t()}, file)
    file.seek(0)

    loaded = torch.load(file, map_location=map_location)

    place = {None: "acme:1", "cpu": "cpu"}.get(map_location if isinstance(map_location, str | None) else "", "acme:0")
    assert loaded["whole"].device == torch.device(place)
    assert loaded["view"].stride() == (1, 3)
    assert loaded["view"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
    assert torch.equal(loaded["whole"].cpu(), values.cpu())


def test_swap_tensors_exchanges_host_and_device():
    host, there = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((3,), 2.0, device="acme:0"))

    torch.utils.swap_tensors(host, there)

    assert (host.device.type, there.device.type) == ("acme", "cpu")
    assert (host.tolist(), there.tolist()) == ([2.0, 2.0, 2.0], [1.0, 1.0])


# Kinds


@pytest.mark.parametrize("target", ["acme:0", "cpu"])
@pytest.mark.parametrize("kind", ["foreign", "set-data"])
def test_only_the_set_data_kind_takes_the_place_of_a_host_tensor(acme, kind, target):
    acme.set_kind(kind)
    parameter = nn.Parameter(torch.zeros(2, device="cpu" if target != "cpu" else "acme:0"))
    new = torch.ones(2, device=target)

    if kind == "foreign":
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            parameter.data = new
    else:
        parameter.data = new
        (parameter * 2).sum().backward()
        assert parameter.grad.device == parameter.device == torch.device(target)
        assert parameter.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["foreign", "set-data"])
def test_both_kinds_take_each_others_place_among_their_own(acme, kind):
    acme.set_kind(kind)
    parameter = nn.Parameter(torch.zeros(2, device="acme:0"))

    parameter.data = torch.ones(2, device="acme:1")

    assert parameter.device == torch.device("acme:1")
    assert parameter.tolist() == [1.0, 1.0]


def test_a_process_can_start_with_the_set_data_kind():
    done = run(
        "import torch, torch_acme; p = torch.nn.Parameter(torch.ones(2)); p.data = p.data.to('acme:1'); print(p.device)",
        ACME_KIND="set-data",
    )

    assert done.stdout == "acme:1\n"


# The books


def test_copies_are_counted_with_their_bytes(acme):
    before = acme.ledger(0), acme.ledger(1)

    there = torch.ones(10).to("acme:0")
    there.to("acme:1").cpu()
    there.double()

    spent = acme.ledger(0) - before[0], acme.ledger(1) - before[1]
    assert (spent[0].sent, spent[0].fetched) == (acme.Traffic(1, 40), acme.Traffic())
    assert (spent[0].copied, spent[1].copied) == (acme.Traffic(1, 80), acme.Traffic(1, 40))
    assert (spent[1].sent, spent[1].fetched) == (acme.Traffic(), acme.Traffic(1, 40))


def test_what_the_fallback_copies_is_counted_apart(acme):
    a = torch.ones(10, device="acme:0")
    before = acme.ledger()

    a.cos()

    spent = acme.ledger() - before
    assert (spent.sent, spent.fetched, spent.copied) == (acme.Traffic(),) * 3
    assert spent.fallback_calls == 1
    assert spent.fallback.copies >= 2
    assert spent.fallback.bytes == spent.fallback.copies * 40


def test_memory_is_counted_to_the_byte(acme):
    gc.collect()
    acme.reset_peak()
    before = acme.ledger(0)

    first = torch.empty(100, device="acme:0")
    second = torch.empty(7, dtype=torch.int8, device="acme:0")
    del first

    after = acme.ledger(0)
    assert after.live_bytes - before.live_bytes == 7 == second.nbytes
    assert after.peak_bytes - before.live_bytes == 407
    assert (after.allocations - before.allocations, after.live_blocks - before.live_blocks) == (2, 1)


def test_a_list_crosses_in_one_batch_with_one_copy_a_tensor(acme):
    tensors = [torch.ones(3), torch.ones(2, 2).t(), torch.ones((), dtype=torch.int64)]
    before = acme.ledger(1)

    copies = acme.copy_list(tensors, torch.device("acme:1"), [])

    spent = acme.ledger(1) - before
    assert (spent.batches, spent.sent, spent.allocations) == (1, acme.Traffic(3, 36), 3)
    assert [copy.stride() for copy in copies] == [tensor.stride() for tensor in tensors]


def test_training_leaves_nothing_behind(acme):
    gc.collect()
    before = [acme.ledger(index).live_bytes for index in range(2)]

    net = Net().to("acme:1")
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, "acme:1")
    del net, optimizer
    gc.collect()

    assert [acme.ledger(index).live_bytes for index in range(2)] == before


def test_freed_memory_is_used_again(acme):
    big = acme.ledger(0).live_bytes + (256 << 20)
    acme.set_memory_limit(big, 0)

    for _ in range(5):
        torch.empty(200 << 20, dtype=torch.uint8, device="acme:0")[-1].fill_(1)

    assert acme.ledger(0).live_bytes < big


# Faults


def test_memory_runs_out_where_it_is_told_to(acme):
    gc.collect()
    live = acme.ledger(0).live_bytes
    acme.set_memory_limit(live + 1000, 0)

    with pytest.raises(torch.OutOfMemoryError, match="acme:0 is out of memory: 1001 bytes asked for"):
        torch.empty(1001, dtype=torch.uint8, device="acme:0")

    assert torch.empty(1000, dtype=torch.uint8, device="acme:0").nbytes == 1000
    assert torch.empty(1001, dtype=torch.uint8, device="acme:1").nbytes == 1001
    assert acme.ledger(0).live_bytes == live


@pytest.mark.parametrize("ordinal", [1, 2, 3])
def test_copy_k_fails_and_no_other(acme, ordinal):
    failed = []
    acme.fail_copy(ordinal)

    for number in range(1, 5):
        try:
            torch.ones(2).to("acme:0").add_(1)
        except RuntimeError as error:
            failed.append((number, str(error).splitlines()[0]))

    assert failed == [(ordinal, "acme:0: a copy from the host failed, as it was told to")]


def test_copies_can_fail_from_one_on(acme):
    there = torch.ones(2, device="acme:0")
    acme.fail_copy(2, from_there_on=True)
    there.cpu()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="to the host failed"):
            there.cpu()

    acme.fail_copy(None)
    assert there.tolist() == [1.0, 1.0]


def test_a_batch_that_fails_half_way_frees_what_it_made(acme):
    gc.collect()
    live = acme.ledger(0).live_bytes
    acme.fail_copy(3)

    with pytest.raises(RuntimeError, match="failed"):
        acme.copy_list([torch.ones(10)] * 5, torch.device("acme:0"), [])

    assert acme.ledger(0).live_bytes == live


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_device_without_float64_refuses_it(acme, dtype):
    acme.refuse_float64()

    with pytest.raises(TypeError, match="no 64-bit floats"):
        torch.ones(2, dtype=dtype).to("acme:0")

    assert torch.ones(2).to("acme:0").tolist() == [1.0, 1.0]


def test_a_block_of_faults_puts_everything_back(acme):
    limit = acme.memory_limit(0)

    with acme.faults(memory=10, copy=1, float64=False, kind="set-data"), pytest.raises(RuntimeError):
        torch.ones(1).to("acme:0")

    assert acme.memory_limit(0) == limit
    assert torch.ones(2, dtype=torch.float64).to("acme:0").dtype == torch.float64


def test_a_process_without_devices_says_so():
    done = run(
        "import devconv\n"
        "try:\n    devconv.resolve('acme')\nexcept devconv.UnavailableDeviceError as error:\n    print(error)",
        ACME_DEVICES="0",
    )

    assert "its driver finds no device" in done.stdout
