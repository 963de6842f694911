"""What needs shapes: it waits for them, or says at once which tensor has none and the line that gives it one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import devconv
from devconv import TensorSpec, UninitializedTensorError, materialize
from tests.lazy.conftest import flag_on

pytestmark = pytest.mark.usefixtures("flag")

LOOK = ("Adagrad", "Muon")
DENSE = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
    and name not in (*LOOK, "SparseAdam")
)


def model_with_head():
    return nn.Sequential(nn.ModuleDict({"head": nn.LazyLinear(3)}))


@pytest.mark.parametrize("name", DENSE)
def test_every_optimizer_built_on_lazy_parameters_trains_the_real_ones(name, real_device):
    layer = nn.LazyLinear(3)
    # By default LBFGS calls its closure twenty times, and a device that only records would compile twenty programs,
    # each longer by one iteration.
    options = {"max_iter": 2} if name == "LBFGS" else {}
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1, **options)
    devconv.convert(layer, real_device)
    x = torch.ones(2, 5, device=real_device)
    layer(x)
    before = layer.weight.detach().cpu().clone()

    def closure():
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)

    assert not torch.equal(layer.weight.detach().cpu(), before)


@pytest.mark.parametrize("name", [name for name in LOOK if hasattr(torch.optim, name)])
@pytest.mark.parametrize("groups", [False, True], ids=["list", "groups"])
def test_an_optimizer_that_reads_shapes_says_so_at_once(name, groups):
    model = model_with_head()
    parameters = list(model.parameters())
    with pytest.raises(UninitializedTensorError) as caught:
        getattr(torch.optim, name)([{"params": parameters}] if groups else parameters)
    assert caught.value.names == ("0.head.weight", "0.head.bias")
    assert name in str(caught.value)
    assert "devconv.materialize(model, *example_inputs)" in str(caught.value)


@pytest.mark.parametrize("name", [name for name in LOOK if hasattr(torch.optim, name)])
def test_an_optimizer_that_reads_shapes_works_after_the_cure(name):
    layer = nn.LazyLinear(3, bias=False)
    materialize(layer, TensorSpec((2, 5)))
    getattr(torch.optim, name)(iter(layer.parameters()), lr=0.1)


def test_named_parameters_give_the_name():
    layer = nn.LazyLinear(3, bias=False)
    with pytest.raises(UninitializedTensorError, match=r"my.weight"):
        torch.optim.Adagrad([("my.weight", layer.weight)])


REFUSED = {
    "old weight_norm": (lambda m: weight_norm(m), "weight_norm"),
    "old spectral_norm": (lambda m: spectral_norm(m), "spectral_norm"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m), "weight_norm"),
    "spectral_norm": (lambda m: parametrizations.spectral_norm(m), "spectral_norm"),
    "orthogonal": (lambda m: parametrizations.orthogonal(m), "orthogonal"),
    "parametrization": (lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()), "parametrization"),
    "l1 pruning": (lambda m: prune.l1_unstructured(m, "weight", 0.5), "pruning"),
    "structured pruning": (lambda m: prune.ln_structured(m, name="weight", amount=0.5, n=2, dim=0), "pruning"),
    "identity pruning": (lambda m: prune.identity(m, "weight"), "pruning"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_reparametrising_a_lazy_layer_names_its_weight(name):
    apply, action = REFUSED[name]
    model = model_with_head()
    with pytest.raises(UninitializedTensorError) as caught:
        apply(model[0]["head"])
    assert caught.value.names == ("0.head.weight",)
    assert action in caught.value.action


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_reparametrising_works_after_the_cure(name):
    layer = nn.LazyLinear(3)
    materialize(layer, TensorSpec((2, 5)))
    REFUSED[name][0](layer)
    assert layer(torch.ones(2, 5)).shape == (2, 3)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)], ids=["mean", "ema"])
def test_an_average_made_of_a_lazy_model_follows_it(average, real_device):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    devconv.convert(model, real_device)
    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    x = torch.randn(4, 5).to(real_device)
    model(x)

    averaged.update_parameters(model)

    assert averaged.module[0].weight is not model[0].weight
    assert torch.equal(averaged.module[0].weight.cpu(), model[0].weight.cpu())
    assert torch.equal(averaged.module[1].running_mean.cpu(), model[1].running_mean.cpu())
    assert averaged(x).shape == (4, 3)


def test_averaging_a_model_that_is_lazy_itself_is_refused():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UninitializedTensorError, match="averaging"):
        AveragedModel(model).update_parameters(model)


def test_functional_call_names_what_is_lazy():
    # Stock torch would leave a plain Linear with lazy parameters behind.
    model = nn.Sequential(nn.LazyLinear(3))
    tensors = {"0.weight": torch.zeros(3, 5), "0.bias": torch.zeros(3)}
    with pytest.raises(UninitializedTensorError, match=r"functional_call.*0\.weight"):
        torch.func.functional_call(model, tensors, torch.ones(2, 5))
    assert type(model[0]) is nn.LazyLinear


def test_functional_call_works_after_the_cure():
    model = nn.Sequential(nn.LazyLinear(3))
    materialize(model, TensorSpec((2, 5)))
    tensors = {"0.weight": torch.zeros(3, 5), "0.bias": torch.ones(3)}
    assert torch.equal(torch.func.functional_call(model, tensors, torch.ones(2, 5)), torch.ones(2, 3))


def test_data_parallel_replicas_of_a_lazy_module_are_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UninitializedTensorError, match="weight"):
        model[0]._replicate_for_data_parallel()


def test_a_subclass_that_stayed_what_it_is_can_be_replicated():
    class Own(nn.LazyLinear):
        pass

    layer = Own(3)
    materialize(layer, TensorSpec((2, 5)))
    assert isinstance(layer._replicate_for_data_parallel(), Own)


def test_distributed_data_parallel_names_what_is_lazy():
    with pytest.raises(UninitializedTensorError, match=r"DistributedDataParallel.*0\.weight"):
        nn.parallel.DistributedDataParallel(nn.Sequential(nn.LazyLinear(3)))


def test_refuse_lazy_is_there_for_others():
    devconv.lazy.refuse_lazy(nn.Linear(2, 2), "replicating")
    with pytest.raises(UninitializedTensorError, match="replicating"):
        devconv.lazy.refuse_lazy(nn.LazyBatchNorm1d(affine=False, track_running_stats=False), "replicating")


def test_a_deepcopied_model_is_no_longer_tied_to_the_first():
    model = nn.Sequential(nn.LazyLinear(3))
    twin = copy.deepcopy(model)
    model(torch.ones(2, 5))
    assert is_lazy(twin[0].weight)


def test_every_line_of_the_table_is_taken_back():
    from devconv.lazy.patches import lazy_patches

    def held():
        return [vars(patch.target).get(patch.name) for patch in lazy_patches()]

    with devconv.registry_conversion(False):
        during = held()
        with flag_on():
            pass
        assert all(now is before for now, before in zip(held(), during, strict=True))
