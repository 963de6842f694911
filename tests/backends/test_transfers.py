"""`send`, `fetch` and `copy` of every backend of ours whose device holds values."""

from __future__ import annotations

import pytest
import torch

import devconv

TYPES = [pytest.param(name, marks=pytest.mark.needs(name), id=name) for name in ("cpu", "cuda", "xla")]
TYPES_OF_TWO = [pytest.param(name, marks=pytest.mark.needs(name, 2), id=name) for name in ("cuda", "xla")]

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]

BASE = torch.arange(24.0).reshape(4, 6)
COMPLEX = torch.tensor([1 + 2j, 3 - 1j])
LAYOUTS = {
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0),
    "empty with dimensions": torch.empty(2, 0, 3),
    "transposed": BASE.t(),
    "sliced": BASE[1:3, ::2],
    "offset": BASE[2],
    "expanded": torch.ones(1).expand(5, 5),
    "channels_last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def numbers(dtype):
    return torch.tensor([0, 1, 0, 3, 0, 1]).to(dtype)


def bits(tensor):
    """The bytes of a host tensor: equal where the values are, NaN and -0.0 too."""
    return (
        tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []
    )


@pytest.fixture
def place(request):
    """The first device of a type, and its backend."""
    return devconv.resolve(f"{request.param}:0")


@pytest.fixture
def two(request):
    """Two devices of a type, and their backend."""
    first, backend = devconv.resolve(f"{request.param}:0")
    return first, devconv.resolve(f"{request.param}:1")[0], backend


on_each = pytest.mark.parametrize("place", TYPES, indirect=True)
on_two = pytest.mark.parametrize("two", TYPES_OF_TWO, indirect=True)


def supported(backend, dtype):
    if not backend.capabilities.holds(dtype):
        pytest.skip(f"{backend.device_type} says that it cannot hold {dtype}")


@on_each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_comes_back_as_it_was_sent(place, dtype):
    device, backend = place
    supported(backend, dtype)
    source = numbers(dtype)
    (there,) = backend.send([source], device)
    (back,) = backend.fetch([there])
    assert (there.device, there.dtype) == (device, dtype)
    assert (back.device.type, back.dtype, bits(back)) == ("cpu", dtype, bits(source))


@on_each
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_arrives_with_its_shape_and_values(place, layout):
    device, backend = place
    source = LAYOUTS[layout]
    (there,) = backend.send([source], device)
    (back,) = backend.fetch([there])
    assert there.shape == source.shape == back.shape
    assert bits(back) == bits(source)


@on_each
@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_strides_arrive_where_the_device_has_them(place, layout):
    device, backend = place
    source = LAYOUTS[layout]
    (there,) = backend.send([source], device)
    assert (there.stride() == source.stride()) is backend.capabilities.strides


@on_each
@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])
def test_view_on_the_device_is_fetched_with_its_values(place, layout):
    device, backend = place
    source = LAYOUTS[layout]
    (base,) = backend.send([BASE], device)
    view = base.as_strided(source.shape, source.stride(), source.storage_offset())
    assert bits(backend.fetch([view])[0]) == bits(source)


@on_each
def test_many_tensors_arrive_in_their_order(place):
    device, backend = place
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    sources = [torch.full((index % 5,) * (index % 3), index).to(dtypes[index % 4]) for index in range(64)]
    back = backend.fetch(backend.send(sources, device))
    assert [(tensor.shape, tensor.dtype, bits(tensor)) for tensor in back] == [
        (tensor.shape, tensor.dtype, bits(tensor)) for tensor in sources
    ]


@on_each
def test_unsigned_and_conjugate_tensors_travel_among_others(place):
    device, backend = place
    sources = [torch.tensor([1, 65535], dtype=torch.uint16), COMPLEX.conj(), torch.ones(2)]
    back = backend.fetch(backend.send(sources, device))
    assert [(tensor.dtype, bits(tensor)) for tensor in back] == [(tensor.dtype, bits(tensor)) for tensor in sources]


@on_each
def test_nothing_is_sent_as_nothing(place):
    device, backend = place
    assert (backend.send([], device), backend.fetch([]), backend.copy([], device)) == ([], [], [])


@on_each
@pytest.mark.parametrize("method", ["send", "fetch", "copy"])
def test_results_have_the_dtypes_asked_for(place, method):
    device, backend = place
    sources = [torch.full((2,), float(index)) for index in range(3)]
    dtypes = [torch.float32, torch.bfloat16, torch.int32]
    there = backend.send(sources, device)
    results = {
        "send": lambda: backend.send(sources, device, dtypes=dtypes),
        "fetch": lambda: backend.fetch(there, dtypes=dtypes),
        "copy": lambda: backend.copy(there, device, dtypes=dtypes),
    }[method]()
    assert [result.dtype for result in results] == dtypes
    assert [result.cpu().float().tolist() for result in results] == [[0, 0], [1, 1], [2, 2]]


@on_each
@pytest.mark.parametrize("size", [3, 3_000_000])
def test_sent_copy_does_not_see_its_source_change(place, size):
    device, backend = place
    source = torch.full((size,), 7.0)
    (there,) = backend.send([source], device)
    source.zero_()
    assert torch.equal(there.cpu(), torch.full((size,), 7.0))


