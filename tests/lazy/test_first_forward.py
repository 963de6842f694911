"""The first forward pass with the flag on: one thread, the right device, and through torch's compilers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import devconv
from devconv import LazyDeviceError
from tests.lazy.conftest import flag_on
from tests.lazy.zoo import IMAGE, KINDS, lazy_net


def run_together(count, work):
    """Call ``work()`` in `count` threads that start at once, each with the flag on; returns what they raised."""
    barrier, failures = threading.Barrier(count), []

    def body():
        with flag_on():
            barrier.wait()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - collected
                failures.append(error)

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failures


class Counted(nn.LazyLinear):
    """Takes its time, and counts how often it was initialised."""

    cls_to_become = nn.Linear
    initialised = 0

    def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - forward()'s name
        type(self).initialised += 1
        threading.Event().wait(0.0005)
        super().initialize_parameters(input)


@pytest.mark.timeout(150)
def test_two_hundred_first_passes_of_four_threads_each(flag):
    failures = []
    Counted.initialised = 0
    x = torch.ones(2, 3)
    for _ in range(200):
        model = nn.Sequential(Counted(4), nn.ReLU(), Counted(2))
        failures += run_together(4, lambda model=model: model(x))
    assert failures == []
    assert Counted.initialised == 400


@pytest.mark.timeout(120)
def test_threads_share_a_first_pass_on_the_device(flag, real_device):
    failures = []
    x = torch.ones(IMAGE, device=real_device)
    for _ in range(5):
        model = lazy_net(real_device)
        failures += run_together(4, lambda model=model: model(x))
    assert failures == []


@pytest.mark.timeout(60)
def test_materialize_and_a_first_pass_may_meet(flag):
    failures = []
    for _ in range(20):
        model = nn.Sequential(Counted(4), Counted(2))
        turns = iter([lambda m: devconv.materialize(m, torch.ones(2, 3)), lambda m: m(torch.ones(2, 3))] * 2)
        lock = threading.Lock()

        def work(turns=turns, lock=lock, model=model):
            with lock:
                turn = next(turns)
            turn(model)

        failures += run_together(4, work)
    assert failures == []


def test_an_input_on_another_device_is_refused_before_anything_is_touched(flag, other_device):
    # pytorch/xla#9189: stock torch gives the module its tensors on the CPU, and then fails.
    layer = nn.LazyLinear(2)
    with pytest.raises(LazyDeviceError) as caught:
        layer(torch.ones(2, 3, device=other_device))
    assert is_lazy(layer.weight)
    assert (caught.value.device, caught.value.input_device) == ("cpu", str(other_device))
    assert f'.to("{other_device}")' in str(caught.value)


def test_the_refusal_names_the_layer_in_its_model(flag, other_device):
    model = nn.Sequential(nn.ReLU(), nn.ModuleDict({"head": nn.LazyLinear(2)}))
    with pytest.raises(LazyDeviceError, match=r"1\.head \(LazyLinear\)"):
        model[1]["head"](torch.ones(2, 3, device=other_device))


def test_a_model_works_after_the_cure_of_the_refusal(flag, other_device):
    layer = nn.LazyLinear(2)
    x = torch.ones(2, 3, device=other_device)
    with pytest.raises(LazyDeviceError):
        layer(x)
    layer.to(other_device)
    assert layer(x).device == other_device


def test_scalars_on_the_host_do_not_count_as_inputs_elsewhere(flag, other_device):
    class Scaled(nn.LazyLinear):
        cls_to_become = None

        def initialize_parameters(self, x, scale):
            super().initialize_parameters(x)

        def forward(self, x, scale):
            return super().forward(x) * scale

    layer = Scaled(2, device=other_device)
    assert layer(torch.ones(2, 3, device=other_device), torch.tensor(2.0)).shape == (2, 2)


def test_hooks_put_before_see_the_lazy_layer_and_change_its_input(flag):
    seen = []

    def hook(module, args):
        seen.append(type(module))
        return (args[0][:, :2],)

    layer = nn.LazyLinear(4)
    layer.register_forward_pre_hook(hook, prepend=True)
    layer(torch.ones(2, 3))
    assert seen == [nn.LazyLinear]
    assert layer.in_features == 2


def test_hooks_put_after_see_the_layer_that_it_became(flag):
    seen = []
    layer = nn.LazyLinear(4)
    layer.register_forward_pre_hook(lambda module, args: seen.append(type(module)))
    layer(torch.ones(2, 3))
    assert seen == [nn.Linear]


def test_a_module_made_before_the_flag_is_guarded_too(other_device):
    layer = nn.LazyLinear(2)
    with flag_on(), pytest.raises(LazyDeviceError):
        layer(torch.ones(2, 3, device=other_device))


def test_nothing_of_the_guard_stays_in_a_module_that_waits_on(flag, other_device):
    layer = nn.LazyLinear(2)
    hooks = dict(layer._forward_pre_hooks)
    with pytest.raises(LazyDeviceError):
        layer(torch.ones(2, 3, device=other_device))
    assert dict(layer._forward_pre_hooks) == hooks


def test_with_the_flag_off_torchs_own_objects_are_back():
    before = {name: vars(nn.modules.lazy.LazyModuleMixin).get(name) for name in ("__call__", "_infer_parameters")}
    with flag_on():
        assert "__call__" in vars(nn.modules.lazy.LazyModuleMixin)
    after = {name: vars(nn.modules.lazy.LazyModuleMixin).get(name) for name in ("__call__", "_infer_parameters")}
    assert after == before
    assert after["__call__"] is None


def test_other_threads_have_stock_behaviour_while_one_has_the_flag(flag, other_device):
    layer, raised = nn.LazyLinear(2), []

    def body():
        try:
            layer(torch.ones(2, 3, device=other_device))
        except Exception as error:  # noqa: BLE001 - whatever stock torch says
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not any(isinstance(error, LazyDeviceError) for error in raised)
    assert not is_lazy(layer.weight)


@pytest.mark.parametrize("name", KINDS)
def test_every_class_is_initialised_by_its_first_call(flag, name):
    kind = KINDS[name]
    module = kind.make()
    module(*kind.inputs())
    assert repr(module) == repr(kind.eager())
    assert type(module) is type(kind.eager())


@pytest.mark.parametrize(
    "name", ["LazyLinear", "LazyConv2d", "LazyBatchNorm2d", "LazyLayerNorm", "LazyGroupNorm", "LazyPReLU"]
)
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "nested"])
def test_every_class_compiles(flag, name, nested):
    torch._dynamo.reset()
    kind = KINDS[name]
    module = nn.Sequential(kind.make(), nn.ReLU()) if nested else kind.make()
    x = kind.inputs()
    out = torch.compile(module, backend="eager", fullgraph=True)(*x)
    inner = module[0] if nested else module
    assert type(inner) is type(kind.eager())
    assert torch.allclose(out, module(*x))


def test_a_subclass_of_ones_own_compiles(flag):
    torch._dynamo.reset()

    class Doubled(nn.LazyLinear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.Sequential(Doubled(3))
    x = torch.ones(2, 5)
    out = torch.compile(model, backend="eager")(x)
    assert torch.allclose(out, model(x))
    assert type(model[0]) is Doubled


@pytest.mark.parametrize("strict", [False, True])
def test_a_lazy_model_exports(flag, strict):
    torch._dynamo.reset()
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2)).eval()
    x = torch.ones(2, 5)
    program = torch.export.export(model, (x,), strict=strict)
    assert torch.allclose(program.module()(x), model(x))
    assert model[2].in_features == 3
