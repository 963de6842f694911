"""The pieces that the fuzzer builds its models from. Each takes and gives ``(batch, 4)``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from tests.everything import OwnTensor
from tests.zoo import Labelled, fill

Layers = list[nn.Module]


class Function(nn.Module):
    """A module of tensors and what it does with them."""

    def __init__(self, function: Callable[[Function, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _scale(module: Function, x: Tensor) -> Tensor:
    return x * module.scale


def linear(before: Layers) -> nn.Module:
    return nn.Linear(4, 4)


def tied(before: Layers) -> nn.Module:
    """A layer whose weight is that of an earlier one."""
    made = nn.Linear(4, 4)
    for layer in before:
        # Under weight_norm and pruning the weight is derived.
        if type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter):
            made.weight = layer.weight
    return made


def again(before: Layers) -> nn.Module:
    """An earlier layer, once more."""
    return before[0] if before else nn.Linear(4, 4)


def normed(before: Layers) -> nn.Module:
    return nn.BatchNorm1d(4)


class Gated(nn.Module):
    """A GRU for one step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(1))[0][:, 0]


def gated(before: Layers) -> nn.Module:
    return Gated()


class Overriding(OwnTensor):
    """Brings its own ``_apply``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def overriding(before: Layers) -> nn.Module:
    return Overriding()


def labelled(before: Layers) -> nn.Module:
    made = Function(_scale)
    made.scale = Labelled(torch.ones(4), "scale")
    return made


def frozen(before: Layers) -> nn.Module:
    made = Function(_scale)
    made.scale = nn.Parameter(torch.ones(4), requires_grad=False)
    return made


def scalar(before: Layers) -> nn.Module:
    made = Function(_scale)
    made.scale = nn.Parameter(torch.ones(()))
    return made


def buffers(before: Layers) -> nn.Module:
    """Buffers of several kinds; the mask is shared with an earlier module that has one."""
    made = Function(_scale)
    shared = next((layer.scale for layer in before if "scale" in layer._buffers), None)
    made.register_buffer("scale", torch.ones(4) if shared is None else shared)
    made.register_buffer("hidden", torch.ones(2), persistent=False)
    made.register_buffer("count", torch.tensor(3))
    made.register_buffer("flags", torch.tensor([True, False]))
    made.register_buffer("empty", torch.zeros(0, 4))
    made.register_buffer("absent", None)
    return made


def trainable_buffer(before: Layers) -> nn.Module:
    made = Function(_scale)
    made.register_buffer("scale", torch.ones(4).requires_grad_())
    return made


def _flat(module: Function, x: Tensor) -> Tensor:
    return x * module.scale + module.shift


def flat(before: Layers) -> nn.Module:
    """Two parameters and a buffer that lie on one flat parameter."""
    made = Function(_flat)
    made.flat = nn.Parameter(torch.zeros(10), requires_grad=False)
    made.scale = nn.Parameter(made.flat.detach()[1:5])
    made.shift = nn.Parameter(made.flat.detach()[5:9])
    made.register_buffer("window", made.flat.detach()[3:7])
    return made


def _quietly(function: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(nn.Linear(4, 4))


def old_weight_norm(before: Layers) -> nn.Module:
    return _quietly(weight_norm)


def old_spectral_norm(before: Layers) -> nn.Module:
    return _quietly(spectral_norm).eval()


def parametrized(before: Layers) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(4, 4))


def pruned(before: Layers) -> nn.Module:
    return prune.l1_unstructured(fill(nn.Linear(4, 4)), "weight", 0.5)


def listed(before: Layers) -> nn.Module:
    made = Function(lambda module, x: x * module.entries[0] + module.named["a"])
    made.entries = nn.ParameterList([nn.Parameter(torch.ones(4))])
    made.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4)), "b": made.entries[0]})
    return made


LAYERS: dict[str, Callable[[Layers], nn.Module]] = {
    function.__name__: function
    for function in (
        linear,
        tied,
        again,
        normed,
        gated,
        overriding,
        labelled,
        frozen,
        scalar,
        buffers,
        trainable_buffer,
        flat,
        old_weight_norm,
        old_spectral_norm,
        parametrized,
        pruned,
        listed,
    )
}


def model_of(recipe: list[str], seed: int) -> nn.Module:
    """A model from the names of its layers; the same names and seed give the same numbers."""
    torch.manual_seed(seed)
    layers: Layers = []
    for name in recipe:
        layers.append(LAYERS[name](layers))
    nested: nn.Module = nn.Sequential(*layers[len(layers) // 2 :])
    model = nn.Sequential(*layers[: len(layers) // 2], nested, nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            shared = tensor.untyped_storage()._cdata
            # One writer for each storage: the members of a view group would overwrite each other's numbers.
            if shared not in done and tensor.is_floating_point() and "mask" not in name and tensor.numel():
                done.add(shared)
                numbers = torch.randn(tensor.shape, generator=generator) * 0.4
                tensor.copy_(numbers.abs() + 0.5 if name.endswith(("var", "_g", "original0")) else numbers)
    return model
