"""Start a vendor's package: a folder that installs, passes its own tests on the stand-in, and waits for its device."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

from devconv import DevconvError

__all__ = ["SkeletonError", "write_skeleton"]

_TEMPLATES = Path(__file__).with_name("templates")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class SkeletonError(DevconvError, ValueError):
    """A package that cannot be started under this name, or in this place."""

    def __init__(self, what: str, why: str, cure: str) -> None:
        self.what, self.why, self.cure = what, why, cure
        super().__init__(f"{what}: {why}. {cure}")


def write_skeleton(device_type: str, parent: Path) -> list[Path]:
    """Write the package ``devconv-TYPE``.

    Args:
        device_type: name of the device type, as ``torch.device`` will read it.
        parent: folder in which ``devconv-TYPE`` is made.

    Returns:
        The files that were written.

    Raises:
        SkeletonError: no name that torch can read, or the folder is there already.
    """
    from devconv import Backend  # imports torch, which no other command of the kit needs

    if not _NAME.fullmatch(device_type):
        raise SkeletonError(
            repr(device_type),
            "a device type is lower-case letters, digits and underscores, and begins with a letter",
            "Take the name that your library gives to torch.utils.rename_privateuse1_backend.",
        )
    folder = parent / f"devconv-{device_type}"
    if folder.exists():
        raise SkeletonError(str(folder), "it exists already", "Remove it, or run the command in another folder.")
    places = {
        "pyproject.toml": folder / "pyproject.toml",
        "README.md": folder / "README.md",
        "backend.py": folder / "src" / f"devconv_{device_type}" / "__init__.py",
        "conformance.toml": folder / "src" / f"devconv_{device_type}" / "conformance.toml",
        "test_backend.py": folder / "tests" / "test_backend.py",
    }
    words = {
        "name": device_type,
        "Name": "".join(part.title() for part in device_type.split("_")),
        "api_version": str(Backend.api_version),
    }
    for template, path in places.items():
        text = (_TEMPLATES / f"{template}.in").read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(words), encoding="utf-8")
    return [*places.values()]
