"""The parts that replication is made of: batches, nested values, sums across devices, and torch's private signs."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import devconv
from devconv import torch_internals as internals
from devconv.parallel.batching import shares
from devconv.parallel.copying import add_up, broadcast, relocate
from devconv.parallel.graph import travel
from devconv.parallel.nesting import leaves, rebuild
from devconv.parallel.skeleton import TableMaker
from tests.zoo import mlp


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_cover_the_batch_evenly_and_none_is_empty(size, count):
    sizes = shares(size, count)

    assert sum(sizes) == size
    assert len(sizes) <= count
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0 or sizes == [0]


nested = st.recursive(
    st.one_of(st.integers(), st.none(), st.text(max_size=3), st.just(torch.zeros(1))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(nested)
def test_a_nested_value_is_rebuilt_with_other_tensors_in_the_same_places(value):
    found = [tensor for _, tensor, _ in leaves(value)]
    fresh = [torch.ones(1) for _ in found]

    rebuilt = rebuild(value, iter(fresh))

    assert [id(tensor) for _, tensor, _ in leaves(rebuilt)] == [id(tensor) for tensor in fresh]
    assert [path for path, _, _ in leaves(rebuilt)] == [path for path, _, _ in leaves(value)]


def test_a_value_without_tensors_is_the_same_object():
    value = {"a": [1, (2, "x")]}

    assert rebuild(value, iter(())) is value


def test_terms_are_added_in_the_order_of_the_replicas():
    huge, one = torch.tensor([1e8]), torch.tensor([1.0])

    (left,) = add_up([[huge], [-huge], [one]], torch.device("cpu"))
    (right,) = add_up([[one], [huge], [-huge]], torch.device("cpu"))

    assert (left.item(), right.item()) == (1.0, 0.0)


def test_a_missing_term_is_left_out_and_a_sum_without_terms_is_none():
    total, nothing = add_up([[torch.ones(2), None], [None, None], [torch.ones(2), None]], torch.device("cpu"))

    assert total.tolist() == [2.0, 2.0]
    assert nothing is None


def test_sums_do_not_write_into_their_terms():
    terms = [torch.ones(2), torch.ones(2)]

    add_up([[term] for term in terms], torch.device("cpu"))

    assert [term.tolist() for term in terms] == [[1.0, 1.0]] * 2


@pytest.mark.needs("xla", 2)
def test_terms_of_several_kinds_of_devices_meet_where_they_are_wanted():
    parts = [[torch.ones(2)], [torch.ones(2, device="xla:0")], [torch.ones(2, device="xla:1") * 2]]

    for device in ("cpu", "xla:0", "xla:1"):
        (total,) = add_up(parts, torch.device(device))
        assert total.device == torch.device(device)
        assert total.cpu().tolist() == [4.0, 4.0]


@pytest.mark.needs("xla", 2)
def test_tensors_are_relocated_in_one_batch_for_each_pair_of_devices(monkeypatch):
    backend = type(devconv.backend_for("xla"))
    calls = []
    original = backend.send
    monkeypatch.setattr(
        backend,
        "send",
        lambda self, tensors, device, **kw: calls.append(len(tensors)) or original(self, tensors, device, **kw),
    )

    moved = relocate([torch.ones(1), torch.ones(2), torch.ones(3)], [torch.device("xla", i) for i in (0, 1, 0)])

    assert [str(tensor.device) for tensor in moved] == ["xla:0", "xla:1", "xla:0"]
    assert sorted(calls) == [1, 2]


def test_copies_never_alias_their_sources():
    source = torch.ones(3)

    rows = broadcast([source], [torch.device("cpu")] * 2)

    assert len({tensor.data_ptr() for (tensor,) in rows} | {source.data_ptr()}) == 3


def test_a_lazily_conjugated_tensor_is_copied_with_its_values():
    source = torch.tensor([1 + 2j]).conj()

    ((copied,),) = broadcast([source], [torch.device("cpu")])

    assert copied.tolist() == [1 - 2j]


def test_a_tensor_that_is_there_already_travels_as_itself():
    tensor = torch.ones(1, requires_grad=True)

    assert travel([tensor], [torch.device("cpu")])[0] is tensor


def test_a_dicts_version_changes_with_every_change_and_with_nothing_else():
    module = mlp()[0]
    attributes = vars(module)

    def version():
        return internals.dict_versions([attributes])

    before = version()
    module.training, module.weight  # noqa: B018 - reading is the point
    assert version() == before
    for change in (
        lambda: setattr(module, "gain", 1),
        lambda: setattr(module, "gain", 2),
        lambda: module.__dict__.update(gain=3),
        lambda: delattr(module, "gain"),
    ):
        before = version()
        change()
        assert version() != before


def test_two_dicts_never_share_a_version():
    (first,) = internals.dict_versions([{"a": 1}])
    (second,) = internals.dict_versions([{"a": 1}])

    assert first != second


def test_writes_are_counted():
    tensor = torch.ones(1)
    before = internals.writes_of([tensor])

    tensor.add_(1)

    assert internals.writes_of([tensor]) != before


def test_torchs_own_bare_replica_has_no_parameters_and_shares_the_rest():
    layer = nn.Linear(2, 2)
    layer.note = note = object()

    replica = internals.bare_replica(layer)

    assert type(replica) is nn.Linear
    assert list(replica.parameters()) == []
    assert replica.note is note
    assert replica._is_replica


@pytest.mark.parametrize(("make", "own"), [(lambda: nn.Linear(2, 2), False), (lambda: nn.LSTM(2, 2), True)])
def test_a_modules_own_way_to_be_copied_is_recognised(make, own):
    assert internals.replicates_itself(make()) is own


def test_without_dict_versions_everything_is_made_anew_and_right(monkeypatch):
    monkeypatch.setattr(internals, "_dict_version", None)
    model = mlp()
    make = devconv.Replicator(model, ["cpu", "cpu"])

    for value in range(3):
        model[0].gain = value
        replicas = make()
        assert [replica[0].gain for replica in replicas] == [value, value]
        assert torch.equal(replicas[1](torch.ones(1, 4)), model(torch.ones(1, 4)))
        make.release()


def test_tables_of_equal_keys_keep_their_keys_once():
    make = TableMaker()

    tables = [make(["weight", "bias"]) for _ in range(100)]
    other = make(["bias"])

    tables[0]["weight"] = 1
    assert list(tables[0]) == ["weight", "bias"]
    assert tables[99] == {"weight": None, "bias": None}
    assert other == {"bias": None}
    # Python leaves room in the first ones, for attributes that the class might get.
    assert sys.getsizeof(tables[99]) < sys.getsizeof(dict.fromkeys(["weight", "bias"]))
