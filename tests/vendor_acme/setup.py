"""The C++ half of the build; everything else is in pyproject.toml."""

from __future__ import annotations

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[
        CppExtension(
            "torch_acme._C",
            ["csrc/unit_device.cpp", "csrc/unit_operators.cpp"],
            # Quick to build matters more than quick to run: this device computes with the host's kernels.
            extra_compile_args=["-O1", "-g0", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    # Objects of one torch never meet those of another.
    options={"build": {"build_base": f"build/torch-{torch.__version__}"}},
)
