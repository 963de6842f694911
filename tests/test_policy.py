"""The policy table, against an independent reading of it."""

from __future__ import annotations

import itertools

import pytest

from devconv import Route
from devconv.policy import choose

NAMES = ("settled", "lazy", "buffer", "wrapper", "held", "swap_flag", "overwrite_flag", "live_graph", "set_data_works")
CASES = [
    dict(zip((*NAMES, "in_place"), (*values, in_place), strict=True))
    for values in itertools.product((False, True), repeat=len(NAMES))
    for in_place in (None, True, False)
]


def _where(**wanted: object) -> list[dict[str, bool | None]]:
    return [case for case in CASES if all(case[name] == value for name, value in wanted.items())]


ORDINARY = {"settled": False, "lazy": False, "buffer": False, "wrapper": False}


@pytest.mark.parametrize(
    ("cases", "route"),
    [
        pytest.param(_where(settled=True), Route.KEEP, id="nothing-to-do"),
        pytest.param(_where(settled=False, lazy=True), Route.RETARGET, id="lazy"),
        pytest.param(_where(settled=False, lazy=False, buffer=True), Route.OVERWRITE, id="buffer"),
        pytest.param(
            _where(settled=False, lazy=False, buffer=False, wrapper=True, held=True), Route.REFUSE, id="held-wrapper"
        ),
        pytest.param(
            _where(settled=False, lazy=False, buffer=False, wrapper=True, held=False), Route.FULL_SWAP, id="wrapper"
        ),
        pytest.param(_where(**ORDINARY, swap_flag=True), Route.SWAP, id="swap-flag"),
        pytest.param(_where(**ORDINARY, swap_flag=False, overwrite_flag=True), Route.OVERWRITE, id="overwrite-flag"),
        pytest.param(
            _where(**ORDINARY, swap_flag=False, overwrite_flag=False, live_graph=True), Route.SWAP, id="live-graph"
        ),
        pytest.param(
            _where(**ORDINARY, swap_flag=False, overwrite_flag=False, live_graph=False, in_place=False),
            Route.SWAP,
            id="not-in-place",
        ),
        *(
            pytest.param(
                _where(
                    **ORDINARY,
                    swap_flag=False,
                    overwrite_flag=False,
                    live_graph=False,
                    in_place=in_place,
                    set_data_works=works,
                ),
                Route.SET_DATA if works else Route.SWAP,
                id=f"in-place-{in_place}-works-{works}",
            )
            for in_place in (None, True)
            for works in (False, True)
        ),
    ],
)
def test_the_first_rule_that_matches_wins(cases, route):
    assert cases
    assert {choose(**case) for case in cases} == {route}
