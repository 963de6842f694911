"""Nothing bigger than a scalar passes through the host when lazy tensors on a device get shape and values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import devconv
from devconv import TensorSpec, materialize
from tests.lazy.zoo import KINDS, TORCH_KINDS


class Crossings(TorchDispatchMode):
    """Counts the bytes of every copy between two devices, and of every tensor that is made on the host."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values(), out) if isinstance(value, torch.Tensor)]
        crossed = len({tensor.device.type for tensor in tensors}) > 1
        on_host = isinstance(out, torch.Tensor) and out.device.type == "cpu"
        if crossed or on_host:
            self.largest = max(self.largest, *(tensor.nbytes for tensor in tensors))
        return out


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_made_on_the_host_for_a_module_on_meta(name):
    kind = KINDS[name]
    module = kind.make().to("cpu")
    devconv.convert(module, "meta")
    with Crossings() as crossings:
        materialize(module, *(TensorSpec(shape) for shape in kind.shapes))
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert crossings.largest <= 8


def _sent() -> int:
    """Bytes that the XLA runtime has taken from the host so far."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("OutboundData") or (0, 0, ())
    return int(data[1])


@pytest.mark.needs("xla")
@pytest.mark.lane("xla")
@pytest.mark.parametrize("how", ["materialize", "forward"])
def test_a_large_model_moved_to_xla_sends_scalars_only(flag, how):
    model = nn.Sequential(nn.LazyLinear(512), nn.LazyLinear(512), nn.LazyBatchNorm1d(), nn.LazyLinear(512))
    devconv.convert(model, "xla:0")
    x = torch.ones(2, 512, device="xla:0")
    devconv.resolve("xla:0")[1].synchronize()
    before = _sent()

    if how == "materialize":
        materialize(model, TensorSpec((2, 512)))
    else:
        model(x)
    devconv.resolve("xla:0")[1].synchronize()

    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 3_000_000
    assert _sent() - before < 512


@pytest.mark.needs("xla")
@pytest.mark.lane("xla")
@pytest.mark.parametrize("name", TORCH_KINDS)
def test_a_lazy_class_moved_to_xla_sends_scalars_only(flag, name):
    kind = TORCH_KINDS[name]
    module = kind.make()
    devconv.convert(module, "xla:0")
    devconv.resolve("xla:0")[1].synchronize()
    before = _sent()
    materialize(module, *(TensorSpec(shape) for shape in kind.shapes))
    assert _sent() - before <= 64
