"""What `replicate` promises about the module, in this process: a group of one rank runs every line of it."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import devconv
from devconv import Backend, Capabilities
from devconv.distributed import no_sync, release, replicate
from devconv.distributed.agreement import _disagreement
from devconv.distributed.groups import reduces_on_device
from devconv.distributed.membership import let_go
from devconv.distributed.reducing import Flight, Options, tensors_in

pytestmark = pytest.mark.timeout(120)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


TOKENS = torch.arange(5)


def step(model, tokens=TOKENS):
    model(tokens).square().sum().backward()


def test_the_module_its_class_names_tensors_and_keys_are_what_they_were(world):
    model = Tied()
    before = dict(model.named_parameters(remove_duplicate=False)), list(model.state_dict()), dict(model.named_modules())

    returned = replicate(model)
    step(model)

    assert returned is model
    assert type(model) is Tied
    after = dict(model.named_parameters(remove_duplicate=False)), list(model.state_dict()), dict(model.named_modules())
    assert after[1] == before[1]
    for was, found in ((before[0], after[0]), (before[2], after[2])):
        assert list(found) == list(was)
        assert all(found[name] is was[name] for name in was)


def test_nothing_is_held_before_the_first_forward_pass(world):
    model = replicate(Tied())
    devconv.convert(model, "meta")
    assert model.embed.weight.is_meta


def test_a_second_application_is_refused_and_the_first_goes_on(world):
    model = replicate(Tied())
    with pytest.raises(devconv.AlreadyReplicatedError, match="Tied is replicated already"):
        replicate(model)
    step(model)
    assert model.embed.weight.grad is not None


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_is_an_ordinary_module_that_can_be_replicated_itself(copied, world):
    model = replicate(Tied())
    step(model)
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)

    with pytest.raises(devconv.NotReplicatedError), no_sync(other):
        pass
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert replicate(other) is other
    step(other)
    release(other)


def test_a_replicated_module_is_freed_with_its_last_reference(world):
    step(replicate(Tied()))  # what torch imports with its first reducer holds on to that one
    model = replicate(Tied())
    step(model)
    gone = weakref.ref(model), weakref.ref(model.embed.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_a_released_module_can_be_exchanged_and_gets_a_new_reducer(world):
    model = replicate(Tied())
    step(model)
    with pytest.raises(devconv.ConversionRefused):
        devconv.convert(model, "meta")

    release(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        devconv.convert(model, dtype=torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.zero_grad()
    step(model)

    assert model.embed.weight.grad.dtype is torch.float64
    with pytest.raises(devconv.ConversionRefused):
        devconv.convert(model, "meta")


def test_what_converts_a_child_can_make_its_parents_reducer_let_go(world):
    model, other = replicate(Tied()), replicate(nn.Linear(2, 2))
    step(model)
    other(torch.ones(1, 2)).sum().backward()

    let_go(model.head)

    devconv.convert(model, "meta")
    with pytest.raises(devconv.ConversionRefused):
        devconv.convert(other, "meta")


@pytest.mark.parametrize("held", ["output", "loss"])
def test_release_between_forward_and_backward_is_refused(held, world):
    model = replicate(Tied())
    kept = model(TOKENS)
    if held == "loss":
        kept = kept.sum()
    with pytest.raises(devconv.PendingBackwardError, match="Run backward"):
        release(model)
    kept.sum().backward()
    release(model)


def test_release_after_a_forward_pass_whose_output_was_dropped_is_not_refused(world):
    model = replicate(Tied())
    model(TOKENS)
    release(model)


def test_a_conversion_between_forward_and_backward_is_refused_at_the_next_forward_pass(world):
    model = replicate(nn.Linear(2, 2))
    kept = model(torch.ones(1, 2))
    model.double()
    with pytest.raises(devconv.PendingBackwardError):
        model(torch.ones(1, 2, dtype=torch.float64))
    del kept


def test_a_module_added_later_is_averaged_too(world):
    model = replicate(nn.Sequential(nn.Linear(2, 2)))
    step(model, torch.ones(1, 2))
    model.append(nn.Linear(2, 1))
    step(model, torch.ones(1, 2))
    with pytest.raises(devconv.ConversionRefused, match=r"1\.weight"):
        devconv.convert(model, "meta")


def test_no_sync_of_a_module_that_is_not_replicated_is_refused(world):
    with pytest.raises(devconv.NotReplicatedError, match="no_sync"), no_sync(nn.Linear(1, 1)):
        pass


def test_a_compiled_module_trains(world):
    model = replicate(nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        compiled(torch.ones(3, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[3, 3]]


def test_a_failed_forward_pass_leaves_the_module_usable(world):
    model = replicate(nn.Linear(2, 1))
    step(model, torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[1, 1]]


def test_without_a_process_group_the_cure_names_torchrun():
    with pytest.raises(devconv.ProcessGroupError, match="torchrun"):
        replicate(nn.Linear(1, 1))


def test_something_that_is_no_module_is_refused(world):
    with pytest.raises(devconv.NotAModuleError):
        replicate([nn.Linear(1, 1)])


def test_an_ignored_module_from_elsewhere_is_refused(world):
    with pytest.raises(devconv.ReplicationRefused, match="is not a sub-module"):
        replicate(nn.Linear(1, 1), ignored_modules=[nn.Linear(1, 1)])


def managed_by_ddp():
    return nn.parallel.DistributedDataParallel(nn.Linear(1, 1)), "DistributedDataParallel"


def managed_by_torchs_replicate():
    from torch.distributed._composable.replicate import replicate as stock

    return stock(nn.Linear(1, 1)), r"torch's replicate\(\)"


@pytest.mark.parametrize("make", [managed_by_ddp, managed_by_torchs_replicate])
def test_a_module_that_another_api_manages_is_refused_and_left_alone_below(make, world):
    module, name = make()
    with pytest.raises(devconv.ReplicationRefused, match=name):
        replicate(module)
    outer = replicate(nn.Sequential(nn.Linear(1, 1), module))
    step(outer, torch.ones(1, 1))
    assert module.__dict__.get("_devconv_replication") is None
    assert list(outer.__dict__["_devconv_replication"].role._managed.parameters) == ["0.weight", "0.bias"]


def test_every_parameter_is_collected_once_and_others_parameters_never(world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].bias = model[1].bias
    replicate(model, ignored_modules=[model[2]])
    step(model, torch.ones(1, 2))
    managed = model.__dict__["_devconv_replication"].role._managed
    assert list(managed.parameters) == ["0.weight", "0.bias"]
    assert managed.shared == ["1.bias"]


class Unreached(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.LazyLinear(2), nn.LazyLinear(2)

    def forward(self, inputs):
        return self.used(inputs)


def test_a_lazy_parameter_that_the_inputs_never_reach_is_named_with_the_cure(world):
    model = replicate(Unreached())
    with pytest.raises(devconv.ReplicationRefused, match=r"spare\.weight \(lazy\).*devconv\.materialize") as caught:
        model(torch.ones(1, 3))
    assert [reason.name for reason in caught.value.reasons] == ["spare.weight", "spare.bias"]


def test_an_ignored_lazy_module_stays_lazy(world):
    model = Unreached()
    replicate(model, ignored_modules=[model.spare])
    step(model, torch.ones(1, 3))
    assert model.used.weight.grad is not None
    assert model.spare.has_uninitialized_params()


def test_parameters_without_values_are_named_with_the_cure(world):
    model = replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.raises(
        devconv.ReplicationRefused, match=r"1\.weight \(meta\): it has no values\. Use module\.to_empty"
    ):
        model(torch.ones(1, 2))


@pytest.mark.needs("xla")
@pytest.mark.lane("xla")
def test_a_half_moved_module_is_refused_by_name_before_anything_runs(world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    devconv.convert(model[1], "xla")
    replicate(model)
    with pytest.raises(
        devconv.ReplicationRefused, match=r"1\.weight \(xla:0\): other tensors of the module are on cpu"
    ):
        model(torch.ones(1, 2))


def test_an_optimizer_that_torch_put_into_the_backward_pass_is_refused_by_name(world):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Linear(2, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {"lr": 0.1})
    with pytest.raises(devconv.ReplicationRefused, match=r"weight \(cpu\): its optimizer steps during"):
        replicate(model)(torch.ones(1, 2))


def test_a_hook_that_sees_gradients_before_they_are_averaged_is_warned_of(world):
    model = nn.Linear(2, 1)
    model.bias.register_post_accumulate_grad_hook(lambda bias: None)
    with pytest.warns(RuntimeWarning, match="bias: hooks from register_post_accumulate_grad_hook"):
        replicate(model)(torch.ones(1, 2))


def test_a_module_that_trains_nothing_is_refused(world):
    model = replicate(nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(devconv.ReplicationRefused, match="nothing to average"):
        model(torch.ones(1, 1))


class Growing(nn.Module):
    """Adds a parameter to itself whenever a hook is registered."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def register_forward_hook(self, *args, **kwargs):
        self.extra = nn.Parameter(torch.ones(1))
        return super().register_forward_hook(*args, **kwargs)


