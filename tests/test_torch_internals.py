"""Each private name of torch that the core leans on: the first test to fail when torch changes it."""

from __future__ import annotations

import copy
import weakref
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from devconv import torch_internals as internals


def test_a_swap_exchanges_what_autograd_knows_and_leaves_what_python_knows():
    parameter, other = nn.Parameter(torch.ones(2)), torch.zeros(3, dtype=torch.float64)
    parameter.label = "kept"
    seen = weakref.ref(parameter)

    internals.swap_impl(parameter, other)

    assert (parameter.dtype, parameter.shape, parameter.requires_grad) == (torch.float64, (3,), False)
    assert (other.dtype, other.shape, other.requires_grad) == (torch.float32, (2,), True)
    assert type(parameter) is nn.Parameter
    assert parameter.label == "kept"
    assert seen() is parameter


def test_the_impl_tells_whether_a_swap_has_happened():
    a, b = torch.ones(1), torch.ones(1)
    before = internals.impl_of(a), internals.impl_of(b)

    internals.swap_impl(a, b)

    assert (internals.impl_of(b), internals.impl_of(a)) == before


@pytest.mark.parametrize(("hold", "count"), [(lambda p: None, 1), (lambda p: p.sum(), 2), (lambda p: (p * p).sum(), 4)])
def test_the_use_count_shows_what_a_graph_holds(hold, count):
    parameter = nn.Parameter(torch.ones(2))

    held = hold(parameter)

    assert internals.use_count(parameter) == count
    del held


def test_a_live_graph_has_a_node_that_accumulates_the_gradient():
    parameter = nn.Parameter(torch.ones(2))
    assert not internals.has_accumulator(parameter)

    loss = parameter.sum()

    assert internals.has_accumulator(parameter)
    del loss
    assert not internals.has_accumulator(parameter)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_aliases_have_one_storage(device):
    whole = torch.empty(6, device=device)

    first, second, other = map(internals.storage_of, [whole[2:], whole.view(2, 3), torch.empty(6, device=device)])

    assert first == second != other


def test_a_sparse_tensor_has_no_storage():
    with pytest.raises((NotImplementedError, RuntimeError)):
        internals.storage_of(torch.eye(2).to_sparse())


def test_hooks_registered_before_and_after_a_swap_fire_once_they_are_linked_again():
    fired: list[str] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda _: fired.append("old hook"))
    parameter.register_post_accumulate_grad_hook(lambda _: fired.append("old post hook"))
    internals.swap_impl(parameter, torch.ones(2, dtype=torch.float64).requires_grad_())

    internals.set_backward_hooks(parameter, internals.backward_hooks(parameter))
    internals.set_accumulate_hooks(parameter, internals.accumulate_hooks(parameter))
    parameter.register_hook(lambda _: fired.append("new hook"))
    parameter.sum().backward()

    assert fired == ["old hook", "new hook", "old post hook"]


def test_without_linking_them_again_no_hook_fires():
    fired: list[str] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda _: fired.append("hook"))

    internals.swap_impl(parameter, torch.ones(2, dtype=torch.float64).requires_grad_())
    parameter.sum().backward()

    assert fired == []


@pytest.mark.parametrize(
    "door", [name for name in internals.DOORS if name != "share_memory" and hasattr(nn.Module, name)]
)
def test_every_door_hands_over_a_function_with_one_known_code_object(door):
    arguments = {"to": ("meta",), "to_empty": (), "type": (torch.float64,)}.get(door, ())
    keywords = {"device": "meta"} if door == "to_empty" else {}
    handed: list[object] = []

    class Catcher(nn.Module):
        def _apply(self, fn, recurse=True):
            handed.append(fn)
            return self

    getattr(Catcher(), door)(*arguments, **keywords)

    assert internals.door_codes()[handed[0].__code__] == door


