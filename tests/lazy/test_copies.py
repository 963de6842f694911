"""Copies of lazy modules: deepcopy, copy, pickle and torch.save, with device, dtype, attributes and map_location."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

import devconv
from tests.lazy.conftest import flag_on
from tests.lazy.zoo import IMAGE, KINDS, lazy_net

pytestmark = pytest.mark.usefixtures("flag")


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": lambda value: saved(value, weights_only=False),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", KINDS)
def test_a_copy_of_every_class_is_lazy_and_works(name, how):
    kind = KINDS[name]
    module = kind.make()

    twin = COPIES[how](module)
    twin(*kind.inputs())

    assert type(twin) is type(kind.eager())
    assert repr(twin) == repr(kind.eager())
    assert type(module) is type(kind.make())
    assert all(map(is_lazy, module.parameters()))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_where_the_original_was_moved_to(how, device):
    model = lazy_net()
    devconv.convert(model, device, torch.bfloat16)
    twin = COPIES[how](model)
    targets = {(tensor.data.device, tensor.data.dtype) for tensor in twin.parameters()}
    assert targets == {(device, torch.bfloat16)}
    assert isinstance(twin[1].running_mean, UninitializedBuffer)
    assert twin[1].running_mean.data.device == device


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_the_attributes_and_requires_grad(how):
    layer = nn.LazyLinear(2)
    layer.weight.tag = ["mine"]
    layer.bias.requires_grad = False
    twin = COPIES[how](layer)
    assert twin.weight.tag == ["mine"]
    assert twin.weight.tag is not layer.weight.tag
    assert [twin.weight.requires_grad, twin.bias.requires_grad] == [True, False]
    assert isinstance(twin.weight, UninitializedParameter)


@pytest.mark.parametrize("how", COPIES)
def test_ties_are_kept_in_a_copy(how):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
    model[1].weight = model[0].weight
    twin = COPIES[how](model)
    assert twin[0].weight is twin[1].weight


@pytest.mark.parametrize("how", COPIES)
def test_non_persistent_buffers_stay_so(how):
    module = nn.Module()
    module.register_buffer("cache", UninitializedBuffer(persistent=False), persistent=False)
    assert COPIES[how](module).cache.persistent is False


@pytest.mark.parametrize("how", COPIES)
def test_a_partly_loaded_module_keeps_what_was_loaded_in_a_copy(how):
    layer = nn.LazyLinear(3)
    layer.load_state_dict({"weight": torch.full((3, 5), 2.0)}, strict=False)
    twin = COPIES[how](layer)
    twin(torch.ones(2, 5))
    assert torch.equal(twin.weight, torch.full((3, 5), 2.0))


@pytest.mark.parametrize("name", KINDS)
def test_a_lazy_state_dict_survives_weights_only(name):
    module = KINDS[name].make(dtype=torch.float64)
    state = saved(module.state_dict(), weights_only=True)
    lazy = [key for key, tensor in module.state_dict().items() if is_lazy(tensor)]
    assert lazy
    assert all(is_lazy(state[key]) and state[key].data.dtype is torch.float64 for key in lazy)


def test_attributes_survive_weights_only():
    layer = nn.LazyLinear(2)
    layer.weight.tag = "mine"
    assert saved(layer.state_dict(), weights_only=True)["weight"].tag == "mine"


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("location", ["meta", torch.device("meta")], ids=["string", "device"])
def test_map_location_moves_lazy_tensors(location, weights_only):
    state = saved(nn.LazyLinear(2).state_dict(), map_location=location, weights_only=weights_only)
    assert state["weight"].data.device == torch.device("meta")


def test_a_function_as_map_location_leaves_lazy_tensors_where_they_were():
    state = saved(nn.LazyLinear(2, device="meta").state_dict(), map_location=lambda storage, _: storage)
    assert state["weight"].data.device == torch.device("meta")


def test_what_was_saved_with_the_flag_is_read_by_stock_torch(tmp_path):
    model = lazy_net()
    model[0].weight.tag = "mine"
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        f"assert model(torch.ones({IMAGE})).shape == (2, 2)\n"
        "assert 'devconv' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_with_the_flag_off_weights_only_refuses_lazy_classes_again():
    layer = nn.LazyLinear(2)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    with devconv.registry_conversion(False):
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(file, weights_only=True)
    with flag_on():
        file.seek(0)
        torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", COPIES)
def test_an_initialised_neighbour_is_copied_as_ever(how):
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    twin = COPIES[how](model)
    assert torch.equal(twin[0].weight, model[0].weight)
