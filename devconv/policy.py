"""Which way a tensor is converted: one pure function, one table."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Route", "choose"]


class Route(StrEnum):
    """What happens to a tensor object. The first three are torch's own words for its own three behaviours."""

    SET_DATA = "set-data"
    """``p.data = new``: the object and its TensorImpl stay, the data is replaced."""
    SWAP = "swap"
    """The object stays, its TensorImpl is exchanged."""
    OVERWRITE = "overwrite"
    """A new object takes its place in the module."""
    KEEP = "keep"
    """Nothing is touched."""
    RETARGET = "retarget"
    """A lazy tensor stays lazy, on the new device."""
    FULL_SWAP = "full-swap"
    """``torch.utils.swap_tensors``: for tensor subclasses that keep their data in inner tensors."""
    STOCK = "stock"
    """Passed through to stock torch, which does it right."""
    REFUSE = "refuse"
    """Refused, by name and with the cure."""


def choose(
    *,
    settled: bool = False,
    lazy: bool = False,
    buffer: bool = False,
    wrapper: bool = False,
    held: bool = False,
    swap_flag: bool = False,
    overwrite_flag: bool = False,
    live_graph: bool = False,
    in_place: bool | None = None,
    set_data_works: bool = False,
) -> Route:
    """The route of one tensor; the first rule that matches wins.

    Args:
        settled: there is nothing to do for it.
        lazy: it is uninitialised.
        buffer: it is a plain buffer (one that requires no gradient), which stock torch replaces too.
        wrapper: its class keeps its data in inner tensors.
        held: a live graph or a weak reference refers to it.
        swap_flag: ``torch.__future__.get_swap_module_params_on_conversion()``.
        overwrite_flag: ``torch.__future__.get_overwrite_module_params_on_conversion()``.
        live_graph: an autograd graph recorded before the move is alive.
        in_place: the target backend's word, None if it has none.
        set_data_works: an assignment to ``.data`` was tried on a scratch parameter, and worked.

    >>> choose(settled=True, swap_flag=True)
    <Route.KEEP: 'keep'>
    >>> choose(lazy=True, overwrite_flag=True)
    <Route.RETARGET: 'retarget'>
    >>> choose(wrapper=True)
    <Route.FULL_SWAP: 'full-swap'>
    >>> choose(wrapper=True, held=True)
    <Route.REFUSE: 'refuse'>
    >>> choose(buffer=True)
    <Route.OVERWRITE: 'overwrite'>
    >>> choose(swap_flag=True, overwrite_flag=True)
    <Route.SWAP: 'swap'>
    >>> choose(overwrite_flag=True, set_data_works=True)
    <Route.OVERWRITE: 'overwrite'>
    >>> choose(live_graph=True, in_place=True, set_data_works=True)
    <Route.SWAP: 'swap'>
    >>> choose(in_place=False, set_data_works=True)
    <Route.SWAP: 'swap'>
    >>> choose(set_data_works=True)
    <Route.SET_DATA: 'set-data'>
    >>> choose()
    <Route.SWAP: 'swap'>
    """
    table = (
        (settled, Route.KEEP),
        (lazy, Route.RETARGET),
        (buffer, Route.OVERWRITE),
        (wrapper and held, Route.REFUSE),
        (wrapper, Route.FULL_SWAP),
        (swap_flag, Route.SWAP),
        (overwrite_flag, Route.OVERWRITE),
        (live_graph, Route.SWAP),
        (in_place is False, Route.SWAP),
        (set_data_works, Route.SET_DATA),
    )
    return next((route for applies, route in table if applies), Route.SWAP)
