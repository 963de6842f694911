"""The handle that keeps replicas: what it notices, what it leaves alone, and what it lets go of."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import devconv
from tests.parallel.models import MODELS, InPlainList, PlainTensor
from tests.zoo import Normed, Recurrent, fill, mlp

PAIR = ["cpu", "cpu"]


def ids(replicas):
    return [id(module) for replica in replicas for module in replica.modules()]


def warmed(model, devices=PAIR, **options):
    """A handle that has made its replicas and got them back."""
    make = devconv.Replicator(model, devices, **options)
    make()
    make.release()
    return make


def output(replica, device="cpu"):
    return replica(torch.ones(2, 4, device=device)).detach().cpu()


def test_replicas_that_nobody_holds_are_used_again(devices):
    make = devconv.Replicator(fill(mlp()).to(devices[0]), devices)
    first = ids(make())

    assert sorted(ids(make())) == sorted(first)


def test_values_are_sent_on_every_call(devices):
    model = fill(mlp()).to(devices[0])
    make = warmed(model, devices)

    with torch.no_grad():
        model[2].bias.data.fill_(7.0)  # no counter sees this
    replicas = make()

    assert [replica[2].bias.detach().cpu().tolist() for replica in replicas] == [[7.0, 7.0]] * len(devices)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_call_computes_what_the_first_did(name):
    torch.manual_seed(0)
    model = fill(MODELS[name]()).eval()
    make = devconv.Replicator(model, PAIR)
    first = [output(replica) for replica in make()]

    second = [output(replica) for replica in make()]

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_train_and_eval_are_noticed():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
    make = warmed(model)

    model.eval()
    assert [module.training for replica in make() for module in replica.modules()] == [False] * 6
    model[0].train()
    assert [replica[0].training for replica in make()] == [True, True]
    assert [replica[1].training for replica in make()] == [False, False]


def test_a_plain_attribute_that_changed_is_noticed():
    model = mlp()
    model[0].gain = 1
    make = warmed(model)

    for value in (True, 1.0, {"new": 1}, None):
        model[0].gain = value
        assert all(replica[0].gain is value for replica in make())
    del model[0].gain
    assert not any(hasattr(replica[0], "gain") for replica in make())


def test_an_attribute_that_was_renamed_is_noticed():
    model = mlp()
    model.old = value = object()
    make = warmed(model)

    del model.old
    model.new = value

    assert all(replica.new is value and not hasattr(replica, "old") for replica in make())


def test_a_dict_of_attributes_that_was_exchanged_is_noticed():
    model = mlp()
    make = warmed(model)

    object.__setattr__(model[0], "__dict__", {**model[0].__dict__, "swapped": 3})

    assert [replica[0].swapped for replica in make()] == [3, 3]


def test_hooks_that_were_added_and_removed_are_noticed():
    model = fill(mlp())
    make = warmed(model)
    calls = []

    handle = model[0].register_forward_hook(lambda module, args, out: calls.append(module))
    for replica in make():
        output(replica)
    handle.remove()
    for replica in make():
        output(replica)

    assert len(calls) == 2


def test_a_child_that_was_added_replaced_or_removed_is_noticed():
    model = fill(mlp())
    make = warmed(model)

    model.append(nn.ReLU())
    assert [len(replica) for replica in make()] == [4, 4]
    model[1] = nn.Sigmoid()
    assert [type(replica[1]) for replica in make()] == [nn.Sigmoid] * 2
    del model[3]
    assert [len(replica) for replica in make()] == [3, 3]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda m: m[0].register_parameter("extra", nn.Parameter(torch.ones(1))), ["weight", "bias", "extra"]),
        (lambda m: m[0].register_parameter("bias", None), ["weight"]),
        (lambda m: m[1].register_parameter("first", nn.Parameter(torch.ones(1))), ["weight", "bias"]),
    ],
    ids=["added", "set to None", "added where there was none"],
)
def test_a_parameter_that_came_or_went_is_noticed(change, names):
    model = fill(mlp())
    make = warmed(model)

    change(model)

    for replica in make():
        assert [name for name, _ in replica[0].named_parameters()] == names
        assert [n for n, _ in replica.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_parameter_that_was_replaced_is_taken_up_without_new_replicas():
    model = fill(mlp())
    make = warmed(model)
    before = ids(make())

    model[2].bias = nn.Parameter(torch.full((2,), 3.0))
    replicas = make()

    assert [replica[2].bias.tolist() for replica in replicas] == [[3.0, 3.0]] * 2
    assert sorted(ids(replicas)) == sorted(before)


def test_a_tie_that_was_made_or_broken_is_noticed():
    model = fill(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    make = warmed(model)

    model[1].weight = model[0].weight
    assert all(replica[0].weight is replica[1].weight for replica in make())
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    assert all(replica[0].weight is not replica[1].weight for replica in make())


def test_a_parameter_that_was_frozen_is_noticed():
    model = fill(mlp())
    make = warmed(model)

    model[0].weight.requires_grad_(False)

    assert [replica[0].weight.requires_grad for replica in make()] == [False, False]


def test_a_class_that_was_changed_is_noticed():
    model = fill(mlp())
    make = warmed(model)

    class Loud(nn.Tanh):
        pass

    model[1].__class__ = Loud

    assert [type(replica[1]) for replica in make()] == [Loud, Loud]


def test_what_a_plain_list_holds_is_noticed():
    model = InPlainList()
    make = warmed(model)

    model.steps.append(model.first)
    assert all(replica.steps[2] is replica.first for replica in make())
    model.steps[1] = extra = nn.Linear(4, 4)
    assert all(replica.steps[1] is not extra and type(replica.steps[1]) is nn.Linear for replica in make())


def test_a_plain_list_that_gets_its_first_module_is_noticed():
    model = fill(mlp())
    model.later = [0]
    make = warmed(model)

    model.later[0] = model[0]

    assert all(replica.later[0] is replica[0] for replica in make())


def test_a_plain_tensor_that_was_replaced_is_sent():
    model = PlainTensor()
    make = warmed(model)

    model.scale = torch.full((4,), 5.0)

    assert [replica.scale[0].item() for replica in make()] == [5.0, 5.0]


def test_a_module_that_moved_within_the_devices_is_noticed(devices):
    if len(set(devices)) == 1:
        pytest.skip("the list names one device twice")
    model = fill(mlp()).to(devices[0])
    make = warmed(model, devices)
    expected = [output(replica, device) for replica, device in zip(make(), devices, strict=True)]

    devconv.convert(model, devices[1])
    replicas = make()

    assert replicas[1][0].weight is model[0].weight
    assert replicas[0][0].weight is not model[0].weight
    for replica, device, value in zip(replicas, devices, expected, strict=True):
        torch.testing.assert_close(output(replica, device), value, rtol=1e-4, atol=1e-5)


def test_a_module_that_moved_where_there_are_no_values_is_refused():
    model = fill(mlp())
    make = warmed(model)

    model.to("meta")

    with pytest.raises(devconv.ReplicationRefused, match=r"0.weight .meta.: it has no values"):
        make()


def test_a_module_whose_dtype_changed_is_noticed():
    model = fill(mlp())
    make = warmed(model)

    model.double()

    assert [replica[0].weight.dtype for replica in make()] == [torch.float64] * 2


def test_replicas_that_are_still_held_are_left_alone():
    model = fill(mlp())
    make = devconv.Replicator(model, PAIR)
    held = make()
    before = [output(replica) for replica in held]

    with torch.no_grad():
        model[2].bias.add_(1)
    later = make()

    assert not set(ids(held)) & set(ids(later))
    assert torch.equal(output(held[1]), before[1])
    torch.testing.assert_close(output(later[1]), before[1] + 1)


def test_one_module_that_is_still_held_keeps_its_whole_replica():
    model = fill(mlp())
    make = devconv.Replicator(model, PAIR)
    part = make()[1][0]

    make()
    make.release()

    assert part.weight is not None


def test_replicas_in_a_loop_are_used_again_every_other_time():
    make = devconv.Replicator(fill(mlp()), PAIR)
    seen = set()
    for _ in range(6):
        replicas = make()
        seen.update(ids(replicas))

    assert len(seen) == 2 * len(ids(replicas))


def test_a_checkpoint_recomputes_with_the_values_of_its_own_forward():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = mlp()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    model, x = fill(Checkpointed()), torch.ones(2, 4)
    single = copy.deepcopy(model)
    single(x).square().sum().backward()
    expected = {name: p.grad * 2 for name, p in single.named_parameters()}
    make = devconv.Replicator(model, PAIR)

    losses = [replica(x).square().sum() for replica in make()]
    make.release()
    with torch.no_grad():
        later = [replica(torch.zeros(2, 4)) for replica in make()]
    sum(losses).backward()

    assert len(later) == 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_replica_comes_back_after_the_graph_that_held_it_is_gone():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = mlp()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    make = devconv.Replicator(fill(Checkpointed()), PAIR)
    seen = set()
    for _ in range(5):
        replicas = make()
        seen.update(map(id, replicas))
        loss = sum(replica(torch.ones(1, 4)).sum() for replica in replicas)
        del replicas
        make.release()
        loss.backward()
        del loss

    assert len(seen) == 2


class Writing(nn.Module):
    """Writes on itself everything that a module can hold."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        assert self.calls == 0
        assert not hasattr(self, "cache")
        assert not hasattr(self.inner, "mask")
        assert not hasattr(self, "late")
        assert not hasattr(self.inner, "extra")
        self.calls += 1
        self.cache = x
        self.inner.register_buffer("mask", torch.ones(4))
        self.inner.extra = nn.Parameter(torch.ones(1))
        self.late = nn.Linear(4, 4)
        return self.inner(x) * self.inner.mask


