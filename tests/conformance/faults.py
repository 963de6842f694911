"""One fault for each check of the kit: the device of a vendor who got exactly one thing wrong.

Most are faults of a backend: one method or one capability that lies. What a backend alone cannot cause (a parameter
replaced after the move, a hook lost) is done to the model right after the conversion, whichever door it went through.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import devconv
from devconv.conformance import Lane

SECOND = "acme" if find_spec("torch_acme") else "xla"
"""For checks that need two devices, which the stand-in is not."""

Plant = Callable[[Lane, pytest.MonkeyPatch, Path], Any]


@dataclass(frozen=True)
class Fault:
    """How to break a device.

    Attributes:
        plant: breaks it, and may return another lane to examine.
        device_type: where the fault shows: the stand-in, unless it lacks what the check needs.
    """

    plant: Plant
    device_type: str = "lazy"


# ---- faults of a backend ---------------------------------------------------------------------------------------------


def attribute(name: str, value: Any) -> Fault:
    """The backend says `value`."""
    return Fault(lambda lane, patch, tmp: patch.setattr(lane.backend, name, value, raising=False))


def says(**capabilities: Any) -> Fault:
    """The backend's capabilities lie."""
    return Fault(
        lambda lane, patch, tmp: patch.setattr(
            lane.backend, "capabilities", replace(lane.backend.capabilities, **capabilities)
        )
    )


def method(name: str, broken: Callable[..., Callable[..., Any]], device_type: str = "lazy") -> Fault:
    """`broken` gets the real method and returns the one that takes its place."""
    return Fault(
        lambda lane, patch, tmp: patch.setattr(lane.backend, name, broken(getattr(lane.backend, name)), raising=False),
        device_type,
    )


def results(name: str, spoil: Callable[[list[Tensor]], Any], device_type: str = "lazy") -> Fault:
    """What a transfer returns is spoilt."""
    return method(name, lambda real: lambda *args, **kwargs: spoil(real(*args, **kwargs)), device_type)


def without(name: str, argument: str) -> Fault:
    """A transfer ignores one of its arguments."""
    return method(
        name, lambda real: lambda *args, **kwargs: real(*args, **{k: v for k, v in kwargs.items() if k != argument})
    )


def louder(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor + 1 if tensor.is_floating_point() else tensor for tensor in tensors]


def requiring_grad(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]


def first_first(real: Callable[..., Any]) -> Callable[..., Any]:
    """Fails on an empty batch, as code that looks at its first tensor does."""
    return lambda tensors, *args, **kwargs: real([tensors[0], *tensors[1:]], *args, **kwargs)


def remembering(real: Callable[..., Any]) -> Callable[..., Any]:
    sent: dict[int, Tensor] = {}

    def send(tensors: list[Tensor], device: Any, **kwargs: Any) -> list[Tensor]:
        return [
            sent.setdefault(tensor.data_ptr(), there)
            for tensor, there in zip(tensors, real(tensors, device, **kwargs), strict=True)
        ]

    return send


def one_drawer(real: Callable[..., Any]) -> Callable[..., Any]:
    """All threads put their batch into one place."""
    drawer: dict[str, Any] = {}

    def send(tensors: Any, device: Any, **kwargs: Any) -> Any:
        drawer["batch"] = tensors
        time.sleep(0.01)
        return real(drawer["batch"], device, **kwargs)

    return send


def too_late(real: Callable[..., Any]) -> Callable[..., Any]:
    """Reads the sources of a non-blocking batch when they are gone."""

    def send(tensors: Any, device: Any, *, non_blocking: bool = False, **kwargs: Any) -> Any:
        there = real(tensors, device, **kwargs)
        return [torch.zeros_like(tensor) for tensor in there] if non_blocking else there

    return send


