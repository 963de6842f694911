"""Tensors on one storage: their places, and the record for devices that cannot tell them."""

from __future__ import annotations

import pytest
import torch

from devconv.geometry import Geometry, geometry_of, recall, record, scatter, span_of


def test_the_span_covers_every_member():
    base = torch.arange(12.0)

    first, length = span_of([geometry_of(base[2:5]), geometry_of(base[4:12].view(2, 4).t())])

    assert (first, length) == (2, 10)


def test_an_empty_member_takes_no_room():
    assert span_of([Geometry((0, 3), (3, 1), 5)]) == (5, 0)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t[2:6], id="slice"),
        pytest.param(lambda t: t[:6].view(2, 3).t(), id="transposed"),
        pytest.param(lambda t: t[::3], id="strided"),
        pytest.param(lambda t: t[3:4].expand(4), id="expanded"),
        pytest.param(lambda t: t[5], id="scalar"),
    ],
)
def test_values_come_back_to_their_place(view):
    base = torch.arange(12.0)
    member = view(base)
    place = geometry_of(member)
    first, length = span_of([place])
    flat = torch.zeros(length)

    scatter(flat, member.clone(), place, first)

    assert torch.equal(flat.as_strided(place.size, place.stride, place.offset - first), member)


def test_a_record_is_believed_as_long_as_the_storage_lives():
    base = torch.arange(6.0)
    members = [base[1:3], base[2:]]
    places = [geometry_of(member) for member in members]
    record(members, places)

    assert recall(members) == places


def test_a_record_does_not_speak_for_another_tensor():
    base = torch.arange(6.0)
    record([base[1:3]], [Geometry((2,), (1,), 1)])

    assert recall([base[1:3], base[2:]]) is None


def test_tensors_that_cover_the_whole_storage_need_no_record():
    base = torch.arange(6.0)

    assert recall([base, base.detach()]) == [Geometry((6,), (1,), 0)] * 2
