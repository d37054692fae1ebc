"""Where a store is, to open it here or in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpupipe.store.objects import Store, open_store


@dataclass(frozen=True)
class Place:
    """An empty place on one of the backends.

    Args:
        uri: ``file://`` or ``gs://``.
        endpoint: The embedded server, for ``gs://``.
    """

    uri: str
    endpoint: str | None

    def open(self, **options: Any) -> Store:
        return open_store(self.uri, endpoint=self.endpoint, **{"timeout_s": 30, **options})

    @property
    def code(self) -> str:
        """An expression that opens it in another process."""
        return f"open_store({self.uri!r}, endpoint={self.endpoint!r})"
