"""Errors of the job's own functions, told as such."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from tpupipe.errors import TpupipeError, UserCodeError


@contextlib.contextmanager
def user_code(
    function: str, stage: str, *, passing: type[Exception] | tuple[type[Exception], ...] = (), **where: Any
) -> Iterator[None]:
    """Turns what the job's own function raises into a ``UserCodeError`` with its last lines.

    Args:
        function: Its name in the declaration.
        stage: The stage.
        passing: What passes as it is.
        where: For the message.

    Raises:
        UserCodeError: The function raised. Errors of our own tree pass as they are.
    """
    try:
        yield
    except TpupipeError:
        raise
    except passing:
        raise
    except Exception as error:
        place = "".join(f", {key} {value}" for key, value in where.items())
        lines = traceback.format_exc(limit=-3)
        raise UserCodeError(
            f"{function} of stage {stage!r} raised {type(error).__name__}: {error}{place}\n{lines}",
            stage=stage,
            **where,
        ) from error
