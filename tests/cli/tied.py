"""A model of the demo's kind that XLA compiles in no time: it predicts letters, and its head is tied."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from devconv.cli.minilm import Task

LETTERS, WIDTH = 8, 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.embedding(input_ids))) * self.scale
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def make_task(seed=0):
    torch.manual_seed(seed)
    letters = torch.arange(LETTERS).view(2, -1)
    return Task(Tied(), {"input_ids": letters, "labels": letters.flip(0)})