def test_what_a_forward_writes_on_a_replica_is_undone():
    model = Writing()
    make = devconv.Replicator(model, PAIR)
    seen = set()

    for _ in range(3):
        replicas = make()
        seen.update(map(id, replicas))
        for replica in replicas:
            replica(torch.ones(1, 4))
        del replica, replicas
        make.release()

    assert len(seen) == 2
    assert model.calls == 0
    assert [name for name, _ in model.named_parameters()] == ["inner.weight", "inner.bias"]


def test_a_child_that_a_forward_exchanges_is_put_back():
    model = fill(mlp())
    make = devconv.Replicator(model, PAIR)

    def exchange(replica):
        replica._modules["1"] = nn.ReLU()
        del replica._modules["2"]

    for replica in make():
        exchange(replica)
    del replica
    make.release()

    assert [[type(child) for child in replica] for replica in make()] == [[nn.Linear, nn.Tanh, nn.Linear]] * 2


def test_an_activation_that_a_forward_keeps_on_a_replica_is_let_go():
    class Keeping(nn.Linear):
        def forward(self, x):
            self.seen = super().forward(x)
            return self.seen * 2

    make = devconv.Replicator(Keeping(4, 4), PAIR)
    replicas = make()
    for replica in replicas:
        replica(torch.ones(1, 4))
    activation = weakref.ref(replicas[1].seen)
    del replica, replicas

    make.release()

    assert activation() is None


