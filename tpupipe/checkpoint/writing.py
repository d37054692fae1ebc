"""Whether a save that is being written makes progress. Orbax and TensorStore repeat requests for many minutes by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tpupipe.errors import StoreError, StoreTimeoutError
from tpupipe.store.objects import Store

# An object on Cloud Storage is there when its last byte is. So much may be on its way unseen, no slower than that.
UNSEEN_BYTES = 4 << 30
SLOWEST_BYTES_PER_S = 8 << 20

_LOOKS = 16  # per silence that is allowed


class Patience:
    """Waits for objects to appear, and loses patience when none does for too long.

    Args:
        store: Where they are written.
        prefix: What their names begin with.
        silence_s: Seconds without anything new that are allowed for a save without bytes.
        size_bytes: Bytes of the save.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        silence_s: float,
        size_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = silence_s / _LOOKS
        self.allowed_s = silence_s + min(size_bytes, UNSEEN_BYTES) / SLOWEST_BYTES_PER_S
        self._uri = store.uri(prefix.rstrip("/"))
        # Short: while one look waits for its answer nothing else is seen.
        self._store = store.with_limits(timeout_s=4 * self.interval_s, attempts=1)
        self._prefix = prefix
        self._clock = clock
        self._seen: frozenset[tuple[str, int]] = frozenset()
        self._since = self._looked = clock()

    def look(self) -> None:
        """Looks at what is there.

        Raises:
            StoreTimeoutError: Nothing new came for too long.
        """
        try:
            there = frozenset((info.name, info.size) for info in self._store.list(self._prefix))
        except StoreError:
            there = self._seen  # no news
        now, before = self._clock(), self._looked
        self._looked = now
        if there != self._seen:
            self._seen, self._since = there, before  # it came after the look before
        elif now - self._since >= self.allowed_s:
            raise StoreTimeoutError(
                f"write of {self._uri} makes no progress: no object below it came or grew for "
                f"{now - self._since:.1f} s, {len(there)} are there.",
                hint="check the network, or give the store a longer time-out",
                operation="write",
                uri=self._uri,
                attempts=1,
            )


def array_bytes(state: Any) -> int:
    """Bytes of all arrays of a tree, over all processes."""
    import jax
    import numpy as np

    return sum(
        leaf.nbytes if isinstance(leaf, jax.Array) else np.asarray(leaf).nbytes for leaf in jax.tree.leaves(state)
    )


def repeated_requests() -> int:
    """How many requests to Cloud Storage TensorStore has repeated in this process."""
    import tensorstore

    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/gcs/retries")
    return sum(int(value["value"]) for metric in metrics for value in metric["values"])
