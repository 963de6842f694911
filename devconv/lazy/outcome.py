"""What `devconv.materialize` did."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["MaterializeReport", "MaterializedTensor"]


@dataclass(frozen=True)
class MaterializedTensor:
    """One lazy tensor that got its shape.

    Attributes:
        name: full name, as in ``named_parameters()``.
        layer: class of the module that holds it, after initialisation.
        shape: sizes, outermost first.
        dtype: without the ``torch.`` prefix.
        device: with its index.
        bytes: size of its storage.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int


@dataclass(frozen=True)
class MaterializeReport:
    """What `devconv.materialize` did.

    Attributes:
        items: the tensors that got a shape, in the order of ``named_parameters()`` and ``named_buffers()``.
        layers: full names of the lazy modules that were initialised, in the order of their first call.
        unreached: full names of modules (or tensors outside any lazy module) that are lazy still, since the inputs
            never came to them.
        how: ``"meta"`` if the shapes were followed without computing, ``"forward"`` after one real forward pass,
            ``"nothing"`` if the model had no lazy module.
        shape_seconds: time spent on finding shapes; 0 for ``"forward"``, where it cannot be told apart.
        init_seconds: time spent on storage and initial values (and on the forward pass).
        notes: what deserves a look.
    """

    items: tuple[MaterializedTensor, ...] = ()
    layers: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    how: str = "nothing"
    shape_seconds: float = 0.0
    init_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that got a shape."""
        return sum(item.bytes for item in self.items)

    @property
    def complete(self) -> bool:
        """Whether nothing is lazy any more."""
        return not self.unreached

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(asdict(self) | {"bytes": self.bytes, "complete": self.complete})

    def __str__(self) -> str:
        rows = [
            (
                item.name,
                item.layer,
                "x".join(map(str, item.shape)) or "scalar",
                item.dtype,
                item.device,
                f"{item.bytes:,}",
            )
            for item in self.items
        ]
        header = ("tensor", "layer", "shape", "dtype", "device", "bytes")
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [header, *rows]
        ]
        seconds = self.shape_seconds + self.init_seconds
        lines.append(f"{len(self.items)} tensors, {self.bytes:,} bytes, shapes by {self.how}, {seconds:.3f} s")
        lines += [f"never reached by the inputs: {name}" for name in self.unreached]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)