def test_released_replicas_hold_no_tensor(devices):
    model = fill(Recurrent()).to(devices[0])
    make = devconv.Replicator(model, devices)
    replicas = make()
    copies = [weakref.ref(parameter) for replica in replicas[1:] for parameter in replica.parameters()]
    del replicas

    make.release()

    assert copies
    assert all(reference() is None for reference in copies)


def test_a_released_replica_leaves_no_graph_on_the_originals():
    model = fill(mlp())
    make = devconv.Replicator(model, PAIR)
    sum(output(replica).sum() for replica in make())

    make.release()

    assert model[0].weight._use_count() == 1


def test_dropping_the_handle_frees_everything_without_the_cyclic_collector():
    model = fill(Recurrent())
    gc.collect()
    gc.disable()
    try:
        make = warmed(model)
        replicas = make()
        seen = [weakref.ref(make), weakref.ref(model), *map(weakref.ref, replicas[0].modules())]
        del replicas, make, model

        assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_the_handle_keeps_a_dropped_module_alive_and_works():
    model = fill(mlp())
    expected = output(model)
    make = warmed(model)
    reference = weakref.ref(model)

    del model

    assert make.module is reference()
    assert torch.equal(output(make()[1]), expected)


def test_nothing_is_stored_on_the_module():
    model = fill(Normed())
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}

    warmed(model)

    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before


def test_fewer_replicas_than_devices_can_be_asked_for(devices):
    make = devconv.Replicator(fill(mlp()).to(devices[0]), devices)

    assert len(make(1)) == 1
    assert len(make()) == len(devices)


def test_a_call_can_override_detach():
    make = devconv.Replicator(fill(mlp()), PAIR)

    assert not make(detach=True)[1][0].weight.requires_grad
    assert make()[1][0].weight.requires_grad


def test_threads_that_share_a_handle_get_replicas_of_their_own():
    model = fill(mlp())
    expected = output(model)
    make = devconv.Replicator(model, PAIR)
    results, failures = [], []

    def work():
        try:
            for _ in range(30):
                results.extend(output(replica) for replica in make())
                make.release()
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failures == []
    assert len(results) == 240
    assert all(torch.equal(result, expected) for result in results)


