"""Promise: what stock torch would break silently is refused before anything is touched, all reasons at once, by full name
and with the cure; what it does right is not refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import devconv
from tests.moves import Move, close, named_tensors
from tests.promises import where, with_same_objects
from tests.zoo import fill, loss_of, mlp


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of one, over gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


from_host_once = where(lambda conversion: conversion.source == "cpu" and len(conversion.hops) == 1)


@pytest.mark.timeout(120)
@from_host_once
def test_a_ddp_model_is_refused_since_it_would_stop_synchronising(process_group: None, move: Move) -> None:
    model = nn.parallel.DistributedDataParallel(move.build(mlp))

    with move.refuses("") as caught:
        move(model)

    if move.by_devconv:
        assert "synchronis" in str(caught.value)
        assert "after moving" in str(caught.value)


@pytest.mark.timeout(120)
@from_host_once
def test_the_module_inside_ddp_is_refused_too(process_group: None, move: Move) -> None:
    # ddp.module.cpu() before saving: the reducer would go on with parameters that nobody trains.
    ddp = nn.parallel.DistributedDataParallel(move.build(mlp))

    with move.refuses("0.weight", "0.bias", "2.weight", "2.bias") as caught:
        move(ddp.module)

    if move.by_devconv:
        assert "deepcopy" in str(caught.value)


@pytest.mark.timeout(120)
@from_host_once
def test_after_a_refusal_ddp_still_synchronises(process_group: None, move: Move) -> None:
    model = nn.parallel.DistributedDataParallel(move.build(mlp))
    synchronised: list[int] = []

    def hook(state, bucket):  # torch compares annotations as objects, not as text
        synchronised.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)

    with move.refuses(""):
        move(model)
    loss_of(model, 0).backward()

    assert synchronised == [0]


@pytest.mark.timeout(120)
@from_host_once
def test_ddp_around_a_model_that_was_moved_first_works(process_group: None, move: Move) -> None:
    if move.device.type != "cpu":
        pytest.skip("not applicable: gloo reduces tensors of the host")
    model = move.build(mlp)

    move(model)
    ddp = nn.parallel.DistributedDataParallel(model)
    loss_of(ddp, 0).backward()

    assert model[0].weight.grad.dtype is move.dtype


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@where(lambda conversion: conversion.source == "cpu" and not conversion.keeps_device and len(conversion.hops) == 1)
@where(lambda conversion: conversion.device.type in ("xla", "meta", "acme"))
def test_a_script_module_that_would_come_apart_is_refused(move: Move) -> None:
    model = nn.Sequential(torch.jit.script(move.build(lambda: nn.Linear(4, 4))), move.build(lambda: nn.Linear(4, 2)))

    with move.refuses("0.weight", "0.bias"):
        move(model)


@with_same_objects
def test_a_view_held_outside_the_model_is_refused_by_the_parameters_name(move: Move) -> None:
    # Stock torch leaves the view on the old memory, where nobody sees it go stale.
    model = move.build(mlp)
    view = model[0].weight[0]

    with move.refuses("0.weight") as caught:
        move(model)

    assert view.device == move.source
    if move.by_devconv:
        assert "view" in str(caught.value)


@with_same_objects
def test_once_the_view_is_dropped_the_model_moves(move: Move) -> None:
    model = move.build(mlp)
    view = model[0].weight[0]
    with pytest.raises(devconv.ConversionRefused) if move.by_devconv else pytest.raises(Exception):  # noqa: PT011
        move(model)
    move.failed = None
    del view

    move(model)

    assert model[0].weight.device == move.device


@with_same_objects
def test_a_view_made_without_gradients_is_refused_too(move: Move) -> None:
    model = move.build(mlp)
    with torch.no_grad():
        view = model[0].weight[0]

    with move.refuses("0.weight"):
        move(model)

    assert view.device == move.source


class Keeper(nn.Module):
    """Once it is scripted, it makes a view and keeps it where Python sees neither."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.jit.Attribute([], list[torch.Tensor])

    def forward(self, x: torch.Tensor) -> None:
        self.kept = [x[0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@with_same_objects
def test_a_view_that_only_cpp_holds_is_refused_too(move: Move) -> None:
    model = move.build(mlp)
    keeper = torch.jit.script(Keeper())
    with torch.no_grad():
        keeper(model[0].weight)

    with move.refuses("0.weight"):
        move(model)

    assert keeper.kept[0].device == move.source


@with_same_objects
def test_a_list_of_such_views_names_every_parameter_at_once(move: Move) -> None:
    model = move.build(mlp)
    views = [parameter.view(-1) for parameter in model.parameters()]

    with move.refuses("0.weight", "0.bias", "2.weight", "2.bias"):
        move(model)

    assert len(views) == 4


@with_same_objects
def test_what_refers_to_nothing_that_matters_is_not_refused(move: Move) -> None:
    # References in Python are no reason: they see the move.
    model = move.build(mlp)
    held = [*model.parameters(), *model.state_dict().values(), [p.detach() for p in model.parameters()]]

    move(model)

    assert held[0] is model[0].weight
    assert model[0].weight.device == move.device


def test_different_reasons_come_together(move: Move) -> None:
    if move.conversion.name != "float64":
        pytest.skip("not applicable: complex to real needs a dtype that changes")
    model = move.build(mlp)
    model.register_buffer("phase", torch.tensor([1j]))
    view = model[0].weight[0]

    with move.refuses("0.weight", "phase"):
        move(model)

    assert view is not None


@from_host_once
def test_a_refusal_leaves_every_tensor_alone(move: Move) -> None:
    if not move.conversion.keeps_objects:
        pytest.skip("not applicable: new objects, so that a view keeps what it had")
    model = move.build(mlp)
    loss_of(model, 0).backward()
    view = model[2].weight[0]
    before = [
        (key, id(t), t._version, t.untyped_storage()._cdata, t.device, t.dtype) for key, t in named_tensors(model)
    ]
    grads = [id(parameter.grad) for parameter in model.parameters()]

    with move.refuses("2.weight"):
        move(model)

    assert [
        (k, id(t), t._version, t.untyped_storage()._cdata, t.device, t.dtype) for k, t in named_tensors(model)
    ] == before
    assert [id(parameter.grad) for parameter in model.parameters()] == grads
    assert view is not None


def test_a_plan_lists_what_a_conversion_would_refuse(move: Move) -> None:
    if move.mode != "convert" or not move.conversion.keeps_objects:
        pytest.skip("not applicable: only devconv has plans")
    model = move.build(mlp)
    view = model[0].weight[0]
    hop = move.conversion.hops[0]

    plan = devconv.plan(model, hop.device, hop.dtype)

    assert [refusal.name for refusal in plan.refusals] == ["0.weight"]
    assert "0.weight" in str(plan)
    assert model[0].weight.device == move.source
    assert view is not None


def test_a_refusal_says_what_where_and_the_cure(move: Move) -> None:
    if not move.by_devconv or not move.conversion.keeps_objects:
        pytest.skip("not applicable: stock torch refuses by other means")
    model = nn.ModuleDict({"encoder": move.build(mlp)})
    view = model.encoder[0].weight[0]

    with pytest.raises(devconv.ConversionRefused) as caught:
        move(model)

    (reason,) = caught.value.reasons
    assert reason.name == "encoder.0.weight"
    assert reason.device == str(move.source)
    assert reason.why
    assert reason.cure
    assert "nothing was changed" in str(caught.value)
    assert view is not None


@pytest.mark.parametrize("how", ["backward", "no-grad", "detach", "data", "numpy"])
@from_host_once
def test_what_a_program_does_every_day_is_not_refused(move: Move, how: str) -> None:
    model = move.build(mlp)
    if how == "backward":
        loss_of(model, 0).backward()
    elif how == "no-grad":
        with torch.no_grad():
            loss_of(model, 0)
    elif how == "detach":
        held = model[0].weight.detach()
    elif how == "data":
        held = model[0].weight.data
    else:
        held = model[0].weight.detach().numpy()  # type: ignore[assignment]

    move(model, route=None)

    assert model[0].weight.device == move.device
    if how in ("detach", "data"):
        assert close(held, fill(mlp())[0].weight)


def test_a_model_that_does_not_fit_is_refused_where_the_backend_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = devconv.backend_for("cpu")
    monkeypatch.setattr(type(backend), "free_memory", lambda self, device: 100)
    model = fill(mlp())

    with pytest.raises(devconv.ConversionRefused, match="100 B are free"):
        devconv.convert(model, dtype=torch.float64)

    assert model[0].weight.dtype is torch.float32


def test_a_dtype_that_the_device_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = devconv.backend_for("meta")
    lacking = devconv.Capabilities(unsupported_dtypes=frozenset({torch.float64}))
    monkeypatch.setattr(backend, "capabilities", lacking, raising=False)
    model = nn.ModuleList([fill(mlp()), fill(mlp()).double()])

    with pytest.raises(devconv.ConversionRefused) as caught:
        devconv.convert(model, "meta")

    assert {reason.name for reason in caught.value.reasons} == {"1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"}
    assert all("float64" in str(reason) for reason in caught.value.reasons)
    assert {tensor.device.type for _, tensor in named_tensors(model)} == {"cpu"}


@pytest.mark.parametrize("view", [torch.t, lambda tensor: tensor.unsqueeze(0), lambda tensor: tensor[:1]])
def test_a_function_that_returns_a_view_is_not_refused_for_it(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, twin = fill(nn.Linear(4, 3)), fill(nn.Linear(4, 3))
    weight = model.weight

    with devconv.registry_conversion():
        model._apply(view)

    assert model.weight is weight
    assert torch.equal(model.weight, view(twin.weight))
    assert model.weight.is_leaf


def _in_a_cell(view: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: view


@pytest.mark.parametrize(
    "holder",
    [lambda view: view, _in_a_cell, lambda view: [view], lambda view: Namespace(view=view)],
    ids=["variable", "cell", "list", "attribute"],
)
def test_a_view_that_python_holds_beside_a_graph_is_refused_wherever_it_is(
    holder: Callable[[torch.Tensor], object],
) -> None:
    model = fill(mlp())
    loss = (torch.ones(2, 3) @ model[0].weight).sum() + (torch.ones(2, 4) @ model[0].weight.T).sum()
    kept = holder(model[0].weight.T)

    with pytest.raises(devconv.ConversionRefused, match=r"0\.weight"):
        devconv.convert(model, dtype=torch.float64)

    # And nothing is kept by having been looked for.
    del kept
    devconv.convert(model, dtype=torch.float64)
    loss.backward()
    assert model[0].weight.grad.dtype is torch.float64
