"""One check: one promise, one cure.

A check is a function in ``promises/<group>.py`` under the decorator `promise`. Its name and docstring say what is
promised, the decorator's ``cure`` says what the vendor does about a failure, ``needs`` what the device must have for
the promise to make sense. The catalogue is read from the source text, so listing or collecting the checks imports
neither torch nor the device.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

__all__ = ["GROUPS", "NEEDS", "Check", "catalogue", "promise"]

GROUPS = (
    "registry",
    "moves",
    "identity",
    "ties",
    "grads",
    "hooks",
    "optimizers",
    "lazy",
    "replication",
    "rng",
    "failure",
)
"""The groups, in the order in which they run: what later groups stand on comes first."""

NEEDS = {
    "values": "the device holds no values",
    "foreign": "the device is the host",
    "second": "the process has one such device",
    "autograd": "the backend says that torch's autograd does not run on the device",
    "strides": "the backend says that the device keeps no strides",
    "aliasing": "the backend says that two tensors cannot share a storage on the device",
    "lacking": "the backend says that the device holds every dtype",
    "threads": "the backend says that one thread at a time may use the device",
    "own_rng": "the backend says that torch.manual_seed reaches the device",
    "cast": "the device holds one floating dtype only",
    "installed": "the backend was registered by a program, not by an installed distribution",
}
"""What a check can need, and why it is not applicable where that is missing."""

_Function = TypeVar("_Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Check:
    """One promise as the catalogue knows it.

    Attributes:
        group: one of `GROUPS`.
        name: the function's name.
        promise: what is promised, one sentence.
        cure: what the vendor does when the check fails.
        needs: keys of `NEEDS`.
        each_move: the check runs once for every conversion of the lane, not once.
        patience: how many times longer than others it may take before it counts as hung.
        line: line of the function in ``promises/<group>.py``.
    """

    group: str
    name: str
    promise: str
    cure: str
    needs: tuple[str, ...]
    each_move: bool
    patience: int
    line: int

    @property
    def id(self) -> str:
        """``group.name``, as manifests and reports write it."""
        return f"{self.group}.{self.name}"


def promise(*, cure: str, needs: str = "", patience: int = 1) -> Callable[[_Function], _Function]:
    """Declare a function as a check. The catalogue reads the declaration from the source text.

    Args:
        cure: what the vendor does when the check fails; one literal string.
        needs: keys of `NEEDS`, separated by blanks; one literal string.
        patience: how many times longer than others it may take; more than 1 for checks that start a process.
    """

    def declared(function: _Function) -> _Function:
        return function

    return declared


@cache
def catalogue() -> tuple[Check, ...]:
    """Every check, in the order in which they run. Imports nothing.

    >>> [check.group for check in catalogue()][0]
    'registry'
    """
    folder = Path(__file__).with_name("promises")
    return tuple(check for group in GROUPS for check in _read(group, folder / f"{group}.py"))


def _read(group: str, path: Path) -> list[Check]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return [
        check for node in tree.body if isinstance(node, ast.FunctionDef) for check in [_declared(group, node)] if check
    ]


def _declared(group: str, node: ast.FunctionDef) -> Check | None:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "promise":
            given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
            sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            needs = tuple(given.get("needs", "").split())
            each_move = [argument.arg for argument in node.args.args] == ["lane", "move"]
            patience = given.get("patience", 1)
            return Check(group, node.name, sentence, given["cure"], needs, each_move, patience, node.lineno)
    return None
