"""Promise: an optimizer that steps inside backward, from hooks with a dictionary keyed by parameter, goes on stepping."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.moves import Move, close
from tests.promises import with_same_objects, with_values
from tests.zoo import fill, loss_of, mlp

pytestmark = [with_values, with_same_objects]


def step_in_backward(model: nn.Module) -> dict[nn.Parameter, torch.optim.Optimizer]:
    """As torch's tutorial does it: one optimizer for each parameter, stepped when its gradient is complete."""
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1, momentum=0.9) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


def test_it_trains_on_as_if_never_moved(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizers = step_in_backward(model)
    step_in_backward(twin)
    for step in range(6):
        loss_of(twin, step).backward()
    for step in range(3):
        loss_of(model, step).backward()

    move(model, *optimizers.values(), route=None)
    for step in range(3, 6):
        loss_of(model, step).backward()

    assert [k for k, p in model.named_parameters() if not close(p, twin.get_parameter(k), **move.tolerance)] == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_graph_from_before_the_move_steps_too(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizers = step_in_backward(model)
    step_in_backward(twin)
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    move(model, *optimizers.values(), route=None)
    loss.backward()

    assert [k for k, p in model.named_parameters() if not close(p, twin.get_parameter(k), **move.tolerance)] == []
    assert all(parameter.grad is None for parameter in model.parameters())
