"""Random models, random conversions, steps, saves and loads, against a twin that is never moved.

A few hundred examples in a lane's run; ``nox -s fuzz`` runs tens of thousands (``DEVCONV_FUZZ_EXAMPLES``). Every failure
that it finds becomes a named test in test_found.py.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

import devconv
from tests.everything import differences, record
from tests.fuzz.layers import LAYERS, model_of
from tests.moves import close, device_is_here, host, named_tensors, torch_future
from tests.test_all_or_nothing import backend_that_fails
from tests.zoo import loss_of, nested, train

DEVICES = (
    ["cpu", "xla:0", "xla:1"] if device_is_here("xla") else ["cuda:0", "cpu"] if device_is_here("cuda") else ["cpu"]
)
DTYPES = [torch.float32, torch.float64]
EXAMPLES = int(os.environ.get("DEVCONV_FUZZ_EXAMPLES", "15" if device_is_here("xla") else "200"))

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.005, momentum=0.5),
}


class Side:
    """A model with its optimizer and what a program holds on to."""

    def __init__(self, recipe: list[str], seed: int, optimizer: str) -> None:
        self.model = model_of(recipe, seed)
        self.optimizer = OPTIMIZERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])
        self.graphs: list[Tensor] = []
        self.fired: dict[str, int] = {}

    def hook(self, name: str, kind: str) -> Any:
        parameter = self.model.get_parameter(name)
        key = f"{name} {kind} {len(self.fired)}"
        self.fired[key] = 0

        def count(_: Tensor) -> None:
            self.fired[key] += 1

        register = parameter.register_hook if kind == "gradient" else parameter.register_post_accumulate_grad_hook
        return register(count)


class Conversions(RuleBasedStateMachine):
    """The moved model and its twin go through the same program; only one of them is converted."""

    @initialize(
        recipe=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        seed=st.integers(0, 3),
    )
    def build(self, recipe: list[str], optimizer: str, seed: int) -> None:
        for device in DEVICES:
            devconv.prepare(device)
        self.moved, self.twin = Side(recipe, seed, optimizer), Side(recipe, seed, optimizer)
        self.step_number = 0
        self.handles: list[tuple[Any, Any]] = []
        self.remember_objects()
        self.ties, self.shared = self.groups(id), self.groups(_storage)

    def remember_objects(self) -> None:
        self.objects = {key: weakref.ref(p) for key, p in self.moved.model.named_parameters(remove_duplicate=False)}

    def groups(self, key: Callable[[Tensor], int]) -> list[list[str]]:
        found: dict[int, list[str]] = {}
        for name, tensor in named_tensors(self.moved.model):
            if tensor.numel():
                found.setdefault(key(tensor), []).append(name)
        return sorted(found.values())

    # -- conversions -------------------------------------------------------------------------------------------------

    @rule(
        device=st.sampled_from(DEVICES),
        dtype=st.sampled_from(DTYPES),
        door=st.sampled_from(["flag", "convert", "lambda", "opaque"]),
        future=st.sampled_from(["", "", "swap", "overwrite"]),
    )
    def convert(self, device: str, dtype: torch.dtype, door: str, future: str) -> None:
        if future == "overwrite" and (self.moved.graphs or self.handles):
            # The graphs and handles stay with the old objects, which is what overwriting means.
            future = ""
        with torch_future(future):
            self.through(door, device, dtype)
        if future == "overwrite":
            self.remember_objects()

    def through(self, door: str, device: str, dtype: torch.dtype) -> None:
        model = self.moved.model
        if door == "convert":
            devconv.convert(model, device, dtype, optimizers=self.moved.optimizer)
            return
        with devconv.registry_conversion():
            if door == "flag":
                model.to(device, dtype)
            elif door == "lambda":
                model._apply(lambda t: t.to(device))
                model.to(dtype)
            else:
                model._apply(lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device))
        devconv.follow(self.moved.optimizer)

    @rule(at=st.integers(0, 12), dtype=st.sampled_from(DTYPES))
    def fail(self, at: int, dtype: torch.dtype) -> None:
        """A transfer that fails leaves everything as it was; one that has less to do than `at` arrives."""
        before = record(self.moved.model, [self.moved.optimizer])
        before = record(self.moved.model, [self.moved.optimizer])
        with backend_that_fails("cpu", at, ZeroDivisionError):
            try:
                devconv.convert(self.moved.model, "cpu", dtype, optimizers=self.moved.optimizer)
            except ZeroDivisionError:
                assert differences(before, record(self.moved.model, [self.moved.optimizer])) == []

    @rule()
    def stay(self) -> None:
        tensor = next(self.moved.model.parameters())
        before = {key: (id(t), t._version) for key, t in named_tensors(self.moved.model)}
        devconv.convert(self.moved.model, tensor.device, tensor.dtype, optimizers=self.moved.optimizer)
        assert {key: (id(t), t._version) for key, t in named_tensors(self.moved.model)} == before

    # -- the program -------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.moved.graphs)
    @rule()
    def step(self) -> None:
        for side in (self.moved, self.twin):
            train(side.model, side.optimizer, range(self.step_number, self.step_number + 1))
        self.step_number += 1

    @precondition(lambda self: len(self.moved.graphs) < 2)
    @rule()
    def forward(self) -> None:
        for side in (self.moved, self.twin):
            side.graphs.append(loss_of(side.model, self.step_number))
        self.step_number += 1

    @precondition(lambda self: self.moved.graphs)
    @rule()
    def backward(self) -> None:
        for side in (self.moved, self.twin):
            side.graphs.pop(0).backward()

    @precondition(lambda self: self.moved.graphs)
    @rule()
    def forget(self) -> None:
        for side in (self.moved, self.twin):
            side.graphs.clear()

    @rule(to_none=st.booleans())
    def zero(self, to_none: bool) -> None:
        for side in (self.moved, self.twin):
            side.optimizer.zero_grad(set_to_none=to_none)

    @precondition(lambda self: not self.moved.graphs)
    @rule(train_mode=st.booleans())
    def mode(self, train_mode: bool) -> None:
        for side in (self.moved, self.twin):
            side.model.train(train_mode)

    @rule(which=st.integers(0, 30), kind=st.sampled_from(["gradient", "accumulated"]))
    def hook(self, which: int, kind: str) -> None:
        names = [name for name, p in self.moved.model.named_parameters() if p.requires_grad]
        name = names[which % len(names)]
        self.handles.append((self.moved.hook(name, kind), self.twin.hook(name, kind)))

    @precondition(lambda self: self.handles)
    @rule()
    def unhook(self) -> None:
        for handle in self.handles.pop(0):
            handle.remove()

    @precondition(lambda self: not self.moved.graphs)
    @rule()
    def save_and_load(self) -> None:
        for side in (self.moved, self.twin):
            checkpoint = copy.deepcopy(side.model.state_dict())
            state = copy.deepcopy(side.optimizer.state_dict())
            with torch.no_grad():
                for parameter in side.model.parameters():
                    parameter.mul_(2)
            side.model.load_state_dict(checkpoint)
            side.optimizer.load_state_dict(state)

    @precondition(lambda self: not self.moved.graphs and not self.handles)
    @rule()
    def duplicate(self) -> None:
        """A copy of the model has the same ties and the same numbers."""
        if any(not p.is_leaf for _, p in named_tensors(self.moved.model)) or _derives(self.moved.model):
            return
        twin = copy.deepcopy(self.moved.model)
        wanted = dict(named_tensors(self.moved.model))
        assert all(close(tensor, wanted[key], rtol=0, atol=0) for key, tensor in named_tensors(twin))

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def objects_are_what_they_were(self) -> None:
        now = dict(self.moved.model.named_parameters(remove_duplicate=False))
        assert now.keys() == self.objects.keys()
        assert [key for key, reference in self.objects.items() if reference() is not now[key]] == []

    @invariant()
    def ties_and_shared_memory_are_what_they_were(self) -> None:
        assert self.groups(id) == self.ties
        assert self.groups(_storage) == self.shared

    @invariant()
    def numbers_are_the_twins(self) -> None:
        wanted = dict(named_tensors(self.twin.model))
        for key, tensor in named_tensors(self.moved.model):
            assert alike(tensor, wanted[key]), key
            assert tensor.requires_grad == wanted[key].requires_grad, key

    @invariant()
    def gradients_are_the_twins(self) -> None:
        wanted = dict(named_tensors(self.twin.model))
        for key, tensor in named_tensors(self.moved.model):
            mine, its = tensor.grad, wanted[key].grad
            assert (mine is None) == (its is None), key
            if mine is not None:
                assert (mine.device, mine.dtype) == (tensor.device, tensor.dtype), key
                assert alike(mine, its), key

    @invariant()
    def hooks_fired_as_often(self) -> None:
        assert self.moved.fired == self.twin.fired

    @invariant()
    def the_optimizer_holds_the_models_parameters(self) -> None:
        mine = {id(parameter) for parameter in self.moved.model.parameters()}
        held = [p for group in self.moved.optimizer.param_groups for p in group["params"]]
        assert all(id(parameter) in mine for parameter in held)
        its = [p for group in self.twin.optimizer.param_groups for p in group["params"]]
        for one, other in zip(held, its, strict=True):
            state, wanted = self.moved.optimizer.state.get(one, {}), self.twin.optimizer.state.get(other, {})
            assert state.keys() == wanted.keys()
            for left, right in zip(nested(dict(state)), nested(dict(wanted)), strict=True):
                assert alike(left, right)

    @invariant()
    def devices_and_dtypes_are_one(self) -> None:
        assert len({tensor.device for _, tensor in named_tensors(self.moved.model)}) == 1
        floating = {t.dtype for _, t in named_tensors(self.moved.model) if t.is_floating_point()}
        assert len(floating) == 1


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _derives(model: nn.Module) -> bool:
    """Whether a module keeps a tensor with a graph, which torch's deepcopy refuses."""
    return any(
        isinstance(value, Tensor) and not value.is_leaf for module in model.modules() for value in vars(module).values()
    )


def alike(mine: Tensor, its: Tensor) -> bool:
    """Equal up to what float32 on two devices may differ by after some steps."""
    left, right = host(mine).to(torch.float64), host(its).to(torch.float64)
    return left.shape == right.shape and bool(torch.allclose(left, right, rtol=5e-3, atol=5e-4, equal_nan=True))


Conversions.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=12,
    deadline=None,
    derandomize=EXAMPLES < 1000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestConversions = pytest.mark.timeout(max(900, EXAMPLES * 3))(Conversions.TestCase)
