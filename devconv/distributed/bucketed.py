"""Gradients averaged by torch's own reducer, that of DistributedDataParallel, where they are.

DistributedDataParallel is given a view of the replicated module: the same sub-modules under the same names, without
those that others manage. So its reducer sees what it always sees (sparse embeddings, SyncBatchNorm, full names in its
messages), while the module itself stays the outermost one.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from devconv import torch_internals as internals
from devconv.errors import RankLostError, UnusedParametersError

from .agreement import answered
from .collecting import Managed
from .groups import Group, size_of
from .reducing import Flight, Options

__all__ = ["BucketedReducer"]


class BucketedReducer:
    """torch's reducer for one module.

    Making it broadcasts parameters and buffers from rank 0.
    """

    def __init__(self, module: nn.Module, managed: Managed, group: Group, options: Options, flight: Flight) -> None:
        self._link = _Link(group, flight)
        self._flight = flight
        self._names = [name for name, parameter in managed.parameters.items() if parameter.requires_grad]
        with answered("the broadcast of parameters and buffers from rank 0", self._link.rank, self._link.size):
            self._ddp = DistributedDataParallel(
                _View(module, managed),
                process_group=group,
                find_unused_parameters=options.find_unused_parameters,
                bucket_cap_mb=options.bucket_cap_mb,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
            )
        # The argument of this name is deprecated in torch 2.13, the attribute is not.
        self._ddp.broadcast_buffers = options.broadcast_buffers
        # The state must not lead to the reducer: the reference would close a circle through C++, where no collector
        # looks.
        self._ddp.register_comm_hook(self._link, _average)

    def before(self) -> None:
        with answered("preparing a forward pass", self._link.rank, self._link.size), self._naming_unused():
            internals.before_forward(self._ddp)

    def after(self, output: Any) -> Any:
        with self._naming_unused():
            output = internals.after_forward(self._ddp, output)
        self._flight.start(output)
        return output

    def hold(self) -> None:
        # Nothing to tell: torch's reducer averages only what follows its own two calls.
        return

    @contextmanager
    def _naming_unused(self) -> Iterator[None]:
        """Give the parameters that the last backward pass did not reach their names; torch says their numbers."""
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith("Expected to have finished reduction"):
                raise
            numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            unused = [self._names[int(number)] for number in numbers[1].split()] if numbers else []
            raise UnusedParametersError(unused) from error

    def close(self) -> None:
        # The C++ reducer removes its hooks from autograd when it goes; the Python object may live on in a circle.
        del self._ddp.reducer, self._ddp.logger


class _View(nn.Module):
    """A module without the sub-modules that others manage, as DistributedDataParallel looks at it."""

    def __init__(self, module: nn.Module, managed: Managed) -> None:
        super().__init__()
        # Weakly: the module holds the reducer, and is to go when its last user lets go of it.
        self._seen = weakref.ref(module)
        self._managed = managed
        # torch looks for a parameter of the outermost module both with and without the dot.
        internals.leave_to_others(self, [*managed.shared, *(f".{name}" for name in managed.shared)])

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The kept modules, each once. Everything else that ``nn.Module`` lists is derived from this."""
        module = self._seen()
        assert module is not None
        for name, kept in self._managed.walk(module):
            yield ".".join(part for part in (prefix, name) if part), kept


class _Link:
    """What the hook of a reducer needs to know."""

    def __init__(self, group: Group, flight: Flight) -> None:
        self.group, self.flight = group, flight
        self.rank, self.size = size_of(group)


# DistributedDataParallel compares these annotations as objects, so they are set below and not written here as text.
def _average(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Average one bucket. What torch does by itself, with an error that says what has happened."""
    link: _Link = state
    link.flight.land()
    gradients: Tensor = bucket.buffer()
    gradients.div_(link.size)
    with answered("averaging gradients", link.rank, link.size):
        work = dist.all_reduce(gradients, group=link.group, async_op=True)

    def result(future: torch.futures.Future[Any]) -> Tensor:
        try:
            reduced: Tensor = future.value()[0]
        except RuntimeError as error:
            raise RankLostError("averaging gradients", link.rank, link.size, error) from error
        return reduced

    return work.get_future().then(result)


_average.__annotations__ = {
    "state": object,
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[Tensor],
}
