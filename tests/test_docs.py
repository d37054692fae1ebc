"""The documentation names everything a user can say, and its links lead somewhere."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

import pytest
import typer
from pydantic import BaseModel

import tpupipe
from tpupipe import cli, errors
from tpupipe.config import Config
from tpupipe.faults.plan import Action
from tpupipe.faults.points import POINTS
from tpupipe.run import RunResult
from tpupipe.stages.result import StageResult

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "docker/**/*.md")
    for path in ROOT.glob(pattern)
    if not path.name.startswith(".")
)
GUIDE = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs/operations-gke.md").read_text(encoding="utf-8")


def commands(command: Any, path: str) -> list[tuple[str, Any]]:
    """Every command below ``command`` with what is typed for it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [found for name, below in inner.items() for found in commands(below, f"{path} {name}")]


def config_keys(model: type[BaseModel], path: str = "") -> list[str]:
    """Dotted paths of all keys; a section with names of the user's own counts as ``<name>``."""
    found = []
    for name, field in model.model_fields.items():
        key = f"{path}{name}"
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is None:
            found.append(key)
        else:
            found += config_keys(inner, f"{key}.<name>." if get_args(field.annotation)[:1] == (str,) else f"{key}.")
    return found


def code_spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def headings(text: str) -> set[str]:
    """Anchors that a Markdown page's headings get."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


COMMANDS = commands(typer.main.get_command(cli.app), "tpupipe")
ERRORS = sorted(
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.TpupipeError) and kind is not errors.TpupipeError
)


def test_there_is_something_to_check():
    """The lists below are not empty by mistake: they hold a known member each."""
    assert "tpupipe cluster up" in dict(COMMANDS)
    assert {"store.uri", "stages.<name>.checkpoint.keep", "budgets.app_errors", "sample"} <= set(config_keys(Config))
    assert "RunHeldError" in ERRORS
    assert ROOT / "docs/decisions" in {page.parent for page in PAGES}


@pytest.mark.parametrize(("typed", "command"), COMMANDS, ids=[typed for typed, _ in COMMANDS])
def test_the_guide_has_every_command_and_option(typed, command):
    """Each command as it is typed, and each of its options by its long and short name."""
    assert typed in GUIDE
    spans = " ".join(code_spans(GUIDE)).split()
    options = [name for p in command.params if p.param_type_name == "option" for name in p.opts]
    assert options
    assert [name for name in options if name not in spans] == []


def test_the_guide_has_every_configuration_key():
    """In full, as code, so that a search for it finds it."""
    assert [key for key in config_keys(Config) if key not in code_spans(GUIDE)] == []


def test_the_guide_has_no_configuration_key_that_is_none():
    """A key that was removed or misspelt does not stay in the tables."""
    keys = set(config_keys(Config))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    rows = re.findall(r"^\| `([a-z_]+(?:\.(?:<name>|[a-z_]+))+)` \|", GUIDE, flags=re.MULTILINE)
    named = [row for row in rows if row.partition(".")[0] in sections and row not in POINTS]
    assert len(named) > 20
    assert [row for row in named if row not in keys] == []


def test_the_guide_has_every_default_of_the_sections():
    """A row of a key shows the default that the schema has, where that is a number or a word."""
    wrong = []
    for name, field in Config.model_fields.items():
        model = field.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        for key, inner in model.model_fields.items():
            row = re.search(rf"^\| `{name}\.{key}` \|(.+)\|$", GUIDE, flags=re.MULTILINE)
            default = inner.default
            if row is None or isinstance(default, bool) or not isinstance(default, int | float | str):
                continue
            if f"{default:g}" not in row[1].split() if isinstance(default, int | float) else default not in row[1]:
                wrong.append((f"{name}.{key}", default))
    assert wrong == []


def test_the_guide_has_every_fault_point_and_action():
    """With the fact that a value is compared with."""
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `(\w+)` \|", GUIDE, flags=re.MULTILINE))
    assert {name: rows.get(name) for name in POINTS} == {name: info.fact for name, info in POINTS.items()}
    assert [action for action in Action if f"| `{action}` |" not in GUIDE] == []


def test_the_guide_has_every_option_of_a_declaration():
    """The stages, sources, buckets and policies that a job is made of, with all their arguments."""
    spans = code_spans(GUIDE)
    words = {word for span in spans for word in re.findall(r"\w+", span)}
    missing = [
        f"{kind}.{option}"
        for kind in (
            "Preprocess",
            "Train",
            "Infer",
            "Files",
            "JsonLines",
            "Parquet",
            "Buckets",
            "Pretrained",
            "Every",
            "OnPreemption",
        )
        for option in inspect.signature(getattr(tpupipe, kind)).parameters
        if option not in words
    ]
    assert missing == []


def test_the_guide_has_every_field_of_the_result():
    """Of the run and of a stage."""
    spans = code_spans(GUIDE)
    fields = [*RunResult.__dataclass_fields__, *StageResult.__dataclass_fields__]
    assert [name for name in fields if name not in spans] == []


def test_the_guide_has_every_exit_status():
    """Each status that an error can end with, with its classes where they are few."""
    for name in ERRORS:
        status = getattr(errors, name).exit_status
        if status != 1:
            row = re.search(rf"^\| {status} \|.*$", GUIDE, flags=re.MULTILINE)
            assert row is not None, status
            assert f"`{name}`" in row[0]


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_its_advice(name):
    """A user who meets the class finds what to do."""
    assert f"`{name}`" in OPERATIONS


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_resolve(page):
    """Relative links lead to a file of the project, and their anchors to a heading of it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        leads = target.exists() and target.is_relative_to(ROOT)
        if not leads or (anchor and anchor not in headings(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_named_files_exist(page):
    """A file of the project that a page names, as code, is there."""
    spans = code_spans(page.read_text(encoding="utf-8"))
    named = {span for span in spans if re.fullmatch(r"(?:tests|tpupipe|jobs|configs|docs|docker)/[\w./-]+", span)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_page_can_be_reached_from_the_readme():
    """Following links from README.md leads to every page."""
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        ahead += [(page.parent / link).resolve() for link in links if not re.match(r"[a-z]+:", link)]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in seen] == []


def test_the_image_has_the_ray_of_the_constraints():
    """The base image's Ray is the pinned one, and its Python is one that the package takes."""
    image = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert pinned is not None
    assert re.search(rf"^FROM rayproject/ray:{re.escape(pinned[1])}-py311$", image, flags=re.MULTILINE)
    copied = re.findall(r"^COPY --chown=\S+ (.+) \S+$", image, flags=re.MULTILINE)
    assert [name for names in copied for name in names.split() if not (ROOT / name).exists()] == []
