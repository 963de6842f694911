"""What the lazy classes of this package share.

A class of torch's becomes lazy in three steps: its own constructor runs with placeholder sizes on meta, every parameter
gives way to a lazy one, and the first input gives the sizes. The shapes then come from the torch class itself, made
once more on meta with the real sizes, so that its checks and its layout of parameters are the ones that count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from devconv import torch_internals as internals

from .blank import Blank
from .pending import make_lazy

__all__ = ["ShapedByInput"]


class ShapedByInput(LazyModuleMixin):
    """Base of a lazy class: ``class LazyThing(ShapedByInput, Thing)``, with ``cls_to_become = Thing``."""

    size_names: ClassVar[tuple[str, ...]]
    """Attributes that the first input determines."""

    def begin(self, *args: Any, device: Any, dtype: Any, **kwargs: Any) -> None:
        """Construct the torch class with placeholder sizes, then make every parameter lazy."""
        with Blank():
            super().__init__(*args, device="meta", **kwargs)  # type: ignore[misc]
        parameters = internals.parameters_of(self)  # type: ignore[arg-type]
        for key, parameter in list(parameters.items()):
            if parameter is not None:
                setattr(self, key, make_lazy(UninitializedParameter, parameter.requires_grad, device, dtype))

    def with_sizes(self, **sizes: Any) -> nn.Module:
        """The torch class on meta, as this module is configured, with real sizes."""
        raise NotImplementedError

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        """Values for `size_names` as far as the tensors that have a shape determine them."""
        raise NotImplementedError

    def take_shapes(self, **sizes: Any) -> None:
        """Give every lazy parameter its shape and initial values."""
        with Blank():
            model = self.with_sizes(**sizes)
        for name in self.size_names:
            setattr(self, name, getattr(model, name))
        shapes = {key: None if held is None else held.shape for key, held in internals.parameters_of(model).items()}
        waiting = [key for key, held in internals.parameters_of(self).items() if held is not None and is_lazy(held)]  # type: ignore[arg-type]
        if waiting:
            with torch.no_grad():
                for key in waiting:
                    getattr(self, key).materialize(shapes[key])
                self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values, unless there is nothing to draw them into yet."""
        if not self.has_uninitialized_params():  # type: ignore[misc]
            super().reset_parameters()  # type: ignore[misc]