def test_a_module_that_changes_while_it_is_replicated_breaks_the_contract(world):
    with pytest.raises(devconv.ContractError, match="its parameters: None became 'extra'"):
        replicate(Growing())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": object()}, "takes the mesh of a device's backend"),
        ({"mesh": "Flat", "bucket_cap_mb": 1}, "replaces process_group="),
    ],
)
def test_a_wrong_mesh_is_refused(arguments, message):
    if arguments["mesh"] == "Flat":
        arguments = {**arguments, "mesh": Flat()}
    with pytest.raises(TypeError, match=message):
        replicate(nn.Linear(1, 1), **arguments)


class Flat:
    """A mesh of the CPU that records what it is asked for."""

    device_type, size = "cpu", 1

    def __init__(self):
        self.whole, self.split = [], []

    def replicate(self, tensors):
        self.whole += tensors

    def shard(self, tensors):
        self.split += tensors


def test_any_backend_can_bring_a_mesh():
    mesh, model = Flat(), nn.Linear(2, 1)
    replicate(model, mesh=mesh)
    inputs = torch.ones(3, 2)
    for _ in range(2):
        model(inputs)
    assert [tensor is mine for tensor, mine in zip(mesh.whole, model.parameters(), strict=True)] == [True, True]
    assert [tensor is inputs for tensor in mesh.split] == [True, True]


