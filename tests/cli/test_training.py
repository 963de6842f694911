"""A column of the demo: stock torch stays stock, and nothing is compiled again and again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import devconv
from devconv.cli.minilm import ROWS, load
from devconv.cli.training import Way, observed_routes, train
from tests.cli.tied import Tied, make_task


@pytest.fixture
def task():
    return make_task()


def ignore(done):
    pass


@pytest.mark.needs("xla")
def test_stock_column_is_stock_torch_even_where_the_flag_is_on(task):
    devconv.__future__.set_registry_conversion(True)
    try:
        column = train(task, Way.STOCK, torch.device("xla:0"), 2, ignore)
    finally:
        devconv.__future__.set_registry_conversion(False)

    assert column.routes == {"parameter": {"overwrite": 3}, "buffer": {"overwrite": 1}}
    assert (column.after.parameters, column.after.in_optimizer, column.after.tied) == (3, 0, 0)


@pytest.mark.needs("xla")
def test_devconv_column_reports_what_devconv_did(task):
    column = train(task, Way.DEVCONV, torch.device("xla:0"), 2, ignore)

    assert column.routes["parameter"] == {"swap": 2}
    assert column.bytes == 4 * (8 * 4 + 8 + 1)
    assert column.after == column.before


@pytest.mark.needs("xla")
def test_nothing_is_compiled_after_the_second_step(task):
    from torch_xla.debug import metrics

    compiled = []
    train(
        task, Way.DEVCONV, torch.device("xla:0"), 5, lambda _: compiled.append(metrics.counter_value("UncachedCompile"))
    )

    assert compiled[1:] == [compiled[1]] * 4


@pytest.mark.parametrize("way", Way)
def test_columns_leave_the_task_as_it_was(task, way):
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}

    train(task, way, torch.device("cpu"), 3, ignore)

    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())
    assert task.model.head.weight is task.model.embedding.weight


@pytest.mark.parametrize("way", [Way.STOCK, Way.DEVCONV])
def test_what_training_raises_is_a_figure_of_its_column(task, way):
    def stop(done):
        raise ConnectionError("the link is down")

    column = train(task, way, torch.device("cpu"), 3, stop)

    assert column.error == "ConnectionError: the link is down"
    assert len(column.losses) == 1


def test_what_training_on_the_cpu_raises_is_raised(task):
    def stop(done):
        raise ConnectionError("the link is down")

    with pytest.raises(ConnectionError):
        train(task, Way.CPU, torch.device("cpu"), 3, stop)


def tensors(model):
    return {name: (tensor, tensor.device) for name, tensor in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("change", "routes", "arrived"),
    [
        (lambda model: None, {}, 0),
        (lambda model: model.to("meta"), {"parameter": {"overwrite": 3}}, 4 * (8 * 4 + 8 * 4 + 8)),
    ],
    ids=["nothing", "foreign"],
)
def test_routes_of_stock_torch_are_read_off_the_tensors(change, routes, arrived):
    model = Tied()
    before = tensors(model)

    change(model)

    assert observed_routes(before, tensors(model)) == (routes, arrived)


@pytest.mark.needs("cuda")
def test_an_update_in_place_is_seen_as_one():
    model = Tied()
    before = tensors(model)

    model.to("cuda")

    assert observed_routes(before, tensors(model)) == ({"parameter": {"set-data": 2}}, 4 * (8 * 4 + 8))


@pytest.mark.lane("xla")
def test_task_is_the_checkpoint_with_a_tied_head_and_the_same_for_the_same_seed():
    first, second = load(3), load(3)

    assert sum(1 for _ in first.model.parameters()) == 106
    assert first.model.cls.predictions.decoder.weight is first.model.bert.embeddings.word_embeddings.weight
    assert all(torch.equal(value, second.model.state_dict()[name]) for name, value in first.model.state_dict().items())
    assert all(torch.equal(value, second.batch[name]) for name, value in first.batch.items())
    assert (first.batch["labels"] >= 0).sum() == 20
    assert len(first.batch["input_ids"]) == ROWS
    assert not any(module.p for module in first.model.modules() if isinstance(module, nn.Dropout))