def test_torch_s_own_parser_reads_every_form_of_to():
    assert internals.parse_to("meta", torch.float64)[:2] == (torch.device("meta"), torch.float64)
    assert internals.parse_to(torch.ones(1, dtype=torch.float16))[:2] == (torch.device("cpu"), torch.float16)
    assert internals.parse_to(memory_format=torch.channels_last)[3] is torch.channels_last


def test_an_rnn_brings_its_own_apply_and_a_linear_layer_does_not():
    assert internals.class_overrides_apply(nn.LSTM)
    assert not internals.class_overrides_apply(nn.Linear)


def test_the_tables_are_the_module_s_own():
    layer = nn.BatchNorm1d(2)
    replacement = nn.Parameter(torch.zeros(2))

    internals.parameters_of(layer)["weight"] = replacement

    assert layer.weight is replacement
    assert set(internals.buffers_of(layer)) == {"running_mean", "running_var", "num_batches_tracked"}
    assert internals.children_of(nn.Sequential(layer)) == {"0": layer}


class _Quantised(nn.Parameter):
    def to(self, *args, **kwargs):
        return self


class _Answering(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class _Labelled(nn.Parameter):
    __slots__ = ("label",)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [(Tensor, False), (nn.Parameter, False), (_Labelled, False), (_Quantised, True), (_Answering, True)],
)
def test_classes_with_their_own_idea_of_a_conversion_are_told_apart(cls, expected):
    assert internals.converts_itself(cls) is expected


def test_lazy_classes_are_told_without_an_instance():
    assert internals.is_lazy_class(nn.UninitializedParameter)
    assert internals.is_lazy_class(nn.UninitializedBuffer)
    assert not internals.is_lazy_class(nn.Parameter)


def test_a_tensor_of_a_class_can_be_made_without_its_constructor():
    class Strict(nn.Parameter):
        def __new__(cls, data, required):
            return super().__new__(cls, data)

    old = Strict(torch.ones(2), 1)

    new = internals.make_like(old, torch.zeros(2, dtype=torch.float64))

    assert type(new) is Strict
    assert new.requires_grad
    assert new.dtype is torch.float64


def test_slot_names_are_those_of_all_bases():
    assert "label" in internals.slot_names(_Labelled)