def sticky(real: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[int] = []

    def send(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("still busy with the last batch")
        return real(*args, **kwargs)

    return send


def by_device(real: Callable[..., Any]) -> Callable[..., Any]:
    """Groups a mixed batch by device, and forgets to put the results back in order."""
    return lambda tensors, **kwargs: real(sorted(tensors, key=lambda tensor: str(tensor.device)), **kwargs)


def staying(real: Callable[..., Any]) -> Callable[..., Any]:
    """Copies to where the first tensor is."""
    return lambda tensors, device, **kwargs: real(tensors, tensors[0].device if tensors else device, **kwargs)


def first_term_only(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda terms, device: real([group[:1] for group in terms], device)


def drawing(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        torch.rand(1, device="lazy").cpu()
        return real(*args, **kwargs)

    return call


def several(count: int, current: int) -> Fault:
    def plant(lane: Lane, patch: pytest.MonkeyPatch, tmp: Path) -> None:
        patch.setattr(lane.backend, "device_count", lambda: count)
        patch.setattr(lane.backend, "current_index", lambda: current)

    return Fault(plant)


def another_device(lane: Lane, patch: pytest.MonkeyPatch, tmp: Path) -> Lane:
    """A backend for a type whose name torch cannot read."""
    patch.setattr(devconv.registry, "_registered", dict(devconv.registry._registered))
    devconv.register(type("Nameless", (devconv.Backend,), {"device_type": "nameless"}))
    return Lane("nameless")


class Lying(devconv.Capabilities):
    def holds(self, dtype: torch.dtype) -> bool:
        return True


def lying(lane: Lane, patch: pytest.MonkeyPatch, tmp: Path) -> None:
    patch.setattr(lane.backend, "capabilities", Lying(unsupported_dtypes=frozenset({torch.float64}), strides=False))


# ---- faults of a device ----------------------------------------------------------------------------------------------


def patched(target: Any, name: str, broken: Callable[..., Callable[..., Any]], device_type: str = "lazy") -> Fault:
    return Fault(lambda lane, patch, tmp: patch.setattr(target, name, broken(getattr(target, name))), device_type)


def views_are_copies(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, index: real(tensor, index).clone() if tensor.device.type == "lazy" else real(tensor, index)


def aborting_at_exit(lane: Lane, patch: pytest.MonkeyPatch, tmp: Path) -> None:
    (tmp / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp), os.environ.get("PYTHONPATH", "")]))


# ---- faults of a conversion ------------------------------------------------------------------------------------------


def after(spoil: Callable[[nn.Module], Any], device_type: str = "lazy") -> Fault:
    """Every conversion, through either door, is followed by `spoil`."""
    return _doors(lambda convert, module, optimizers: (convert(), spoil(module))[0], device_type)


def after_with(spoil: Callable[[torch.optim.Optimizer], Any]) -> Fault:
    """Every conversion that is given an optimizer is followed by `spoil`."""
    return _doors(lambda convert, module, optimizers: (convert(), [spoil(each) for each in optimizers])[0])


def before(spoil: Callable[[nn.Module], Any]) -> Fault:
    return _doors(lambda convert, module, optimizers: (spoil(module), convert())[1])


def on_failure(spoil: Callable[[nn.Module], Any]) -> Fault:
    def through(convert: Callable[[], Any], module: nn.Module, optimizers: Any) -> Any:
        try:
            return convert()
        except BaseException:
            spoil(module)
            raise

    return _doors(through)


def instead_of(error: type[Exception], other: type[Exception] | None) -> Fault:
    def through(convert: Callable[[], Any], module: nn.Module, optimizers: Any) -> Any:
        try:
            return convert()
        except error as seen:
            if other is not None:
                raise other(str(seen)) from seen
            return None

    return _doors(through)


def _doors(through: Callable[..., Any], device_type: str = "lazy") -> Fault:
    def plant(lane: Lane, patch: pytest.MonkeyPatch, tmp: Path) -> None:
        real_convert, real_to = devconv.convert, nn.Module.to
        inside = threading.local()

        def once(call: Callable[[], Any], module: nn.Module, optimizers: Any) -> Any:
            if getattr(inside, "yes", False):
                return call()
            inside.yes = True
            try:
                return through(call, module, optimizers)
            finally:
                inside.yes = False

        def convert(module: nn.Module, *args: Any, optimizers: Any = None, **kwargs: Any) -> Any:
            return once(lambda: real_convert(module, *args, optimizers=optimizers, **kwargs), module, optimizers or ())

        def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return once(lambda: real_to(module, *args, **kwargs), module, ())

        patch.setattr(devconv, "convert", convert)
        patch.setattr(nn.Module, "to", to)

    return Fault(plant, device_type)


def each_parameter(change: Callable[[nn.Module, str, nn.Parameter], Any]) -> Callable[[nn.Module], None]:
    def spoil(model: nn.Module) -> None:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    change(module, name, parameter)

    return spoil


def fresh(parameter: nn.Parameter) -> nn.Parameter:
    if nn.parameter.is_lazy(parameter):
        return type(parameter)(device=parameter.device)
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


replaced = each_parameter(lambda module, name, parameter: module._parameters.update({name: fresh(parameter)}))
"""Every parameter is another object, with the same numbers: also under each name of a shared one."""


def copied_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.clone()


def forgotten_table(model: nn.Module) -> None:
    if hasattr(model, "table"):
        model.table = torch.zeros(4, dtype=torch.float16)


def last_child_first(model: nn.Module) -> None:
    name = next(iter(model._modules))
    model._modules[name] = model._modules.pop(name)


def twice(model: nn.Module) -> None:
    """Hooks are registered once more, out of reach of their handles."""
    for parameter in model.parameters():
        for hook in list((parameter._backward_hooks or {}).values()):
            parameter.register_hook(hook)


def state(change: Callable[[dict[str, Any]], Any]) -> Callable[[torch.optim.Optimizer], None]:
    def spoil(optimizer: torch.optim.Optimizer) -> None:
        for entry in optimizer.state.values():
            change(entry)

    return spoil


def left_on_the_host(entry: dict[str, Any]) -> None:
    for key, value in entry.items():
        if isinstance(value, Tensor):
            entry[key] = value.cpu()
        elif isinstance(value, list):
            entry[key] = [inner.cpu() if isinstance(inner, Tensor) else inner for inner in value]


def taken_back(model: nn.Module) -> None:
    devconv.convert(model, "cpu", torch.float16)


def materialised(model: nn.Module) -> None:
    for parameter in model.parameters():
        if nn.parameter.is_lazy(parameter):
            parameter.materialize((4, 4))


def untied(model: nn.Module) -> None:
    if hasattr(model, "decoder"):
        model.decoder.weight = fresh(model.decoder.weight)


FAULTS: dict[str, Fault] = {
    "registry.backend_loads": attribute("device_type", "other"),
    "registry.torch_knows_the_device_type": Fault(another_device),
    "registry.count_and_current_index_agree": attribute("current_index", lambda: 5),
    "registry.resolve_gives_the_device_that_tensors_report": attribute("resolve", lambda device: torch.device("lazy")),
    "registry.a_device_without_index_is_the_one_that_torch_takes": several(2, 1),
    "registry.resolving_twice_changes_nothing": attribute(
        "resolve", lambda device: torch.device("lazy", 0 if device.index is None else device.index + 1)
    ),
    "registry.an_index_that_does_not_exist_is_refused": attribute("resolve", lambda device: torch.device("lazy", 0)),
    "registry.preparing_again_changes_nothing": method("prepare", drawing),
    "registry.the_word_about_in_place_is_true": attribute("in_place", True),
    "registry.the_dtypes_that_are_claimed_are_held": results(
        "send", lambda there: [tensor.float() if tensor.dtype is torch.float64 else tensor for tensor in there]
    ),
    "registry.the_dtypes_that_are_denied_are_missing": says(unsupported_dtypes=frozenset({torch.float64})),
    "registry.no_ability_is_denied": says(autograd=False),
    "registry.a_view_follows_its_base": patched(Tensor, "__getitem__", views_are_copies),
    "registry.backward_runs": patched(Tensor, "backward", lambda real: lambda tensor, *args, **kwargs: None),
    "registry.free_memory_is_a_number_of_bytes_or_none": attribute("free_memory", lambda device: 1.5e9),
    "registry.synchronize_takes_one_device_and_all": attribute("synchronize", lambda device=None: device.index),
    "registry.two_threads_may_use_the_backend_at_once": method("send", one_drawer),
    "registry.a_program_that_used_the_device_ends_cleanly": Fault(aborting_at_exit, "cpu"),
    "moves.send_keeps_numbers_and_order": results("send", lambda there: there[::-1]),
    "moves.send_lands_on_the_device_asked_for": results("send", lambda there: [tensor.cpu() for tensor in there]),
    "moves.send_casts_as_asked": without("send", "dtypes"),
    "moves.send_makes_copies": method("send", remembering),
    "moves.send_and_fetch_carry_no_graph": results("send", requiring_grad),
    "moves.an_empty_batch_is_allowed": method("fetch", first_first),
    "moves.fetch_keeps_numbers_and_order": results("fetch", lambda back: back[:-1]),
    "moves.fetch_takes_several_devices_at_once": method("fetch", by_device, SECOND),
    "moves.fetch_makes_copies": method("fetch", lambda real: lambda tensors, **kwargs: [*tensors]),
    "moves.fetch_casts_as_asked": without("fetch", "dtypes"),
    "moves.copy_makes_copies": method("copy", lambda real: lambda tensors, device, **kwargs: [*tensors]),
    "moves.copy_casts_on_the_device": without("copy", "dtypes"),
    "moves.copy_reaches_the_other_device": method("copy", staying, SECOND),
    "moves.a_source_may_be_dropped_after_a_non_blocking_send": method("send", too_late),
    "moves.strides_survive": results("send", lambda there: [tensor.contiguous() for tensor in there], "cpu"),
    "moves.a_model_arrives_with_its_numbers": results("send", louder),
    "moves.nothing_is_left_behind": results("send", lambda there: [*there[:-1], there[-1].cpu()]),
    "moves.a_moved_model_computes_the_same": results("send", louder),
    "moves.a_second_move_touches_nothing": after(copied_buffers),
    "moves.a_plan_touches_nothing_and_tells_what_will_happen": patched(
        devconv, "plan", lambda real: lambda module, *args: (real(module, *args), devconv.convert(module, *args))[0]
    ),
    "moves.the_route_is_the_one_that_the_device_needs": Fault(
        lambda lane, patch, tmp: patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    ),
    "moves.nested_inputs_arrive": results("send", louder),
    "moves.a_model_spread_over_devices_comes_together": method("copy", staying, SECOND),
    "moves.a_meta_model_gets_storage": patched(torch, "empty_like", lambda real: lambda *a, **k: real(a[0], **k).cpu()),
    "identity.parameters_stay_the_same_objects": after(replaced),
    "identity.attributes_stay_on_parameters": after(each_parameter(lambda m, n, parameter: parameter.__dict__.clear())),
    "identity.subclasses_and_slots_stay": after(replaced),
    "identity.weak_references_stay_alive": after(replaced),
    "identity.requires_grad_stays": after(each_parameter(lambda m, n, parameter: parameter.requires_grad_())),
    "identity.state_dict_keeps_keys_order_and_shapes": after(last_child_first),
    "identity.non_persistent_buffers_come_along": after(forgotten_table),
    "identity.modules_stay_the_same_objects": after(lambda model: model.train()),
    "identity.a_moved_model_can_be_copied": patched(
        nn.Parameter, "__deepcopy__", lambda real: lambda parameter, memo: parameter
    ),
    "identity.a_moved_model_can_be_pickled": patched(
        nn.Parameter,
        "__reduce_ex__",
        lambda real: lambda parameter, protocol: (nn.Parameter, (torch.zeros(4, 4),)),
        "cpu",
    ),
    "identity.a_checkpoint_of_a_moved_model_loads_on_the_host": patched(
        torch,
        "load",
        lambda real: lambda *a, **k: {name: value.to("meta") for name, value in real(*a, **k).items()},
        "cpu",
    ),
    "identity.a_checkpoint_loads_into_a_moved_model": patched(
        nn.Module, "load_state_dict", lambda real: lambda module, values: real(module, values, assign=True)
    ),
    "identity.the_old_memory_is_let_go": before(
        each_parameter(lambda m, n, parameter: KEPT.append(parameter.detach()))
    ),
    "ties.a_shared_parameter_stays_one": after(replaced),
    "ties.a_shared_buffer_stays_one": after(copied_buffers),
    "ties.a_shared_parameter_trains_as_one": after(untied),
    "ties.views_of_one_storage_stay_views": after(replaced),
    "ties.a_buffer_that_views_a_buffer_follows_it": after(copied_buffers),
    "ties.ties_survive_a_round_trip": after(untied),
    "ties.views_train_as_views": after(
        each_parameter(lambda m, n, parameter: setattr(parameter, "data", parameter.detach().clone()))
    ),
    "grads.gradients_move_with_their_parameters": after(lambda model: model.zero_grad()),
    "grads.gradients_stay_the_same_objects": after(
        each_parameter(lambda m, n, parameter: setattr(parameter, "grad", torch.zeros_like(parameter)))
    ),
    "grads.no_gradient_stays_none": after(
        each_parameter(lambda m, n, parameter: setattr(parameter, "grad", torch.zeros_like(parameter)))
    ),
    "grads.a_backward_pass_after_the_move_is_right": after(
        each_parameter(lambda m, n, parameter: parameter.register_hook(lambda grad: grad * 2))
    ),
    "grads.gradients_accumulate_across_the_move": after(lambda model: model.zero_grad()),
    "grads.a_graph_recorded_before_the_move_delivers": after(replaced),
    "grads.old_and_new_graphs_add_up": after(replaced),
    "hooks.a_gradient_hook_fires_after_the_move": after(replaced),
    "hooks.a_gradient_hook_changes_the_gradient": after(replaced),
    "hooks.a_hook_after_accumulation_fires_after_the_move": after(replaced),
    "hooks.a_handle_still_removes_its_hook": after(twice),
    "hooks.a_hook_registered_after_the_move_fires": after(replaced),
    "hooks.module_hooks_fire_after_the_move": after(lambda model: model[0]._forward_hooks.clear()),
    "hooks.an_optimizer_in_the_backward_pass_works_on": after(replaced),
    "optimizers.sgd_keeps_its_momentum": after_with(state(lambda entry: entry.clear())),
    "optimizers.adam_keeps_its_moments": after_with(state(lambda entry: entry["exp_avg"].zero_())),
    "optimizers.adamw_by_foreach_goes_on": after_with(state(lambda entry: entry["exp_avg_sq"].zero_())),
    "optimizers.adagrad_keeps_its_sums": after_with(state(lambda entry: entry["sum"].zero_())),
    "optimizers.lbfgs_keeps_its_history": after_with(state(left_on_the_host)),
    "optimizers.the_optimizer_holds_the_models_parameters": after(replaced),
    "optimizers.state_is_where_its_parameter_is": after_with(state(left_on_the_host)),
    "optimizers.a_scheduler_goes_on": after_with(lambda optimizer: optimizer.param_groups[0].update(lr=0.1)),
    "optimizers.follow_brings_an_optimizer_after_the_fact": patched(
        devconv, "follow", lambda real: lambda *optimizers: [optimizer.state.clear() for optimizer in optimizers]
    ),
    "optimizers.the_optimizers_checkpoint_loads_on_the_host": after_with(state(lambda entry: entry["exp_avg"].zero_())),
    "lazy.a_lazy_parameter_stays_lazy": after(materialised),
    "lazy.a_lazy_parameter_materialises_where_it_was_moved_to": after(taken_back),
    "lazy.a_lazy_buffer_materialises_where_it_was_moved_to": after(taken_back),
    "lazy.a_shared_lazy_parameter_stays_one": after(replaced),
    "lazy.an_optimizer_built_on_lazy_parameters_trains_them": after(replaced),
    "lazy.a_lazy_layer_can_be_moved_twice": after(materialised),
    "lazy.materialize_makes_every_parameter_on_the_device": patched(
        devconv, "materialize", lambda real: lambda model, *inputs: None
    ),
    "lazy.the_same_seed_gives_the_same_model_on_every_device": results("send", louder),
    "lazy.a_checkpoint_fills_a_moved_lazy_layer": after(taken_back),
    "replication.broadcast_gives_every_device_its_own_copies": method(
        "broadcast", lambda real: lambda tensors, devices: [real(tensors, devices)[0]] * len(devices)
    ),
    "replication.accumulate_adds_up_what_several_devices_hold": method("accumulate", first_term_only),
    "replication.replicas_are_on_their_devices": patched(
        devconv, "replicate", lambda real: lambda module, devices: [module for _ in devices]
    ),
    "replication.replicas_compute_as_the_model": method(
        "broadcast", lambda real: lambda tensors, devices: [louder(row) for row in real(tensors, devices)]
    ),
    "replication.gradients_of_replicas_meet_in_the_original": patched(
        devconv, "replicate", lambda real: lambda module, devices: real(module, devices, detach=True)
    ),
    "replication.host_and_device_train_one_model": results("send", louder),
    "replication.what_the_first_replica_writes_stays": patched(
        devconv, "replicate", lambda real: lambda module, devices: real(copy.deepcopy(module), devices)
    ),
    "replication.data_parallel_trains_as_one_device": patched(
        devconv, "DataParallel", lambda real: lambda module, devices: real(copy.deepcopy(module), devices), "cpu"
    ),
    "rng.a_seed_repeats_the_device": Fault(
        lambda lane, patch, tmp: (
            says(own_rng=True).plant(lane, patch, tmp),
            patch.setattr(lane.backend, "manual_seed", lambda seed: torch.seed()),
        )[0]
    ),
    "rng.another_seed_gives_other_numbers": Fault(
        lambda lane, patch, tmp: (
            says(own_rng=True).plant(lane, patch, tmp),
            patch.setattr(lane.backend, "manual_seed", lambda seed: torch.manual_seed(0)),
        )[0]
    ),
    "rng.own_rng_is_said_only_where_it_is_so": says(own_rng=True),
    "rng.a_move_draws_no_numbers_on_the_host": method("send", drawing),
    "rng.a_move_draws_no_numbers_on_the_device": method("send", drawing),
    "failure.a_failed_transfer_leaves_everything_as_it_was": on_failure(lambda model: model.encoder.mask.add_(1)),
    "failure.an_interrupt_leaves_everything_as_it_was": on_failure(lambda model: model.encoder.mask.add_(1)),
    "failure.a_second_try_works": method("send", sticky),
    "failure.a_short_answer_is_an_error": instead_of(devconv.DevconvError, IndexError),
    "failure.what_does_not_fit_is_refused": instead_of(devconv.ConversionRefused, None),
    "failure.a_device_that_is_not_there_changes_nothing": attribute("resolve", lambda device: torch.device("lazy", 0)),
    "failure.a_dtype_that_the_device_lacks_is_refused": Fault(lying),
}
"""Check -> its fault."""

KEPT: list[Tensor] = []


@contextmanager
def planted(fault: Fault, tmp: Path) -> Iterator[Lane]:
    """The broken device."""
    lane = Lane(fault.device_type)
    assert lane.backend
    with pytest.MonkeyPatch.context() as patch:
        other = fault.plant(lane, patch, tmp)
        yield other if isinstance(other, Lane) else lane
    KEPT.clear()
