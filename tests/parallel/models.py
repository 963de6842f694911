"""Modules that keep tensors and modules where a replica has to look twice. Each takes ``(batch, 4)``."""

from __future__ import annotations

import functools
import types
import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo import Attention, Normed, Recurrent, Tied, TwoPaths, mlp


class Listed(nn.Module):
    """Parameters in ParameterList and ParameterDict, and None where a parameter may be."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))])
        self.biases = nn.ParameterDict({"out": nn.Parameter(torch.randn(4))})
        self.register_parameter("nothing", None)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.table + self.biases["out"]


class InPlainList(nn.Module):
    """Registered modules that are called through a plain list, and one that is in the list only."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.steps = [self.first, nn.Linear(4, 4)]
        self.named = {"again": (self.first, "name")}

    def forward(self, x):
        for step in self.steps:
            x = torch.tanh(step(x))
        return self.named["again"][0](x)


class Bound(nn.Module):
    """A bound method and a partial that lead back to the module's own parts."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.call = self.inner.forward
        self.scaled = functools.partial(Bound.scale, self)

    def scale(self, x, by):
        return self.inner(x) * by

    def forward(self, x):
        return self.scaled(self.call(x), by=2.0)


class Patched(nn.Module):
    """A forward that was assigned to the instance."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.forward = types.MethodType(lambda self, x: self.inner(x) + 1, self)


class PlainTensor(nn.Module):
    """Tensors that are plain attributes: one fixed, one with a gradient, and a parameter that a list holds too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = torch.full((4,), 2.0)
        self.shift = torch.zeros(4, requires_grad=True)
        self.flat = [self.weight, "not a tensor"]

    def forward(self, x):
        return (x @ self.flat[0]) * self.scale + self.shift


def weight_normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh())


def parametrized():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.orthogonal(nn.Linear(4, 4)))


class Own(nn.Linear):
    """Brings its own copy for a replica, as RNNs and graph modules do."""

    def __init__(self):
        super().__init__(4, 4)
        self.log = ["original"]

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica.log = [*self.log, "replica"]
        return replica

    def forward(self, x):
        assert self.log[-1] == "replica"
        return super().forward(x)


MODELS = {
    "mlp": mlp,
    "ties": Tied,
    "shared": TwoPaths,
    "buffers": Normed,
    "rnn": Recurrent,
    "attention": Attention,
    "parameter-list": Listed,
    "plain-list": InPlainList,
    "bound-method": Bound,
    "patched-forward": Patched,
    "plain-tensor": PlainTensor,
    "weight-norm": weight_normed,
    "parametrized": parametrized,
}
