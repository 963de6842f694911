"""Seeds mean something, and moving a model draws no random numbers."""

from __future__ import annotations

import torch

from ..check import promise
from ..expecting import expect, expect_close
from ..lane import Lane, Move
from ..models import mlp


def _seed(lane: Lane, seed: int) -> None:
    torch.manual_seed(seed)
    if lane.backend.capabilities.own_rng:
        lane.backend.manual_seed(seed)


def _draw(lane: Lane) -> torch.Tensor:
    return torch.rand(16, device=lane.device).cpu()


@promise(cure="Say own_rng=True in Capabilities and implement Backend.manual_seed().", needs="values")
def a_seed_repeats_the_device(lane: Lane) -> None:
    """The same seed gives the same random numbers on the device."""
    _seed(lane, 7)
    first = _draw(lane)
    _seed(lane, 7)
    expect_close(_draw(lane), first, "random numbers after the same seed")


@promise(cure="Use the seed in Backend.manual_seed(), or in the device's generator.", needs="values")
def another_seed_gives_other_numbers(lane: Lane) -> None:
    """Different seeds give different random numbers on the device."""
    _seed(lane, 7)
    first = _draw(lane)
    _seed(lane, 8)
    expect(not torch.equal(_draw(lane), first), "seeds 7 and 8 gave the same numbers")


@promise(cure="Say own_rng=False in Capabilities where torch.manual_seed() reaches the device.", needs="values own_rng")
def own_rng_is_said_only_where_it_is_so(lane: Lane) -> None:
    """A device whose generator is its own is not seeded by ``torch.manual_seed`` already."""
    torch.manual_seed(7)
    first = _draw(lane)
    torch.manual_seed(7)
    expect(
        not torch.equal(_draw(lane), first), "own_rng is True, but torch.manual_seed alone repeats the device's numbers"
    )


@promise(cure="Draw no random numbers in Backend.load(), prepare(), send(), fetch() and copy().")
def a_move_draws_no_numbers_on_the_host(lane: Lane, move: Move) -> None:
    """The host's generator is where it was before the move."""
    model = move.place(mlp())
    torch.manual_seed(7)
    wanted = torch.rand(4)
    torch.manual_seed(7)
    move(model)
    expect_close(torch.rand(4), wanted, "the host's next random numbers")


@promise(cure="Draw no random numbers on the device in Backend.prepare(), send() and copy().", needs="values")
def a_move_draws_no_numbers_on_the_device(lane: Lane, move: Move) -> None:
    """The device's generator is where it was before the move."""
    model = move.place(mlp())
    _seed(lane, 7)
    wanted = _draw(lane)
    _seed(lane, 7)
    move(model)
    expect_close(_draw(lane), wanted, "the device's next random numbers")
