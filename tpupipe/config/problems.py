"""Problems found in a configuration, collected so that one error shows them all."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from tpupipe.errors import ConfigError


class _Missing(enum.Enum):  # an enum member stays itself through pickling
    MISSING = "missing"


MISSING = _Missing.MISSING
"""Value of a :class:`Problem` whose key is not there at all."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration.

    Args:
        path: Dotted path of the key, such as ``"cluster.topology"``; empty for the file as a whole.
        message: What is wrong with it.
        value: The value found, or :data:`MISSING`.
        allowed: What is allowed there; empty when the message says so already.
        nearest: The nearest valid keys or values, best first.
        source: The file or ``--set`` it came from; empty when not known.
    """

    path: str
    message: str
    value: Any = MISSING
    allowed: str = ""
    nearest: tuple[str, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        where = f"{self.path}: " if self.value is MISSING else f"{self.path} = {_short(self.value)}: "
        parts = [f"{where if self.path else ''}{self.message}"]
        if self.nearest:
            parts.append(f"nearest: {', '.join(self.nearest)}")
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        return "; ".join(parts) + (f" (in {self.source})" if self.source else "")


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """Make the one error that lists every problem; they are in ``data["problems"]`` too."""
    ordered = sorted(problems, key=lambda problem: problem.path)
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    lines = "".join(f"\n  - {problem}" for problem in ordered)
    return ConfigError(f"{count} in the configuration:{lines}", problems=ordered)


def validation_problems(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """Translate what pydantic found.

    Args:
        error: Raised by ``model.model_validate``.
        model: The model that was validated; it tells the valid keys.
        prefix: Dotted path of the section ``model`` describes.
    """
    problems = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        path = dotted(prefix, *location)
        kind, context = item["type"], item.get("ctx", {})
        if kind == "extra_forbidden":
            problems.append(unknown_key(path, item["input"], location, model))
        elif kind == "missing":
            problems.append(Problem(path, "is missing and has no default"))
        elif kind == "literal_error":
            choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
            near = tuple(difflib.get_close_matches(str(item["input"]).lower(), choices, n=2))
            problems.append(Problem(path, "is not allowed", item["input"], ", ".join(choices), near))
        else:
            text = item["msg"].removeprefix("Value error, ")
            problems.append(Problem(path, text[:1].lower() + text[1:], item["input"]))
    return problems


def unknown_key(path: str, value: Any, location: Sequence[str], model: type[BaseModel]) -> Problem:
    """Describe a key that ``model`` does not have, with the nearest ones it has.

    Looks first among the keys of the same section, then for the same key in another section, so that a
    ``topology`` at the top level is told about ``cluster.topology``.
    """
    siblings = model_keys(model, location[:-1])
    key = location[-1]
    near = difflib.get_close_matches(key.lower(), siblings, n=3, cutoff=0.6)
    if not near:
        near = [other for other in _all_paths(model) if other.rsplit(".", 1)[-1] == key][:3]
    return Problem(path, "unknown key", value, ", ".join(siblings), tuple(near))


def ignored_keys(value: Any, model: type[BaseModel], prefix: str, location: tuple[str, ...] = ()) -> list[Problem]:
    """Find unknown keys that a model with pydantic's default ``extra="ignore"`` would silently drop."""
    here = _model_at(model, location)
    if here is None or not isinstance(value, Mapping):
        return []
    problems = []
    dropped = here.model_config.get("extra", "ignore") == "ignore"
    known = {alias for name, field in here.model_fields.items() for alias in (name, field.alias) if alias}
    for key, item in value.items():
        at = (*location, str(key))
        if key in known:
            problems += ignored_keys(item, model, prefix, at)
        elif dropped:
            problems.append(unknown_key(dotted(prefix, *at), item, at, model))
    return problems


def with_sources(problems: Iterable[Problem], sources: Mapping[str, str]) -> list[Problem]:
    """Add where each value came from.

    Args:
        problems: Problems without a source.
        sources: Dotted path -> file or ``--set``; the longest path that leads to a problem's counts.
    """
    found = []
    for problem in problems:
        path, source = problem.path, problem.source
        while path and not source:
            source = sources.get(path, "")
            path = path.rpartition(".")[0]
        found.append(replace(problem, source=source))
    return found


def model_keys(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """List the keys of the section at ``location``, sorted; empty when it takes any key."""
    here = _model_at(model, location)
    return sorted(here.model_fields) if here is not None else []


def dotted(*parts: str) -> str:
    """Join path parts, leaving out empty ones."""
    return ".".join(part for part in parts if part)


def _model_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    kind: Any = model
    for key in location:
        current = _model_in(kind)
        if current is not None:
            if key not in current.model_fields:
                return None
            kind = current.model_fields[key].annotation
        else:  # a mapping (any key leads to its value type) or a list (any index to its item type)
            arguments = [a for a in typing.get_args(kind) if a is not type(None)]
            kind = arguments[-1] if arguments else None
    return _model_in(kind)


def _model_in(kind: Any) -> type[BaseModel] | None:
    """The model an annotation stands for: the model itself, or the only one in ``Model | None``."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        found = [m for m in map(_model_in, typing.get_args(kind)) if m is not None]
        return found[0] if len(found) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        path = dotted(prefix, name)
        yield path
        kind = field.annotation
        if typing.get_origin(kind) in (dict, Mapping):
            path, kind = f"{path}.<name>", typing.get_args(kind)[-1]
        inner = _model_in(kind)
        if inner is not None:
            yield from _all_paths(inner, path)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
