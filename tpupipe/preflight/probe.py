"""The probe: a few objects that are written to the store, read back and removed."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from tpupipe.config import StoreConfig
from tpupipe.errors import ObjectNotFoundError, StoreDeniedError, StoreError
from tpupipe.store.layout import PROBES
from tpupipe.store.objects import ObjectInfo, Store

T = TypeVar("T")

PROBE_TIMEOUT_S = 20.0
PROBE_ATTEMPTS = 2
SMALL = b"tpupipe check: this object may be deleted\n"

_log = logging.getLogger("tpupipe.preflight")


class StoreProbe:
    """Objects of our own in the store, in a folder that no run uses.

    Args:
        store: The store.
        config: Its section; time-outs longer than 20 s and attempts beyond the second tell a check nothing more.
    """

    def __init__(self, store: Store, config: StoreConfig) -> None:
        self.store = store.with_limits(
            timeout_s=min(config.timeout_s, PROBE_TIMEOUT_S), attempts=min(config.attempts, PROBE_ATTEMPTS)
        )
        # Cloud Storage takes one write a second of a name, and says 429 before: that is no finding.
        self.patient = store.with_limits(timeout_s=min(config.timeout_s, PROBE_TIMEOUT_S))
        self.folder = f"{PROBES}/{uuid.uuid4().hex}"
        self.small = f"{self.folder}/object"
        self.large = f"{self.folder}/large"
        self.created: ObjectInfo | None = None
        self._left = False

    def create(self) -> float:
        """Creates the small object; seconds that it took."""
        self._left = True  # also an attempt whose answer was lost may have made it
        try:
            self.created, seconds = timed(lambda: self.store.create(self.small, SMALL))
        except (StoreDeniedError, ObjectNotFoundError):  # refused for good: nothing was made
            self._left = False
            raise
        return seconds

    def throughput(self, size: int) -> tuple[float, float]:
        """Seconds to write and to read back ``size`` random bytes.

        Raises:
            StoreError: It did not work, or other bytes came back.
        """
        data = os.urandom(size)
        _, write_s = timed(lambda: self.store.create(self.large, data))
        read, read_s = timed(lambda: self.store.read(self.large))
        if read != data:
            raise StoreError(f"{self.store.uri(self.large)} came back with other bytes than were written.")
        return write_s, read_s

    def delete(self) -> None:
        """Deletes all objects of the probe."""
        self.store.delete_prefix(self.folder)
        self._left = False

    def remove(self) -> None:
        """Deletes what is still there, at the very end; what cannot be deleted is told in the log. Idempotent."""
        if not self._left:
            return
        self._left = False
        try:
            self.store.delete_prefix(self.folder)
        except StoreError as error:
            _log.warning("objects of the check may be left in %s: %s", self.store.uri(self.folder), error.message)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What ``work`` gives, and the seconds that it took."""
    began = time.monotonic()
    result = work()
    return result, time.monotonic() - began
