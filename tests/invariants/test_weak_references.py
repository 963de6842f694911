"""Promise: a weak reference to a parameter is one to the model's parameter afterwards."""

from __future__ import annotations

import weakref

from torch import nn

from tests.moves import Move
from tests.promises import with_same_objects
from tests.zoo import mlp

pytestmark = with_same_objects


def test_a_weak_reference_still_points_at_the_parameter(move: Move) -> None:
    model = move.build(mlp)
    reference = weakref.ref(model[0].weight)

    move(model)

    assert reference() is model[0].weight
    assert model[0].weight.device == move.device


def test_a_weak_dictionary_still_finds_the_parameter(move: Move) -> None:
    # A tensor's == is elementwise, so real code keys by id and watches the object: so does this one.
    model = move.build(mlp)
    names = weakref.WeakValueDictionary({id(parameter): parameter for parameter in model.parameters()})

    move(model)

    assert all(names.get(id(parameter)) is parameter for parameter in model.parameters())


def test_a_finaliser_runs_when_the_model_goes_and_not_before(move: Move) -> None:
    model = move.build(lambda: nn.Linear(4, 2))
    gone: list[str] = []
    weakref.finalize(model.weight, gone.append, "weight")

    move(model)
    alive = list(gone)
    del model
    move.report = None

    assert (alive, gone) == ([], ["weight"])


def test_a_weak_reference_to_a_gradient_still_points_at_it(move: Move) -> None:
    model = move.build(mlp)
    model(move.inputs_before(5, 4)).sum().backward()
    grad = model[0].weight.grad
    reference = weakref.ref(grad)

    move(model)

    assert reference() is model[0].weight.grad
