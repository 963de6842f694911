"""Shapes that are answered without torch's meta kernels are those that the kernels give, and errors stay torch's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from devconv.lazy.shortcuts import shortcut


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


QUERY = meta(2, 3, 4, 8)
IMAGES = meta(2, 6, 9, 8)
CHANNELS_LAST = meta(2, 6, 9, 8).to(memory_format=torch.channels_last)
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
    "batch_norm": (functional.batch_norm, (IMAGES, meta(6), meta(6), meta(6), meta(6), True, 0.1, 1e-5), {}),
    "batch_norm of one number each": (functional.batch_norm, (meta(1, 6), meta(6), meta(6)), {"training": False}),
    "batch_norm without statistics": (functional.batch_norm, (IMAGES, None, None), {"training": True}),
    "conv1d": (torch.conv1d, (meta(2, 6, 9), meta(4, 6, 3), meta(4), 2, 1), {}),
    "conv2d": (torch.conv2d, (IMAGES, meta(4, 3, 3, 2), None, (2, 1), (1, 0), (1, 2), 2), {}),
    "conv2d by name": (torch.conv2d, (IMAGES, meta(4, 6, 1, 1)), {"bias": meta(4), "stride": 3}),
    "conv3d": (torch.conv3d, (meta(2, 6, 4, 4, 4), meta(4, 6, 2, 2, 2)), {}),
    "adaptive pool to one": (functional.adaptive_avg_pool2d, (IMAGES, 1), {}),
    "adaptive pool": (functional.adaptive_avg_pool2d, (IMAGES, (None, 2)), {}),
    "adaptive pool of a line": (functional.adaptive_avg_pool1d, (meta(2, 6, 9), (3,)), {}),
    "max pool": (functional.max_pool2d, (IMAGES, 3, 2, 1), {}),
    "max pool by name": (functional.max_pool2d, (IMAGES,), {"kernel_size": (2, 3), "dilation": 2}),
    "max pool of a line": (functional.max_pool1d, (meta(2, 6, 9), 3), {"stride": None}),
    "max pool of a volume": (functional.max_pool3d, (meta(2, 6, 4, 4, 4), 2), {}),
    "mean": (torch.Tensor.mean, (meta(2, 3, 5), 1), {}),
    "mean of some": (torch.mean, (meta(2, 3, 5), (-1, 0)), {"keepdim": True}),
    "relu": (functional.relu, (meta(2, 5),), {"inplace": False}),
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
    assert ours.stride() == theirs.stride() or not args[0].is_contiguous()


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
    "one value a channel": (functional.batch_norm, (meta(1, 6), meta(6), meta(6)), {"training": True}),
    "norm without statistics": (functional.batch_norm, (IMAGES, None, None), {"training": False}),
    "wrong channels of a norm": (functional.batch_norm, (IMAGES, meta(5), meta(5)), {}),
    "wrong channels": (torch.conv2d, (IMAGES, meta(4, 5, 3, 3)), {}),
    "wrong groups": (torch.conv2d, (IMAGES, meta(3, 3, 1, 1), None, 1, 0, 1, 2), {}),
    "kernel larger than the image": (torch.conv2d, (IMAGES, meta(4, 6, 10, 1)), {}),
    "padding by name": (torch.conv2d, (IMAGES, meta(4, 6, 3, 3)), {"padding": "same"}),
    "an image without a batch": (torch.conv2d, (meta(6, 9, 8), meta(4, 6, 3, 3)), {}),
    "channels last": (torch.conv2d, (CHANNELS_LAST, meta(4, 6, 3, 3)), {}),
    "channels last normed": (functional.batch_norm, (CHANNELS_LAST, meta(6), meta(6)), {}),
    "adaptive pool without a batch": (functional.adaptive_avg_pool2d, (meta(6, 9, 8), 1), {}),
    "max pool that rounds up": (functional.max_pool2d, (IMAGES, 2), {"ceil_mode": True}),
    "max pool with too much padding": (functional.max_pool2d, (IMAGES, 2, 2, 2), {}),
    "max pool larger than the image": (functional.max_pool2d, (IMAGES, 12), {}),
    "mean of everything": (torch.mean, (IMAGES,), {}),
    "mean of what is not there": (torch.mean, (IMAGES, 4), {}),
    "mean in another dtype": (torch.mean, (IMAGES, 1), {"dtype": torch.float64}),
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


def test_following_a_network_of_images_does_not_import_torchs_compiler():
    # Its import takes seconds, and more memory than the network.
    code = """
import sys, torch, devconv
from torch import nn
layers = (nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
model = nn.Sequential(*layers, nn.LazyLinear(2))
before = {"torch._dynamo", "sympy"} & set(sys.modules)
devconv.materialize(model, devconv.TensorSpec((2, 3, 8, 8)))
print(sorted(({"torch._dynamo", "sympy"} & set(sys.modules)) - before), model[-1].in_features)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[0] == "[] 4"
