"""Promise: ``backward()`` through a graph that was recorded before the move gives the moved parameters their gradients.

The graph goes on with the numbers it was recorded with; its gradients arrive where the parameters are now, in their
dtype. `autograd.grad` and `backward(inputs=)` through such a graph are documented limits.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import devconv
from tests.moves import Move, close, host
from tests.promises import where, with_same_objects, with_values
from tests.zoo import Tied, fill, loss_of, mlp, train

pytestmark = [with_values, with_same_objects]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: host(parameter.grad) for key, parameter in model.named_parameters()}


def matches(model: nn.Module, twin: nn.Module, move: Move) -> list[str]:
    """Names whose gradient differs from the twin's, or is not where and what its parameter is."""
    return [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None
        or (parameter.grad.device, parameter.grad.dtype) != (parameter.device, parameter.dtype)
        or not close(parameter.grad, twin.get_parameter(key).grad, **move.tolerance)
    ]


@pytest.mark.parametrize("make", [mlp, Tied])
def test_backward_after_the_move_fills_the_parameters_gradients(move: Move, make: Callable[[], nn.Module]) -> None:
    model, twin = move.build(make), fill(make())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    move(model, route=None)
    loss.backward()

    assert matches(model, twin, move) == []


def test_gradients_from_before_are_added_to(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    for each in (model, twin):
        loss_of(each, 0).backward()
    loss = loss_of(model, 1)
    loss_of(twin, 1).backward()

    move(model, route=None)
    loss.backward()

    assert matches(model, twin, move) == []


def test_old_and_new_graphs_add_up(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()
    loss_of(twin, 1).backward()

    move(model, route=None)
    loss_of(model, 1).backward()
    loss.backward()

    assert matches(model, twin, move) == []


def test_two_graphs_from_before_add_up(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    first, second = loss_of(model, 0), loss_of(model, 1)
    loss_of(twin, 0).backward()
    loss_of(twin, 1).backward()

    move(model, route=None)
    first.backward()
    second.backward()

    assert matches(model, twin, move) == []


def test_a_retained_graph_delivers_each_time(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    loss, reference = loss_of(model, 0), loss_of(twin, 0)
    for _ in range(2):
        reference.backward(retain_graph=True)

    move(model, route=None)
    loss.backward(retain_graph=True)
    loss.backward()

    assert matches(model, twin, move) == []


def test_a_graph_that_ran_before_and_after_delivers_both_times(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    loss, reference = loss_of(model, 0), loss_of(twin, 0)
    for each in (loss, reference, reference):
        each.backward(retain_graph=True)

    move(model, route=None)
    loss.backward()

    assert matches(model, twin, move) == []


def test_a_gradient_that_has_a_graph_is_delivered_right(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    move(model, route=None)
    loss.backward(create_graph=True)

    assert matches(model, twin, move) == []


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_from_before_is_carried(move: Move) -> None:
    model = move.build(mlp)
    loss_of(model, 0).backward(create_graph=True)
    expected = {key: move.cast(parameter.grad) for key, parameter in model.named_parameters()}

    move(model, route=None)

    for key, parameter in model.named_parameters():
        assert (parameter.grad.device, parameter.grad.dtype) == (move.device, move.dtype), key
        assert close(parameter.grad, expected[key]), key
    model.zero_grad()
    gc.collect()


def test_two_moves_over_one_graph_deliver_where_the_parameter_is_last(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    move(model, route=None)
    move.back(model)
    loss.backward()

    assert matches(model, twin, move) == []
    assert {parameter.grad.device for parameter in model.parameters()} == {move.source}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_training_step_over_the_move_matches_one_without(move: Move) -> None:
    # forward, move, backward, step: what a program does that converts in a callback.
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    for each, its in ((model, optimizer), (twin, reference)):
        train(each, its, range(2))
        its.zero_grad()
    loss = loss_of(model, 2)
    loss_of(twin, 2).backward()
    reference.step()

    move(model, optimizer, route=None)
    loss.backward()
    optimizer.step()

    assert [k for k, p in model.named_parameters() if not close(p, twin.get_parameter(k), **move.tolerance)] == []


def test_a_hook_on_the_gradient_fires_once_for_an_old_graph(move: Move) -> None:
    model = move.build(mlp)
    fired: list[str] = []
    model[0].weight.register_hook(lambda _: fired.append("hook"))
    loss = loss_of(model, 0)

    move(model, route=None)
    loss.backward()

    assert fired == ["hook"]


def test_what_a_hook_returns_is_what_is_delivered(move: Move) -> None:
    model = move.build(mlp)
    model[0].weight.register_hook(lambda grad: grad * 0 + 7)
    loss = loss_of(model, 0)

    move(model, route=None)
    loss.backward()

    assert close(model[0].weight.grad, torch.full((3, 4), 7.0))


def test_an_accumulation_hook_fires_once_with_the_parameter_itself(move: Move) -> None:
    model = move.build(mlp)
    got: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(got.append)
    loss = loss_of(model, 0)

    move(model, route=None)
    loss.backward()

    assert len(got) == 1
    assert got[0] is model[0].weight


def test_an_accumulation_hook_from_after_the_move_fires_for_the_old_graph(move: Move) -> None:
    model = move.build(mlp)
    fired: list[torch.dtype] = []
    loss = loss_of(model, 0)

    move(model, route=None)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.dtype))
    loss.backward()

    assert fired == [move.dtype]


def test_an_accumulation_hook_that_was_removed_does_not_fire_for_the_old_graph(move: Move) -> None:
    model = move.build(mlp)
    fired: list[str] = []
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda _: fired.append("removed"))
    loss = loss_of(model, 0)

    move(model, route=None)
    handle.remove()
    loss.backward()

    assert fired == []


def test_hooks_fire_once_for_each_graph(move: Move) -> None:
    model = move.build(mlp)
    fired: list[str] = []
    model[0].weight.register_hook(lambda _: fired.append("pre"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: fired.append("post"))
    loss = loss_of(model, 0)

    move(model, route=None)
    loss.backward()
    loss_of(model, 1).backward()

    assert fired == ["pre", "post", "pre", "post"]


def test_the_optimizer_steps_on_the_gradient_of_the_old_graph(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin))
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()
    reference.step()

    move(model, optimizer, route=None)
    loss.backward()
    optimizer.step()

    assert close(model[0].weight, twin[0].weight, **move.tolerance)


def test_the_forward_of_the_old_graph_is_not_changed_by_training_on(move: Move) -> None:
    # The graph has the numbers it was recorded with, so in-place training between its forward and backward is harmless.
    model, twin = move.build(mlp), fill(mlp())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    move(model, route=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loss.backward()

    assert matches(model, twin, move) == []


@where(lambda conversion: conversion.source == "cpu")
def test_an_old_graph_lets_go_of_the_old_model_when_it_is_dropped(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)
    old = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]

    move(model, route=None)
    del loss
    gc.collect()

    assert all(reference.expired() for reference in old)


@where(lambda conversion: conversion.source == "cpu")
def test_an_old_graph_lets_go_of_the_old_model_when_it_has_run(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)
    old = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]

    move(model, route=None)
    loss.backward()
    gc.collect()

    assert [reference.expired() for reference in old] == [True] * len(old)
    assert loss.isfinite()


def test_an_old_graph_does_not_keep_the_moved_model_alive(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)
    reference = weakref.ref(model[0].weight)

    move(model, route=None)
    move.report = None
    del model
    gc.collect()

    assert reference() is None
    assert loss.requires_grad


def test_backward_after_the_model_is_gone_does_no_harm(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)

    move(model, route=None)
    move.report = None
    del model
    gc.collect()
    loss.backward()

    assert loss.grad_fn is not None


def test_a_parameter_frozen_after_the_move_is_given_no_gradient(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)

    move(model, route=None)
    model[0].weight.requires_grad_(False)
    loss.backward()

    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


def test_a_parameter_that_was_frozen_for_the_move_gets_its_gradient(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    model.requires_grad_(False)
    move(model, route=None)
    model.requires_grad_(True)
    loss.backward()

    assert matches(model, twin, move) == []


def test_a_hook_registered_after_the_move_sees_the_gradient(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)

    move(model, route=None)
    model[0].weight.register_hook(torch.zeros_like)
    loss.backward()

    assert not host(model[0].weight.grad).any()
    assert host(model[0].bias.grad).any()


class TiedHead(nn.Module):
    """Uses a weight through a view, which the graph saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) @ self.first.weight.T
        return hidden[:, :2]


def test_a_view_that_only_the_graph_holds_is_no_reason_to_refuse(move: Move) -> None:
    model, twin = move.build(TiedHead), fill(TiedHead())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    move(model, route=None)
    loss.backward()

    assert matches(model, twin, move) == []


def test_a_dense_gradient_is_added_to_a_sparse_one(move: Move) -> None:
    if not (move.source.type == move.device.type == "cpu"):
        pytest.skip("not applicable: sparse gradients need kernels that other devices lack")
    model, twin = (make(lambda: nn.Embedding(4, 2, sparse=True)) for make in (move.build, lambda make: fill(make())))
    losses = [(each(torch.tensor([1, 2])).sum(), (each.weight * 2).sum()) for each in (model, twin)]

    move(model, route=None)
    for sparse, dense in losses:
        sparse.backward()
        dense.backward()

    assert matches(model, twin, move) == []


def test_a_checkpointed_forward_recomputes_with_the_moved_model_or_says_so(move: Move) -> None:
    # The recomputation mixes old inputs and new weights: across devices and dtypes it must fail loudly, never abort.
    from torch.utils.checkpoint import checkpoint

    if not move.conversion.keeps_device:
        pytest.skip("not applicable: torch's checkpoint needs its inputs and weights on one device")
    if move.source.type == "xla":
        pytest.skip("not applicable: torch's checkpoint looks for torch.xla, which torch_xla does not make")
    model = move.build(mlp)
    x = move.inputs_before(5, 4).requires_grad_()
    loss = checkpoint(model, x, use_reentrant=False).sum()

    move(model, route=None)

    if move.dtype is torch.float32:
        loss.backward()
        assert model[0].weight.grad.dtype is torch.float32
    else:
        with pytest.raises(RuntimeError):
            loss.backward()


def test_a_gradient_is_delivered_from_another_thread(move: Move) -> None:
    import threading

    model, twin = move.build(mlp), fill(mlp())
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()
    failures: list[BaseException] = []

    def backward() -> None:
        try:
            if move.source.type == "xla":
                from devconv_xla import enable_backward

                enable_backward()
            loss.backward()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    move(model, route=None)
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(60)

    assert failures == []
    assert matches(model, twin, move) == []


def test_a_moved_parameter_with_an_old_graph_can_be_swapped_again(move: Move) -> None:
    model = move.build(mlp)
    losses = [loss_of(model, 0)]

    move(model, route=None)
    losses.append(loss_of(model, 1))
    move.back(model)
    losses.append(loss_of(model, 2))
    for loss in losses:
        loss.backward()

    twin = fill(mlp())
    for step in range(3):
        loss_of(twin, step).backward()
    assert [
        key
        for key, parameter in model.named_parameters()
        if not close(parameter.grad, twin.get_parameter(key).grad, **move.tolerance)
    ] == []


class Failing(nn.Module):
    """Refuses to be converted, after everything before it was."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Failing:
        raise RuntimeError("not this one")


def test_a_parameter_frozen_for_a_move_that_fails_is_frozen_and_linked_as_before() -> None:
    model = nn.ModuleList([fill(mlp()), Failing()])
    loss = loss_of(model[0], 0)
    model.requires_grad_(False)

    with pytest.raises(RuntimeError, match="not this one"):
        devconv.convert(model, dtype=torch.float64)

    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)
    loss.backward()
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
