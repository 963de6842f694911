"""What of torch's lazy modules is replaced while the flag is on. `devconv.hook` installs and removes the lines."""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from devconv import torch_internals as internals
from devconv.patches import Patch

from . import copying, doors, exporting, first_call, loading, refusing

__all__ = ["lazy_patches"]


@cache
def lazy_patches() -> tuple[Patch, ...]:
    """The lines of the table, made once."""
    return (
        Patch(LazyModuleMixin, "__call__", first_call.guard_call),
        Patch(LazyModuleMixin, "__init__", first_call.keep_subclasses),
        Patch(LazyModuleMixin, internals.INFER, first_call.guard_inference),
        Patch(LazyModuleMixin, internals.REPLICATE, first_call.refuse_replicas),
        Patch(nn.Module, internals.LOAD, loading.load_one_module),
        Patch(nn.Module, "load_state_dict", loading.load_whole_model),
        Patch(internals.LAZY_MIXIN, "__torch_function__", doors.stay_lazy),
        Patch(internals.LAZY_MIXIN, "__reduce_ex__", copying.keep_target),
        *(Patch(cls, "__deepcopy__", copying.carry_attributes) for cls in _LAZY_TENSORS),
        *(Patch(cls, "__new__", copying.place_where_loaded) for cls in _LAZY_TENSORS),
        Patch(*internals.safe_globals_of_user(), copying.allow_lazy_classes),
        Patch(torch.export, "export", exporting.materialize_first),
        *(Patch(cls, "__init__", refusing.refuse_parameters) for cls in _optimizers_that_look()),
        Patch(AveragedModel, "update_parameters", refusing.catch_up),
        Patch(*internals.functional_swap(), refusing.refuse_functional_call),
        Patch(DistributedDataParallel, "__init__", refusing.refuse_module("DistributedDataParallel")),
        *_reparametrizations(),
    )


_LAZY_TENSORS = (UninitializedParameter, UninitializedBuffer)


def _optimizers_that_look() -> list[type]:
    """Optimizers whose constructors read shapes. Every other one of torch's trains what lazy parameters become."""
    return [getattr(torch.optim, name) for name in ("Adagrad", "Muon") if hasattr(torch.optim, name)]


def _reparametrizations() -> list[Patch]:
    # The modules are hidden behind functions of the same names.
    old_weight_norm, old_spectral_norm = (
        sys.modules[f"torch.nn.utils.{name}"] for name in ("weight_norm", "spectral_norm")
    )
    return [
        Patch(old_weight_norm.WeightNorm, "apply", refusing.refuse_tensor("weight_norm")),
        Patch(old_spectral_norm.SpectralNorm, "apply", refusing.refuse_tensor("spectral_norm")),
        Patch(prune.BasePruningMethod, "apply", refusing.refuse_tensor("pruning")),
        Patch(parametrize.ParametrizationList, "__init__", refusing.refuse_original),
        *(
            Patch(parametrizations, name, refusing.refuse_tensor(name, "weight"))
            for name in ("weight_norm", "spectral_norm", "orthogonal")
        ),
    ]
