"""Lazy modules: shapes and storage without computing, and the lazy classes that torch does not have.

Each class becomes exactly its torch class with the first input, or with `devconv.materialize`. There is no lazy
EmbeddingBag: the number of embeddings is the size of a vocabulary, which no batch of indices shows.
"""

from __future__ import annotations

from .attention import LazyMultiheadAttention
from .elementary import LazyBilinear, LazyPReLU
from .norms import (
    LazyGroupNorm,
    LazyInstanceNorm1d,
    LazyInstanceNorm2d,
    LazyInstanceNorm3d,
    LazyLayerNorm,
    LazyRMSNorm,
)
from .recurrent import LazyGRU, LazyLSTM, LazyRNN
from .refusing import refuse_lazy

__all__ = [
    "LazyBilinear",
    "LazyGRU",
    "LazyGroupNorm",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "LazyLSTM",
    "LazyLayerNorm",
    "LazyMultiheadAttention",
    "LazyPReLU",
    "LazyRMSNorm",
    "LazyRNN",
    "refuse_lazy",
]
