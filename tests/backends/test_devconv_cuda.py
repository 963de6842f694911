"""The CUDA backend, where there is a GPU and where there is none."""

from __future__ import annotations

import pytest
import torch
from devconv_cuda import CudaBackend

import devconv

needs_cuda = pytest.mark.needs("cuda")


@pytest.mark.lane("cpu")
def test_device_is_unavailable_without_a_gpu_and_says_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("this torch sees a GPU")
    with pytest.raises(devconv.UnavailableDeviceError) as caught:
        devconv.resolve("cuda")
    assert caught.value.device_type == "cuda"
    assert caught.value.cure in str(caught.value)


@pytest.mark.lane("cpu")
@pytest.mark.parametrize(
    ("built", "cure"), [(False, "Install a CUDA build"), (True, "nvidia-smi")], ids=["cpu build", "no driver"]
)
def test_missing_build_and_missing_driver_have_cures_of_their_own(monkeypatch, built, cure):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(devconv.UnavailableDeviceError, match=cure):
        CudaBackend().load()


@pytest.mark.lane("cpu")
def test_waiting_for_all_devices_starts_none(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    CudaBackend().synchronize()
    assert waited == []


@pytest.mark.lane("cpu")
def test_waiting_for_all_devices_waits_for_those_in_use(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", [0, 2**20, 2**20].__getitem__)
    CudaBackend().synchronize()
    assert waited == [1, 2]


@needs_cuda
def test_device_without_index_is_the_current_one():
    assert devconv.resolve("cuda")[0] == torch.device("cuda", torch.cuda.current_device())


@needs_cuda
def test_number_alone_is_a_gpu():
    assert devconv.resolve(0)[0] == torch.device("cuda:0")


@needs_cuda
def test_model_on_the_current_gpu_is_not_moved_by_the_name_without_index():
    model = torch.nn.Linear(2, 2, device="cuda:0")
    pointer = model.weight.data_ptr()
    report = devconv.convert(model, "cuda")
    assert model.weight.data_ptr() == pointer
    assert report.bytes == 0


@needs_cuda
def test_free_memory_counts_what_the_allocator_can_use_again():
    backend, device = devconv.backend_for("cuda"), torch.device("cuda:0")
    torch.empty(2**20, device=device)
    free = backend.free_memory(device)
    assert torch.cuda.mem_get_info(device)[0] <= free <= torch.cuda.get_device_properties(device).total_memory


@needs_cuda
def test_pinned_source_may_be_freed_while_its_copy_is_queued():
    backend, device = devconv.backend_for("cuda"), torch.device("cuda:0")
    sources = [torch.full((2**20,), float(index)).pin_memory() for index in range(8)]
    there = backend.send(sources, device, non_blocking=True)
    del sources
    again = [torch.full((2**20,), -1.0).pin_memory() for _ in range(8)]
    backend.synchronize(device)
    assert [tensor.unique().tolist() for tensor in there] == [[float(index)] for index in range(8)]
    assert len(again) == 8
