"""``python -m devconv`` is the command ``devconv``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
