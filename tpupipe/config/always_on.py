"""Checkpoints cannot be switched off: the search for every way somebody might try.

A key is taken for a checkpoint switch by its name, wherever it stands. Names that only mention a checkpoint
(``init_checkpoint``, ``checkpoint_uri``, ``gradient_checkpointing``) are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tpupipe.config.problems import Problem, dotted

REFUSAL = "checkpoints cannot be switched off"

_ALLOWED = "leave the key out, or say how often: checkpoint: {steps: 100, keep: 3}"

# Names are compared in lower case without "_", "-" and blanks.
_VERB = r"(?:enable|use|with|do|save|write|make|auto|should|training|train|keep|max|num|n)"
_ASPECT = (
    r"(?:enabled?|active|on|steps?|minutes?|seconds|every|each|epochs?|n|interval|intervals|freq|frequency|policy|"
    r"strategy|mode|saving|save|saves|keep|tokeep)"
)
_NEGATION = r"(?:no|not|disable|skip|without|never|omit)"
_CHECKPOINT = r"(?:checkpoint|checkpoints|checkpointing|ckpt|ckpts)"
_SWITCH = re.compile(rf"{_VERB}*{_CHECKPOINT}{_ASPECT}*\Z")
_NEGATED_SWITCH = re.compile(rf"{_NEGATION}{_VERB}*{_CHECKPOINT}{_ASPECT}*\Z|{_VERB}*{_CHECKPOINT}(?:disabled?|off)\Z")
# Only in the framework's own sections: a job may call anything of its own "save".
_SAVE = re.compile(rf"(?:enable|auto)*(?:save|saves|saving){_ASPECT}*\Z")
_NEGATED_SAVE = re.compile(rf"{_NEGATION}(?:save|saves|saving)\Z")

_INNER_SWITCH = re.compile(rf"(?:save|saves|saving|{_ASPECT})+\Z")
_INNER_NEGATION = re.compile(rf"disabled?\Z|off\Z|{_NEGATION}\Z")

_OFF_WORDS = frozenset(("", "false", "off", "none", "null", "nil", "never", "no", "n", "f", "~", "disabled", "disable"))
_ZERO = re.compile(r"[+-]?0+(\.0*)?(e[+-]?\d+)?\s*[a-z]*\Z")  # "0", "0.0", "0s", "0 steps"


def switched_off(raw: Mapping[str, Any]) -> list[Problem]:
    """Find everything in a raw configuration that would switch checkpoints off.

    Args:
        raw: The merged configuration, before it is typed. ``labels`` are the user's own words and not read.

    Returns:
        One problem for each offending key; the value is the one found.
    """
    return list(_search(raw, ()))


def _search(value: Any, path: tuple[str, ...]) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            at = (*path, str(key))
            if at[0] == "labels":
                continue
            offence = _offence(_plain(str(key)), item, in_job="job" in path[:2])
            if offence is None:
                yield from _search(item, at)
            else:
                yield Problem(dotted(*at, *offence), REFUSAL, _at(item, offence), _ALLOWED)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _search(item, (*path, str(index)))


def _offence(name: str, value: Any, *, in_job: bool) -> tuple[str, ...] | None:
    """Path of the offending value below the key called ``name``; ``()`` for its own value, ``None`` for no offence."""
    if _NEGATED_SWITCH.match(name) or (not in_job and _NEGATED_SAVE.match(name)):
        return None if _is_off(value) else ()
    if not (_SWITCH.match(name) or (not in_job and _SAVE.match(name))):
        return None
    if _is_off(value):
        return ()
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = _plain(str(key))
            # steps: null inside a mapping only means "not by steps"; zero and the words mean never.
            if _INNER_SWITCH.match(inner) and item is not None and _is_off(item):
                return (str(key),)
            if _INNER_NEGATION.match(inner) and not _is_off(item):
                return (str(key),)
    return None


def _is_off(value: Any) -> bool:
    if isinstance(value, str):
        word = value.strip().lower()
        return word in _OFF_WORDS or bool(_ZERO.match(word))
    if isinstance(value, list | tuple):
        return not value or all(_is_off(item) for item in value)
    return value is None or (isinstance(value, bool | int | float) and value == 0)


def _plain(key: str) -> str:
    return re.sub(r"[\s_-]+", "", key).lower()


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = next(item for name, item in value.items() if str(name) == key)
    return value
