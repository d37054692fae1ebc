"""YAML as configuration: safe, no duplicate keys, JSON values only, and ``3e-4`` is a number."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tpupipe.config.problems import Problem, dotted


class _DuplicateKeyError(yaml.MarkedYAMLError):
    pass


class _Loader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that refuses duplicate keys.

    YAML 1.1 reads ``2026-01-01`` as a date and ``3e-4`` as a string; in a configuration the first is meant as
    text and the second as a number (as in YAML 1.2 and JSON).
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 -- the base class declares it without ClassVar
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, yaml.Node] = {}
        for key_node, _ in node.value:  # before "<<" is expanded: its keys may be overridden
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise _DuplicateKeyError(None, None, f"duplicate key {key_node.value!r}", key_node.start_mark)
                seen[key_node.value] = key_node
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def read_file(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Read one configuration file.

    Returns:
        Its content (empty if it cannot be used) and the problems found.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}, [Problem("", f"configuration file {str(path)!r} does not exist")]
    except (OSError, UnicodeDecodeError) as error:
        return {}, [Problem("", f"configuration file {str(path)!r} cannot be read: {error}")]
    value, problems = read_value(text, source=str(path))
    if value is None:
        return {}, problems
    if not isinstance(value, dict):
        kind = type(value).__name__
        return {}, [*problems, Problem("", f"the file is a {kind}; allowed: a mapping of sections", source=str(path))]
    return value, problems


def read_value(text: str, *, source: str) -> tuple[Any, list[Problem]]:
    """Read one YAML document.

    Args:
        text: The document.
        source: What to call it in problems.

    Returns:
        Its value (``None`` if it cannot be used) and the problems found.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 -- _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return None, [Problem("", f"bad YAML, {where}{error.problem or error.context}", source=source)]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, [Problem("", f"bad YAML: {error}", source=source)]
    problems = _foreign(value, "", source, frozenset())
    return (None if problems else value), problems


def _foreign(value: Any, path: str, source: str, parents: frozenset[int]) -> list[Problem]:
    """Find what JSON does not have: keys that are no strings, sets, bytes, values that contain themselves."""
    if id(value) in parents:
        return [Problem(path, "contains itself (a YAML alias to its own parent)", source=source)]
    inside = parents | {id(value)}
    problems = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                problems += _foreign(item, dotted(path, key), source, inside)
            else:
                quote = "put it in quotes (YAML reads a bare on, off, yes, no as true or false, a bare 1 as a number)"
                problems.append(
                    Problem(dotted(path, str(key)), f"the key {key!r} is not a string; {quote}", source=source)
                )
    elif isinstance(value, list):
        for index, item in enumerate(value):
            problems += _foreign(item, dotted(path, str(index)), source, inside)
    elif not (value is None or isinstance(value, str | bool | int | float)):
        allowed = "mapping, list, string, number, true, false, null"
        problems.append(Problem(path, f"is a {type(value).__name__}", value, allowed, source=source))
    return problems