class Foreign(Backend):
    device_type = "privateuseone"


@pytest.mark.parametrize(
    ("name", "served", "expected"),
    [
        (None, "gloo", False),
        ("accl", "gloo", r'serves cpu by gloo.*new_group\(backend="accl"\)'),
        (None, "cuda:gloo", "the host, which could do it for them, is not served either"),
    ],
)
def test_the_registry_decides_where_gradients_are_averaged(name, served, expected):
    backend = Foreign()
    backend.capabilities = Capabilities(process_group=name)
    devconv.register(backend)
    dist.init_process_group(served, store=dist.HashStore(), rank=0, world_size=1)
    try:
        if isinstance(expected, str):
            with pytest.raises(devconv.ProcessGroupError, match=expected):
                reduces_on_device("privateuseone", None)
        else:
            assert reduces_on_device("privateuseone", None) is expected
    finally:
        dist.destroy_process_group()
        devconv.unregister("privateuseone")


@pytest.mark.parametrize(
    ("theirs", "first", "name", "why"),
    [
        (["a: 1", "b: 2"], ["a: 1", "b: 3"], "b", "2 there, 3 on rank 0"),
        (["a: 1", "c: 2"], ["a: 1", "b: 2"], "c", "2 there, b: 2 on rank 0"),
        (["a: 1", "b: 2"], ["a: 1"], "b", r"only rank 1 has it \(2\)"),
        (["a: 1"], ["a: 1", "b: 2"], "b", r"only rank 0 has it \(2\)"),
    ],
)
def test_a_disagreement_names_the_first_difference(theirs, first, name, why):
    with pytest.raises(devconv.RanksDisagreeError, match=f"rank 1 and rank 0.*: {name}: {why}"):
        raise _disagreement(1, theirs, first)


def test_a_flight_ends_with_its_graph():
    flight, weight = Flight(), torch.ones(1, requires_grad=True)
    output = weight * 2
    flight.start({"logits": output})
    loss = output.sum()
    del output
    assert flight.in_air
    del loss
    assert not flight.in_air


def test_tensors_are_found_in_what_models_return():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [tensor.numel() for tensor in tensors_in({"x": a, "y": [(b, None), Options(bucket_cap_mb=c)]})] == [1, 2, 3]
