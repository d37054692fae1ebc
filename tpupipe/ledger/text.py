"""Numbers as people read them."""

from __future__ import annotations


def human_bytes(size_bytes: float) -> str:
    """``1.3 MB``: bytes to read.

    >>> human_bytes(312), human_bytes(1_340_000)
    ('312 B', '1.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
