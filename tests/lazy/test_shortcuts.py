"""Shapes that are answered without torch's meta kernels are those that the kernels give, and errors stay torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from devconv.lazy.shortcuts import shortcut


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


QUERY = meta(2, 3, 4, 8)
CALLS = {
    "linear": (functional.linear, (meta(2, 3, 5), meta(4, 5), meta(4)), {}),
    "linear without bias": (functional.linear, (meta(5), meta(4, 5)), {}),
    "linear of a transposed input": (functional.linear, (meta(5, 3).t(), meta(4, 5)), {}),
    "bfloat16": (functional.linear, (meta(3, 5, dtype=torch.bfloat16), meta(4, 5, dtype=torch.bfloat16)), {}),
    "embedding": (functional.embedding, (meta(2, 3, dtype=torch.int64), meta(9, 4), None, None, 2.0, False, False), {}),
    "layer_norm": (functional.layer_norm, (meta(2, 3, 5), (5,)), {"weight": meta(5), "bias": None, "eps": 1e-5}),
    "layer_norm of two": (functional.layer_norm, (meta(2, 3, 5), (3, 5)), {}),
    "rms_norm": (functional.rms_norm, (meta(2, 3, 5), (5,), meta(5)), {}),
    "attention": (functional.scaled_dot_product_attention, (QUERY, QUERY, QUERY), {"is_causal": True}),
    "attention with a mask": (
        functional.scaled_dot_product_attention,
        (QUERY, meta(2, 3, 6, 8), meta(2, 3, 6, 7), meta(4, 6), 0.0),
        {},
    ),
    "gelu": (functional.gelu, (meta(2, 5),), {"approximate": "tanh"}),
    "silu": (functional.silu, (meta(2, 5),), {}),
    "dropout": (functional.dropout, (meta(2, 5), 0.1, True), {}),
    "add": (torch.Tensor.add, (meta(2, 5), meta(2, 5)), {}),
    "scale": (torch.Tensor.mul, (meta(2, 5), 2.0), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_shortcut_gives_what_the_kernel_gives(name):
    func, args, kwargs = CALLS[name]
    ours, theirs = shortcut(func, args, kwargs), func(*args, **kwargs)
    assert ours is not None
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)


NOT_SURE = {
    "wrong size": (functional.linear, (meta(2, 6), meta(4, 5)), {}),
    "wrong bias": (functional.linear, (meta(2, 5), meta(4, 5), meta(3)), {}),
    "two dtypes": (functional.linear, (meta(2, 5), meta(4, 5, dtype=torch.float64)), {}),
    "integers": (torch.Tensor.add, (meta(2, dtype=torch.int64), 1.5), {}),
    "broadcast": (torch.Tensor.add, (meta(2, 5), meta(5)), {}),
    "promotion": (torch.Tensor.add, (meta(2), meta(2, dtype=torch.float64)), {}),
    "wrong norm": (functional.layer_norm, (meta(2, 5), (4,)), {}),
    "wrong weight": (functional.layer_norm, (meta(2, 5), (5,), meta(4)), {}),
    "grouped attention": (functional.scaled_dot_product_attention, (QUERY, QUERY, QUERY), {"enable_gqa": True}),
    "wrong keys": (functional.scaled_dot_product_attention, (QUERY, meta(2, 3, 4, 7), QUERY), {}),
    "in place": (functional.dropout, (meta(2, 5),), {"inplace": True}),
    "strided": (functional.gelu, (meta(5, 3).t(),), {}),
    "another operation": (torch.matmul, (meta(2, 5), meta(5, 4)), {}),
}


@pytest.mark.parametrize("name", NOT_SURE)
def test_what_is_not_certain_is_left_to_torch(name):
    assert shortcut(*NOT_SURE[name]) is None


def test_under_autocast_everything_is_left_to_torch():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert shortcut(*CALLS["linear"]) is None


@pytest.mark.parametrize("shape", [(2, 5), (2, 0, 5)])
def test_empty_batches_have_shapes_too(shape):
    assert shortcut(functional.linear, (meta(*shape), meta(4, 5)), {}).shape == (*shape[:-1], 4)
