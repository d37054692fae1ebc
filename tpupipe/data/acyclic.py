"""Objects by the million that have no cycles, made without Python looking for cycles among them all the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def acyclic() -> Iterator[None]:
    """The cyclic garbage collector rests inside, in the whole process; memory is freed by reference counts as always.

    Making a million units takes a third less time with it. Not for what talks to a store: answers may have cycles.
    """
    resting = not gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not resting:
            gc.enable()
