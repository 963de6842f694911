"""The device of shapes without values."""

from __future__ import annotations

import pytest
import torch

import devconv

pytestmark = pytest.mark.lane("cpu")

META = torch.device("meta")


@pytest.mark.parametrize("name", ["meta", "meta:0"])
def test_meta_has_no_index(name):
    assert devconv.resolve(name)[0] == META == torch.empty(0, device="meta").device


def test_shapes_dtypes_and_strides_arrive():
    sources = [torch.ones(2, 3).t(), torch.zeros((), dtype=torch.bfloat16), torch.ones(0, 4, dtype=torch.int64)]
    there = devconv.backend_for("meta").send(sources, META)
    assert [(tensor.device, tensor.shape, tensor.dtype, tensor.stride()) for tensor in there] == [
        (META, tensor.shape, tensor.dtype, tensor.stride()) for tensor in sources
    ]


def test_copy_on_meta_casts():
    (cast,) = devconv.backend_for("meta").copy([torch.ones(2, device="meta")], META, dtypes=[torch.float64])
    assert cast.dtype is torch.float64


def test_meta_says_that_it_holds_no_values():
    assert not devconv.backend_for("meta").capabilities.values


def test_values_do_not_come_back():
    with pytest.raises(NotImplementedError):
        devconv.backend_for("meta").fetch([torch.ones(2, device="meta")])
