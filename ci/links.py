"""Check the links between our own pages: each file exists, and each ``#part`` is a heading of its page.

Usage: ``python ci/links.py PAGE_OR_FOLDER...``. Links to other sites are not followed: the build needs no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that ``#part`` links to `page` may use, as GitHub makes them from its headings."""
    names: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        suffix = 1
        unique = name
        while unique in names:
            unique, suffix = f"{name}-{suffix}", suffix + 1
        names.add(unique)
    return names


def broken(page: Path) -> Iterator[str]:
    """What is wrong with each bad link of `page`."""
    text = _FENCE.sub("", page.read_text())
    for target in _LINK.findall(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, part = unquote(target).partition("#")
        there = (page.parent / path) if path else page
        if not there.exists():
            yield f"{page}: {target}: there is no such file"
        elif part and there.suffix == ".md" and part not in anchors(there):
            yield f"{page}: {target}: {there} has no heading of that name"


def main(arguments: list[str]) -> int:
    """Exit status: 1 if a link is broken or a page is missing, 0 if all are fine."""
    pages: list[Path] = []
    for argument in map(Path, arguments):
        pages += sorted(argument.rglob("*.md")) if argument.is_dir() else [argument]
    faults = [f"{page}: there is no such page" for page in pages if not page.exists()]
    faults += [fault for page in pages if page.exists() for fault in broken(page)]
    print("\n".join(faults) or f"{len(pages)} pages, every link between them is good")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
