"""One canonical form of configuration values, so that equal configurations have equal hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def canonical(value: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """Bring a section, or a mapping of sections and plain values, to JSON values with sorted keys.

    Args:
        value: A pydantic model (``config.cluster``, the job's parameters), or a mapping whose values may be
            such models.

    Returns:
        A mapping of strings, numbers, booleans, ``None``, lists and mappings. Defaults are written out, so
        leaving a key out and giving its default are the same.

    >>> canonical({"b": 1, "a": {"d": (1, 2), "c": None}})
    {'a': {'c': None, 'd': [1, 2]}, 'b': 1}
    """
    plain: dict[str, Any] = _plain(value)
    return plain


def config_hash(value: BaseModel | Mapping[str, Any]) -> str:
    """Hash the canonical form: SHA-256, 64 hexadecimal digits.

    >>> config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})
    True
    """
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    # Not str(value): an address in a repr would make every hash a new one.
    raise TypeError(f"{type(value).__name__} has no canonical form; allowed: models, mappings, lists and JSON values")