def test_fused_kernels_exist_on_the_cpu_and_not_on_meta():
    assert "cpu" in internals.fused_device_types()
    assert "meta" not in internals.fused_device_types()


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(lambda layer: torch.nn.utils.weight_norm(layer), id="weight_norm"),
        pytest.param(lambda layer: torch.nn.utils.spectral_norm(layer), id="spectral_norm"),
        pytest.param(lambda layer: prune.l1_unstructured(layer, "weight", 1), id="prune"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_pre_hook_derives_can_be_derived_afresh(norm):
    layer = norm(nn.Linear(3, 3))
    layer.eval()(torch.ones(1, 3))

    [(name, derive)] = internals.derivations_of(layer)

    assert name == "weight"
    torch.testing.assert_close(derive(), layer.weight)


def test_an_ordinary_module_derives_nothing():
    assert list(internals.derivations_of(nn.Linear(2, 2))) == []


def test_a_view_held_elsewhere_is_found_and_one_of_the_model_is_not():
    parameter, quiet = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    with torch.no_grad():
        outside, inside = parameter[1:], quiet[1:]

    held, reduced = internals.outside_holders(
        {id(parameter): parameter, id(quiet): quiet}, {id(parameter), id(quiet), id(inside)}
    )

    assert held == {id(parameter): outside.shape}
    assert reduced == set()
    assert internals.views_of([inside]) == {id(quiet)}


def test_fake_tensors_are_told_from_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(1)

        assert internals.fake_mode_is_active()

    assert not internals.fake_mode_is_active()
    assert internals.is_fake(fake)
    assert not internals.is_fake(torch.ones(1))


def test_stock_torch_s_functions_were_taken_before_any_patch():
    assert internals.stock_apply is nn.Module._apply
    assert internals.stock_to is nn.Module.to
    assert copy.copy(internals.APPLY) == internals.stock_apply.__name__


@pytest.fixture
def alone():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield dist
    dist.destroy_process_group()


def test_a_data_parallel_module_can_be_driven_around_a_forward_pass_that_is_not_its_own(alone):
    layer = nn.Linear(2, 1)
    ddp = nn.parallel.DistributedDataParallel(layer)
    averaged = []
    ddp.register_comm_hook(averaged, _record_bucket)

    internals.before_forward(ddp)
    output = internals.after_forward(ddp, layer(torch.ones(1, 2)))
    output.sum().backward()

    assert averaged == [3]
    assert layer.weight.grad.tolist() == [[1, 1]]


def _record_bucket(state, bucket):
    state.append(bucket.buffer().numel())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_data_parallel_module_leaves_named_parameters_to_others(alone):
    layer = nn.Linear(2, 1)
    internals.leave_to_others(layer, ["bias", ".bias"])
    ddp = nn.parallel.DistributedDataParallel(layer)
    averaged = []
    ddp.register_comm_hook(averaged, _record_bucket)

    ddp(torch.ones(1, 2)).sum().backward()

    assert averaged == [2]


def test_the_end_of_a_backward_pass_can_be_waited_for():
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    order = []
    for name, tensor in (("first", first), ("second", second)):
        tensor.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    second.register_post_accumulate_grad_hook(lambda _: internals.call_after_backward(lambda: order.append("end")))

    (second * first).sum().backward()

    assert sorted(order[:2]) == ["first", "second"]
    assert order[2:] == ["end"]


def test_torchs_composable_apis_are_seen(alone):
    from torch.distributed._composable.replicate import replicate

    layer = nn.Linear(1, 1)
    assert internals.composable_apis(layer) == []
    replicate(layer)
    assert internals.composable_apis(layer) == ["replicate"]


def test_a_groups_timeout_can_be_read(alone):
    assert internals.timeout_of(None) == timedelta(seconds=7)
    assert internals.timeout_of(alone.group.WORLD) == timedelta(seconds=7)


def test_a_function_can_be_kept_from_the_compiler():
    seen = []

    @internals.without_compiler
    def look():
        seen.append(torch.compiler.is_compiling())

    def function(tensor):
        look()
        return tensor + 1

    torch.compile(function, backend="eager")(torch.ones(1))

    assert seen == [False]


def test_the_impls_of_a_list_are_those_of_its_tensors():
    tensors = [torch.ones(1), torch.zeros(2)]
    assert internals.impls_of(tensors) == [internals.impl_of(tensor) for tensor in tensors]


def test_a_thread_knows_that_it_is_in_a_backward_pass():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(internals.in_backward()))

    x.sum().backward()

    assert seen == [True]
    assert not internals.in_backward()


def test_hooks_of_either_kind_are_seen_in_a_list():
    bare, backward, accumulate = (torch.ones(1, requires_grad=True) for _ in range(3))
    backward.register_hook(lambda _: None)
    accumulate.register_post_accumulate_grad_hook(lambda _: None)

    assert internals.with_hooks([bare, backward, accumulate]) == [backward, accumulate]


def test_a_modules_tables_are_in_its_dict():
    layer = nn.BatchNorm1d(2)

    found = internals.tables_and_hooks(layer.__dict__)

    assert all(one is other for one, other in zip(found, internals.tables_by_attribute(layer), strict=True))
    assert found[0] is internals.parameters_of(layer)


def test_taking_accumulation_hooks_away_takes_them_from_autograd_too():
    fired = []
    parameter = nn.Parameter(torch.ones(1))
    internals.set_accumulate_hooks(parameter, {0: fired.append})

    internals.set_accumulate_hooks(parameter, None)
    parameter.sum().backward()

    assert fired == []
    assert internals.accumulate_hooks(parameter) is None
