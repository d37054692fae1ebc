"""Something that is done every few seconds beside the work of a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def periodically(every_s: float, act: Callable[[], None], *, name: str) -> Iterator[None]:
    """Calls ``act`` in a thread of its own while the block runs; the thread has ended when the block is left.

    Args:
        every_s: Seconds before the first call and between two.
        act: What to do. An exception of its own ends the calls, not the block.
        name: Of the thread.
    """
    done = threading.Event()

    def loop() -> None:
        while not done.wait(every_s):
            act()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
