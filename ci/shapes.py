"""Models of the sizes that the benchmarks speak of, without weights from anywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["resnet1001"]


class Bottleneck(nn.Module):
    """A pre-activation bottleneck block."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.relu = nn.ReLU()
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(self.relu(self.norm1(x)))
        hidden = self.conv2(self.relu(self.norm2(hidden)))
        hidden = self.conv3(self.relu(self.norm3(hidden)))
        residual: Tensor = x if self.shortcut is None else self.shortcut(x)
        return torch.add(hidden, residual)


def resnet1001(blocks: int = 111) -> nn.Module:
    """A ResNet-1001 in shape: 2676 modules, 3005 parameters, 3000 buffers, 42 MB in float32.

    Args:
        blocks: blocks in each of the three stages.
    """
    stages: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    inputs = 16
    for width, outputs in ((16, 64), (32, 128), (64, 256)):
        for _ in range(blocks):
            stages.append(Bottleneck(inputs, outputs, width))
            inputs = outputs
    return nn.Sequential(*stages, nn.BatchNorm2d(256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
