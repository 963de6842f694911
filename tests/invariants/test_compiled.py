"""Promise: a compiled module moves like any other, before and after its first call, and is not compiled again for a move
that changes neither dtype nor device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.moves import Move, close
from tests.promises import where, with_same_objects, with_values
from tests.zoo import Tied, fill, loss_of, mlp, train

pytestmark = [
    with_values,
    # torch.compile's own back ends cover the host and CUDA; an XLA module is compiled by XLA.
    where(lambda conversion: {conversion.source.partition(":")[0], conversion.device.type} <= {"cpu", "cuda"}),
    pytest.mark.timeout(300),
]

BACKENDS = [
    "eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    ),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_backend
def test_it_gives_the_same_before_and_after(move: Move, backend: str) -> None:
    model = move.build(mlp)
    compiled = torch.compile(model, backend=backend)
    expected = compiled(move.inputs_before(5, 4)).detach()

    move(compiled, route=None)

    assert close(compiled(move.inputs(5, 4)), expected, **move.tolerance)


@every_backend
def test_it_can_be_moved_before_its_first_call(move: Move, backend: str) -> None:
    model, twin = move.build(mlp), fill(mlp())
    compiled = torch.compile(model, backend=backend)

    move(compiled)

    assert close(compiled(move.inputs(5, 4)), twin(torch.Tensor(move.inputs(5, 4).cpu().float())), **move.tolerance)


@every_backend
def test_it_trains_on_as_if_never_moved(move: Move, backend: str) -> None:
    model, twin = move.build(Tied), fill(Tied())
    compiled = torch.compile(model, backend=backend)
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    train(twin, reference, range(4))
    train(compiled, optimizer, range(2))

    move(compiled, optimizer, route=None)
    train(compiled, optimizer, range(2, 4))

    assert close(model.decoder.weight, twin.decoder.weight, **move.tolerance)


@with_same_objects
def test_the_compiled_and_the_plain_module_hold_the_same_parameters(move: Move) -> None:
    model = move.build(mlp)
    compiled = torch.compile(model, backend="eager")
    weight = model[0].weight
    compiled(move.inputs_before(5, 4))

    move(compiled, route=None)

    assert next(compiled.parameters()) is model[0].weight is weight


class Counted:
    """A back end that counts how often it is asked to compile."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.calls += 1
        return module.forward


def test_a_move_compiles_at_most_once_more(move: Move) -> None:
    model = move.build(mlp)
    counted = Counted()
    compiled = torch.compile(model, backend=counted)
    for _ in range(2):
        compiled(move.inputs_before(5, 4))

    move(compiled, route=None)
    for _ in range(3):
        compiled(move.inputs(5, 4))

    assert counted.calls <= 2


def test_there_and_back_does_not_compile_again(move: Move) -> None:
    model = move.build(mlp)
    counted = Counted()
    compiled = torch.compile(model, backend=counted)
    compiled(move.inputs_before(5, 4))

    move(compiled, route=None)
    move.back(compiled)
    compiled(move.inputs_before(5, 4))

    assert counted.calls == 1


def test_a_compiled_graph_from_before_the_move_delivers_its_gradients(move: Move) -> None:
    if not move.conversion.keeps_objects:
        pytest.skip("not applicable: the parameters are other objects")
    model, twin = move.build(mlp), fill(mlp())
    compiled = torch.compile(model, backend="aot_eager")
    loss = loss_of(compiled, 0)
    loss_of(twin, 0).backward()

    move(compiled, route=None)
    loss.backward()

    assert model[0].weight.grad.dtype is move.dtype
    assert close(model[0].weight.grad, twin[0].weight.grad, **move.tolerance)


def test_a_module_compiled_in_place_moves(move: Move) -> None:
    model = move.build(mlp)
    model.compile(backend="eager")
    expected = model(move.inputs_before(5, 4)).detach()

    move(model, route=None)

    assert close(model(move.inputs(5, 4)), expected, **move.tolerance)


def test_a_compiled_part_of_a_model_moves_with_it(move: Move) -> None:
    part = move.build(mlp)
    model = nn.Sequential(torch.compile(part, backend="eager"), move.build(lambda: nn.Linear(2, 2)))
    expected = model(move.inputs_before(5, 4)).detach()

    move(model, route=None)

    assert close(model(move.inputs(5, 4)), expected, **move.tolerance)
