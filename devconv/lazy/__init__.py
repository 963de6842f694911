"""Lazy modules: shapes and storage without computing, and the lazy classes that torch does not have."""

from __future__ import annotations
