"""One model that holds every kind of tensor that a conversion has to look after, and a record of all that hangs on it.

The record is what "exactly as it was" means in the tests of all or nothing: objects, classes, values, gradients, hooks,
attributes, optimizer state, TensorImpls and use counts.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import devconv
from tests.zoo import Labelled, fill, nested


class OwnTensor(nn.Module):
    """Overrides ``_apply``, wraps fn, and keeps a tensor and a list of tensors that are nobody's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.own = torch.ones(3)
        self.kept = [torch.zeros(2)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnTensor:
        super()._apply(lambda tensor: fn(tensor), recurse)
        self.own = fn(self.own)
        self.kept[:] = [fn(tensor) for tensor in self.kept]
        return self


class SelfConverting(nn.Parameter):
    """Brings its own ``.to``, and a scale that moves with it."""

    scale: Tensor

    def __new__(cls, data: Tensor, scale: Tensor | None = None) -> Self:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = torch.ones((), device=data.device) if scale is None else scale
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, _, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        target = self.device if device is None else device
        return SelfConverting(self.data.to(target), self.scale.to(target))


class Everything(nn.Module):
    """Ties, view groups, lazies, norms, an RNN, an override, hooks, attributes, integers, scalars and empties."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.encoder.register_buffer("mask", torch.ones(4))
        self.decoder.register_buffer("mask", self.encoder.mask)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.overriding = OwnTensor()
        self.flat = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.piece = nn.Parameter(self.flat.detach()[2:6])
        self.register_buffer("window", self.flat.detach()[4:8])
        self.labelled = Labelled(torch.ones(4), "mine")
        self.quantised = SelfConverting(torch.arange(4, dtype=torch.int8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.normed = weight_norm(nn.Linear(4, 4))
        self.parametrized = parametrizations.weight_norm(nn.Linear(4, 4))
        self.lazy = nn.LazyLinear(2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("trainable", torch.ones(4).requires_grad_())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.encoder(x) * self.encoder.mask)
        x = self.decoder(x) * self.decoder.mask
        x = self.norm(x) + self.rnn(x.unsqueeze(1))[0][:, 0]
        x = self.overriding.layer(x) * self.trainable + self.piece * self.labelled
        x = self.parametrized(torch.tanh(self.normed(x))) * self.scalar
        return self.last(x)


def everything(device: torch.device | str = "cpu") -> Everything:
    """The model with hooks and attributes on it, made on the host and brought to a device: only so do devices that keep
    no strides know of its views."""
    torch.manual_seed(0)
    model = fill(Everything())
    devconv.convert(model, device)
    model.encoder.weight.register_hook(_harmless)
    model.encoder.weight.register_post_accumulate_grad_hook(_harmless)
    model.last.weight.register_hook(_harmless)
    model.last.weight.owner = model
    model.window.label = "window"
    return model


def _harmless(_: Tensor) -> None:
    """A hook that changes nothing."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]


def optimizers_of(model: Everything) -> list[torch.optim.Optimizer]:
    """Three, of different kinds, two of them sharing parameters."""
    return [
        torch.optim.SGD(trainable(model), 0.05, momentum=0.9),
        torch.optim.AdamW(trainable(model.rnn), 0.01),
        torch.optim.LBFGS(trainable(model.last), 0.1, max_iter=2, history_size=2),
    ]


def train_everything(model: Everything, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    from tests.zoo import train

    for step in steps:
        for optimizer in optimizers:
            train(model, optimizer, range(step, step + 1))


def record(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Everything that must be the same after a conversion that failed, by name."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        found[f"{prefix} dict"] = sorted((key, id(value)) for key, value in vars(module).items())
        for table in ("_parameters", "_buffers"):
            slots = getattr(module, table)
            found[f"{prefix} {table}"] = [(key, id(value)) for key, value in slots.items()]
            for key, tensor in slots.items():
                if tensor is not None:
                    _record_tensor(found, f"{prefix}.{key}", tensor)
        for key, value in vars(module).items():
            if key.startswith("_") and key != "_flat_weights":
                continue
            for place, tensor in enumerate(nested(value)):
                _record_tensor(found, f"{prefix}.{key}[{place}]", tensor)
    for number, optimizer in enumerate(optimizers):
        found[f"optimizer {number} groups"] = [
            [(key, id(value)) for key, value in group.items() if key != "params"] + [id(p) for p in group["params"]]
            for group in optimizer.param_groups
        ]
        for position, (parameter, state) in enumerate(optimizer.state.items()):
            found[f"optimizer {number} key {position}"] = (id(parameter), [(key, id(v)) for key, v in state.items()])
            for key, value in state.items():
                for place, tensor in enumerate(nested(value)):
                    _record_tensor(found, f"optimizer {number} {position}.{key}[{place}]", tensor)
    return found


def _record_tensor(found: dict[str, Any], name: str, tensor: Tensor) -> None:
    found[f"{name} object"] = (id(tensor), type(tensor), tensor._cdata, tensor.requires_grad, tensor.is_leaf)
    found[f"{name} attributes"] = {key: id(value) for key, value in vars(tensor).items()}
    if isinstance(tensor, Labelled):
        found[f"{name} slot"] = tensor.label
    found[f"{name} hooks"] = [
        None if hooks is None else (id(hooks), [id(hook) for hook in hooks.values()])
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    ]
    found[f"{name} place"] = (tensor.device, tensor.dtype)
    if nn.parameter.is_lazy(tensor):
        return
    found[f"{name} shape"] = (tensor.shape, tensor.stride(), tensor.untyped_storage()._cdata)
    found[f"{name} value"] = Value(tensor)
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None:
        _record_tensor(found, f"{name}.grad", grad)
    del grad
    found[f"{name} uses"] = tensor._use_count()


class Value:
    """A tensor's numbers, comparable with ``==``."""

    def __init__(self, tensor: Tensor) -> None:
        # Through the base class: a class with its own conversions must not see this one.
        plain = tensor.detach().as_subclass(Tensor)
        self.numbers = plain.to("cpu", copy=True) if plain.device.type != "meta" else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        if self.numbers is None or other.numbers is None:
            return self.numbers is other.numbers
        return torch.equal(self.numbers, other.numbers)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.numbers)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two records, readable."""
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    ]


def live_tensors() -> tuple[int, int]:
    """How many tensors Python can reach, and the bytes of their storages."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if not nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return len(tensors), sum(sizes.values())
