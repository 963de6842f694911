"""The checks as data: each is one promise with one cure, and the table that is read from the source is the code."""

from __future__ import annotations

import inspect

import pytest

from devconv.conformance import GROUPS, catalogue
from devconv.conformance.check import NEEDS
from devconv.conformance.performing import function_of

CHECKS = {check.id: check for check in catalogue()}


def test_every_group_has_checks_and_every_check_a_name_of_its_own():
    assert [*dict.fromkeys(check.group for check in catalogue())] == [*GROUPS]
    assert len(CHECKS) == len(catalogue())
    assert len({check.name for check in catalogue()}) == len(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_is_the_function_that_the_catalogue_says_it_is(name):
    check = CHECKS[name]

    function = function_of(check)

    assert function.__code__.co_firstlineno <= check.line
    assert inspect.getdoc(function).split("\n\n")[0].split() == check.promise.split()
    assert [*inspect.signature(function).parameters] == (["lane", "move"] if check.each_move else ["lane"])


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_says_what_is_promised_and_what_to_do(name):
    check = CHECKS[name]

    assert check.promise.endswith(".")
    assert check.cure.endswith(".")
    assert set(check.needs) <= NEEDS.keys()
