"""An exception half-way leaves every module lazy: same tensors, same target, same hooks, same class."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

import devconv
from devconv import TensorSpec, materialize
from tests.lazy.zoo import IMAGE, KINDS, lazy_net


class Refuses(nn.LazyLinear):
    """Fails after its weight has got a shape on the real device."""

    cls_to_become = nn.Linear

    def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - forward()'s name
        super().initialize_parameters(input)
        if not self.weight.is_meta:
            raise KeyboardInterrupt


def broken(*before: nn.Module) -> nn.Sequential:
    return nn.Sequential(*before, nn.Flatten(), Refuses(2))


@pytest.mark.parametrize("init", ["device", "host"])
def test_every_lazy_tensor_is_the_object_it_was_and_lazy(device, init):
    if device.type == "meta":
        pytest.skip("nothing is real on meta, where the module does not fail")
    model = broken(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    devconv.convert(model, device)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    with pytest.raises(KeyboardInterrupt):
        materialize(model, TensorSpec(IMAGE), init=init)

    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(now[name] is tensor for name, tensor in tensors.items())
    lazy = {name: tensor for name, tensor in now.items() if "num_batches" not in name}
    assert all(map(is_lazy, lazy.values()))
    assert {tensor.data.device for tensor in now.values()} == {device}
    assert isinstance(now["1.running_mean"], UninitializedBuffer)
    assert isinstance(now["0.weight"], UninitializedParameter)


def test_modules_have_their_classes_and_numbers_again():
    model = broken(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    before = repr(model)
    with pytest.raises(KeyboardInterrupt):
        materialize(model, TensorSpec(IMAGE))
    assert repr(model) == before


def test_a_model_that_was_put_back_works_once_the_fault_is_gone(real_device):
    model = broken(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    devconv.convert(model, real_device)
    with pytest.raises(KeyboardInterrupt):
        materialize(model, TensorSpec(IMAGE))

    model[3] = nn.LazyLinear(2, device=real_device)
    model(torch.randn(IMAGE).to(real_device)).sum().backward()

    assert model[0].weight.grad is not None
    assert type(model[1]) is nn.BatchNorm2d
    assert model[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize("name", KINDS)
def test_every_lazy_class_can_be_put_back_and_used(name):
    kind = KINDS[name]
    module = kind.make()
    model = nn.ModuleDict({"part": module, "fault": Refuses(2)})
    model.forward = lambda *args: (model["part"](*args), model["fault"](args[0]))
    attributes = set(module.__dict__)

    with pytest.raises(KeyboardInterrupt):
        materialize(model, *kind.inputs(), fallback="forward")

    assert set(module.__dict__) == attributes
    module(*kind.inputs())
    assert type(module) is type(kind.eager())


def test_attributes_of_lazy_tensors_survive():
    model = broken(nn.LazyConv2d(4, 3))
    model[0].weight.tag = "mine"
    with pytest.raises(KeyboardInterrupt):
        materialize(model, TensorSpec(IMAGE))
    assert model[0].weight.tag == "mine"


def test_batch_norms_counter_is_put_back():
    model = broken(nn.LazyBatchNorm2d())
    model[0].num_batches_tracked.fill_(7)
    with pytest.raises(KeyboardInterrupt):
        materialize(model, TensorSpec(IMAGE))
    assert model[0].num_batches_tracked == 7


def test_a_first_forward_that_fails_half_way_leaves_its_module_lazy(flag):
    class Half(nn.LazyLinear):
        cls_to_become = nn.Linear

        def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - forward()'s name
            self.weight.materialize((self.out_features, 3))
            raise ValueError("half way")

    layer = Half(2)
    with pytest.raises(ValueError, match="half way"):
        layer(torch.ones(2, 3))
    assert is_lazy(layer.weight)
    assert layer.weight is dict(layer.named_parameters())["weight"]


def test_copies_of_a_model_that_was_put_back_are_right():
    model = broken(nn.LazyConv2d(4, 3))
    with pytest.raises(KeyboardInterrupt):
        materialize(model, TensorSpec(IMAGE))
    twin = copy.deepcopy(model[0])
    assert twin(torch.ones(IMAGE)).shape == (2, 4, 6, 6)
    assert is_lazy(model[0].weight)


def test_nothing_is_left_of_the_net_that_worked():
    model = lazy_net()
    materialize(model, TensorSpec(IMAGE))
    assert not any(hasattr(module, "_initialize_hook") for module in model.modules())
