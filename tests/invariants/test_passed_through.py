"""Promise: what stock torch does correctly keeps working: TorchScript in place, FSDP2, and a no-op on a DDP model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import devconv
from tests.moves import named_tensors
from tests.zoo import fill, loss_of, mlp, train


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of one, over gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(5, 4))])
def test_a_script_module_takes_another_dtype(make: object) -> None:
    model = make(fill(mlp()))  # type: ignore[operator]
    before = dict(model.named_parameters())
    expected = model(torch.ones(5, 4)).detach().double()

    with devconv.registry_conversion():
        model.double()

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert torch.allclose(model(torch.ones(5, 4, dtype=torch.float64)), expected, atol=1e-6)
    assert dict(model.named_parameters()).keys() == before.keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_module_inside_a_model_takes_another_dtype() -> None:
    model = nn.Sequential(torch.jit.script(fill(nn.Linear(4, 4))), fill(nn.Linear(4, 2)))
    twin = copy.deepcopy(model)

    with devconv.registry_conversion():
        model.double()

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert torch.allclose(model(torch.ones(1, 4).double()), twin(torch.ones(1, 4)).double(), atol=1e-6)


@pytest.mark.timeout(120)
def test_an_fsdp2_module_takes_another_dtype_and_trains(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model, twin = fill(mlp()), fill(mlp())
    fully_shard(model)

    with devconv.registry_conversion():
        model.double()
    twin.double()
    for each in (model, twin):
        train(each, torch.optim.SGD(each.parameters(), 0.1, momentum=0.9), range(3))

    for (name, moved), reference in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert moved.dtype is torch.float64, name
        assert torch.allclose(moved.full_tensor(), reference), name


@pytest.mark.timeout(120)
def test_an_fsdp2_module_that_was_trained_converts_as_in_stock_torch(process_group: None) -> None:
    # After a backward pass its parameters are FSDP's own: devconv must not look into them.
    from torch.distributed.fsdp import fully_shard

    model, twin = fill(mlp()), fill(mlp())
    for each in (model, twin):
        fully_shard(each)
        train(each, torch.optim.SGD(each.parameters(), 0.1, momentum=0.9), range(2))

    with devconv.registry_conversion():
        model.double()
    twin.double()

    for (name, moved), reference in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert moved.dtype is reference.dtype is torch.float64, name
        assert torch.equal(moved.full_tensor(), reference.full_tensor()), name
        assert torch.equal(moved.grad.full_tensor(), reference.grad.full_tensor()), name


@pytest.mark.timeout(120)
def test_a_no_op_on_a_ddp_model_leaves_it_synchronising(process_group: None) -> None:
    model = nn.parallel.DistributedDataParallel(fill(mlp()))
    synchronised: list[int] = []

    def hook(state, bucket):  # torch compares annotations as objects, not as text
        synchronised.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    before = {key: (id(tensor), tensor._version) for key, tensor in named_tensors(model)}

    with devconv.registry_conversion():
        model.to("cpu").float()
    loss_of(model, 0).backward()

    assert {key: (id(tensor), tensor._version) for key, tensor in named_tensors(model)} == before
    assert synchronised == [0]