@on_each
@pytest.mark.parametrize("size", [3, 3_000_000])
def test_fetched_copy_and_its_source_do_not_see_each_other_change(place, size):
    device, backend = place
    (there,) = backend.send([torch.full((size,), 7.0)], device)
    (back,) = backend.fetch([there])
    there.add_(1)
    back.sub_(1)
    assert torch.equal(there.cpu(), torch.full((size,), 8.0))
    assert torch.equal(back, torch.full((size,), 6.0))


@on_each
def test_copy_on_one_device_is_no_alias(place):
    device, backend = place
    (there,) = backend.send([torch.zeros(3)], device)
    (copied,) = backend.copy([there], device)
    copied.fill_(5)
    assert there.cpu().tolist() == [0, 0, 0]


@on_each
def test_copies_carry_no_graph_and_ask_for_no_gradient(place):
    device, backend = place
    leaf = torch.ones(3, requires_grad=True)
    sent = backend.send([leaf, leaf * 2], device)
    on_device = sent[0].clone().requires_grad_()
    made = [*sent, *backend.fetch([on_device, on_device * 2]), *backend.copy([on_device, on_device * 2], device)]
    assert [tensor.requires_grad for tensor in made] == [False] * 6
    assert [tensor.grad_fn for tensor in made] == [None] * 6


@on_each
def test_transfer_leaves_its_source_alone(place):
    device, backend = place
    source = torch.ones(3, requires_grad=True)
    source.grad = torch.full((3,), 2.0)
    backend.fetch(backend.send([source], device))
    assert (source.requires_grad, source.grad.tolist(), source.tolist()) == (True, [2, 2, 2], [1, 1, 1])


@on_each
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__
)
def test_transfers_work_in_every_grad_mode(place, mode):
    device, backend = place
    with mode():
        back = backend.fetch(backend.copy(backend.send([torch.arange(3.0)], device), device))
    assert back[0].tolist() == [0, 1, 2]


@on_each
def test_late_copy_reads_its_source_before_it_is_freed(place):
    device, backend = place
    (there,) = backend.send([torch.full((1_000_000,), 7.0)], device, non_blocking=True)
    torch.full((1_000_000,), 1.0)  # takes the pages that the source had
    backend.synchronize(device)
    assert there.cpu().min().item() == 7.0


@on_two
def test_tensors_of_several_devices_are_fetched_in_one_call(two):
    first, second, backend = two
    there = [
        *backend.send([torch.full((2,), 1.0)], second),
        *backend.send([torch.full((3,), 2.0)], first),
        *backend.send([torch.full((), 3.0)], second),
    ]
    assert [tensor.tolist() for tensor in backend.fetch(there)] == [[1, 1], [2, 2, 2], 3]


@on_two
def test_tensors_of_several_devices_are_copied_to_one(two):
    first, second, backend = two
    there = [*backend.send([torch.full((2,), 1.0)], second), *backend.send([torch.full((3,), 2.0)], first)]
    copied = backend.copy(there, second)
    assert [tensor.device for tensor in copied] == [second, second]
    assert [tensor.cpu().tolist() for tensor in copied] == [[1, 1], [2, 2, 2]]


@on_two
def test_sending_to_a_device_leaves_the_current_one_current(two):
    _, second, backend = two
    before = backend.current_index()
    backend.copy(backend.send([torch.zeros(2)], second), second)
    assert backend.current_index() == before


@on_two
def test_device_without_index_is_the_current_one(two):
    first, _, backend = two
    assert devconv.resolve(first.type)[0] == torch.device(first.type, backend.current_index())


@on_each
def test_index_that_does_not_exist_is_refused_with_those_that_do(place):
    device, backend = place
    missing = f"{device.type}:{max(backend.device_count(), 1)}"
    with pytest.raises(devconv.InvalidDeviceError, match=f"{device.type}:0") as caught:
        devconv.resolve(missing)
    assert caught.value.device == missing


@on_each
def test_waiting_for_all_devices_waits_for_each(place):
    device, backend = place
    (there,) = backend.send([torch.ones(4)], device)
    there.add_(1)
    backend.synchronize()
    backend.synchronize(device)
    assert there.cpu().tolist() == [2, 2, 2, 2]


@on_each
def test_free_memory_is_a_number_of_bytes_or_unknown(place):
    device, backend = place
    free = backend.free_memory(device)
    assert free is None or free > 0


@on_each
def test_preparing_again_is_harmless(place):
    device, backend = place
    for _ in range(3):
        backend.prepare()
    assert backend.fetch(backend.send([torch.ones(1)], device))[0].tolist() == [1]


@on_each
def test_seeded_draws_repeat(place):
    device, backend = place
    if not backend.capabilities.own_rng:
        pytest.skip(f"torch.manual_seed seeds {device.type}")
    draws = []
    for _ in range(2):
        backend.manual_seed(11)
        draws.append(torch.rand(4, device=device).cpu().tolist())
    assert draws[0] == draws[1]
