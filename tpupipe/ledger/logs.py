"""Log lines on stderr: text to read, or one JSON object a line with Cloud Logging's keys."""

from __future__ import annotations

import datetime as dt
import faulthandler
import json
import logging
import sys
from collections.abc import Mapping

_SEVERITY = {"DEBUG": "DEBUG", "INFO": "INFO", "WARNING": "WARNING", "ERROR": "ERROR", "CRITICAL": "CRITICAL"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: severity, message, time, labels, source location.

    Args:
        labels: Added to every line.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._labels = dict(labels)

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        line = {
            "severity": _SEVERITY.get(record.levelname, "DEFAULT"),
            "message": message,
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(),
            "logging.googleapis.com/labels": self._labels,
            "logging.googleapis.com/sourceLocation": {
                "file": record.filename,
                "line": record.lineno,
                "function": record.funcName,
            },
            **getattr(record, "facts", {}),
        }
        return json.dumps(line, default=str)


def set_up_logs(level: str, form: str, labels: Mapping[str, str]) -> None:
    """Sends tpupipe's own log lines to stderr. Other libraries' warnings are shown, their chatter is not.

    If native code crashes the process, Python tells there what every thread was doing.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        form: ``text`` or ``json``.
        labels: For ``json``.
    """
    faulthandler.enable(2)  # by its number: what a test or a notebook put in its place has none
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter(labels) if form == "json" else text)
    logger = logging.getLogger("tpupipe")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