def test_the_collector_is_running_afterwards():
    warmed(fill(mlp()))

    assert gc.isenabled()


class Sending:
    """Counts the tensors that a handle sends."""

    def __init__(self, monkeypatch):
        from devconv.parallel import replicator

        self.counts = []
        original = replicator.broadcast

        def count(tensors, devices):
            self.counts.append(len(tensors))
            return original(tensors, devices)

        monkeypatch.setattr(replicator, "broadcast", count)


def test_send_changed_leaves_out_what_did_not_change(monkeypatch):
    sending = Sending(monkeypatch)
    model = fill(mlp())
    make = warmed(model, send="changed")

    replicas = make()

    assert sending.counts == [4, 0]
    assert torch.equal(output(replicas[1]), output(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(3),
        lambda p: p.copy_(torch.ones_like(p)),
        lambda p: setattr(p, "data", torch.ones_like(p)),
    ],
    ids=["in place", "copy_", "new data"],
)
def test_send_changed_sends_what_autograd_saw_change(monkeypatch, change):
    sending = Sending(monkeypatch)
    model = fill(mlp())
    make = warmed(model, send="changed")

    with torch.no_grad():
        change(model[0].weight)

    assert torch.equal(output(make()[1]), output(model))
    assert sending.counts == [4, 1]


@pytest.mark.parametrize("fused", [False, True])
def test_send_changed_sends_after_every_optimizer_step(fused):
    model = fill(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    make = warmed(model, send="changed")

    for _ in range(3):
        sum(replica(torch.ones(2, 4)).square().sum() for replica in make()).backward()
        optimizer.step()

        assert torch.equal(output(make()[1]), output(model))


def test_send_changed_sends_buffers_on_every_call():
    model = fill(Normed()).train()
    make = warmed(model, send="changed")

    model(torch.randn(5, 4))

    assert torch.equal(make()[1].norm.running_mean, model.norm.running_mean)


def test_send_changed_does_not_see_writes_through_data_until_it_is_told():
    model = fill(mlp())
    make = warmed(model, send="changed")

    model[2].bias.data.fill_(9.0)
    unseen = make()[1][2].bias[0].item()
    make.mark_dirty(model[2].bias)
    told = make()[1][2].bias[0].item()
    model[2].bias.data.fill_(8.0)
    make.mark_dirty()

    assert unseen != 9.0
    assert told == 9.0
    assert make()[1][2].bias[0].item() == 8.0


def test_send_changed_repairs_what_a_replica_wrote_on_its_copy():
    model = fill(mlp())
    make = warmed(model, send="changed")

    with torch.no_grad():
        make()[1][0].weight.zero_()
    make.release()

    assert torch.equal(output(make()[1]), output(model))


def test_send_changed_accumulates_the_same_gradients():
    model = fill(mlp())
    make = devconv.Replicator(model, PAIR, send="changed")

    for _ in range(3):
        sum(replica(torch.ones(2, 4)).square().sum() for replica in make()).backward()
        make.release()

    single = fill(mlp())
    (single(torch.ones(2, 4)).square().sum() * 6).backward()
    for parameter, other in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_send_changed_notices_a_replaced_parameter_and_a_moved_module():
    model = fill(mlp())
    make = warmed(model, send="changed")

    model[2].bias = nn.Parameter(torch.full((2,), 3.0))
    assert make()[1][2].bias[0].item() == 3.0
    model.double()
    assert make()[1][2].bias.dtype is torch.float64


def test_send_changed_takes_its_hook_off_the_optimizers_when_it_is_dropped():
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_post_hooks)
    make = warmed(fill(mlp()), send="changed")
    during = len(optimizer._global_optimizer_post_hooks)
    del make

    assert (during, len(optimizer._global_optimizer_post_hooks)) == (before + 1, before)


def test_any_other_word_for_send_is_refused():
    with pytest.raises(ValueError, match="sometimes"):
        devconv.Replicator(mlp(), PAIR, send="sometimes")


def test_old_weight_norm_is_fresh_on_every_call():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = devconv.Replicator(model, PAIR)

    for _ in range(3):
        replicas = make()
        outputs = [replica(torch.ones(1, 4)) for replica in replicas]
        assert torch.allclose(outputs[0], model(torch.ones(1, 4)))
        assert torch.allclose(outputs[0], outputs[1])
        sum(o.sum() for o in outputs).backward()
        optimizer.step()
