"""The gaps that a vendor declares: promises that its device does not keep yet, each with the reason.

A manifest is a TOML file, ``conformance.toml`` beside the backend's module, so that it is versioned with the backend::

    [gaps]
    "lazy.a_lazy_norm_counts_on_the_device" = "no kernel for torch.empty_like on integers yet"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from devconv import DevconvError

from .check import catalogue

__all__ = ["MANIFEST", "ManifestError", "beside", "parse"]

MANIFEST = "conformance.toml"


class ManifestError(DevconvError, ValueError):
    """A manifest that cannot be read, or that declares a gap in a promise that nobody makes."""

    def __init__(self, source: str, why: str, cure: str) -> None:
        self.source, self.why, self.cure = source, why, cure
        super().__init__(f"{source}: {why}. {cure}")


def parse(text: str, source: str) -> Mapping[str, str]:
    r"""The declared gaps of a manifest.

    Args:
        text: the file's text.
        source: its name, for errors.

    Returns:
        Check id -> reason.

    Raises:
        ManifestError: no TOML, an unknown key or check, or a gap without a reason.

    >>> parse('[gaps]\n"rng.a_seed_repeats_the_device" = "hardware RNG only"', "conformance.toml")
    {'rng.a_seed_repeats_the_device': 'hardware RNG only'}
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(source, f"not readable as TOML ({error})", "Repair the file.") from error
    gaps = table.pop("gaps", {})
    if table or not isinstance(gaps, dict):
        strange = ", ".join(map(repr, table)) or "gaps, which is no table"
        raise ManifestError(source, f"unknown entry {strange}", 'A manifest has one table, [gaps]: "check" = "reason".')
    known = {check.id for check in catalogue()}
    for name, reason in gaps.items():
        if name not in known:
            raise ManifestError(source, f"no check is called {name!r}", "`devconv check --list` shows the names.")
        if not isinstance(reason, str) or not reason.strip():
            raise ManifestError(source, f"the gap {name!r} has no reason", "Say in one sentence why the gap is there.")
    return dict(gaps)


def beside(module_file: str | None) -> tuple[str, str]:
    """Text and name of the manifest beside a backend's module; two empty strings where there is none."""
    path = Path(module_file).with_name(MANIFEST) if module_file else None
    if path is None or not path.is_file():
        return "", ""
    return path.read_text(encoding="utf-8"), str(path)
