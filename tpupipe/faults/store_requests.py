"""What a request to Cloud Storage is about: its operation and its object. Pure, no sockets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

CONTROL_PATH = "/_tpupipe/store-faults"  # of the proxy itself: no bucket's name begins with '_', so no API has it


class Operation(StrEnum):
    """What a request asks the store for."""

    CREATE = "create"  # whatever writes: uploads and their parts, copies, compositions, changes of metadata
    READ = "read"  # an object's metadata
    DOWNLOAD = "download"  # an object's content
    LIST = "list"  # the objects of a bucket
    DELETE = "delete"  # one object, or several in a batch
    OTHER = "other"  # buckets and the rest


@dataclass(frozen=True)
class StoreRequest:
    """One request.

    Attributes:
        method: The HTTP verb.
        operation: What it asks for.
        bucket: Bucket, empty if there is none.
        name: Object; for a listing its prefix; for a batch all objects, one a line.
        begins: Whether a write of an object begins with it; false for the later parts of an upload.
    """

    method: str
    operation: Operation
    bucket: str = ""
    name: str = ""
    begins: bool = False


_BUCKET_PATH = re.compile(r"(?:/(?:upload|download|resumable/upload))?/(?:storage/v1/)?b/([^/]+)/o(?:/([^/]*)(/.*)?)?")
_COPY = re.compile(r"/(?:copyTo|rewriteTo)/b/([^/]+)/o/([^/]+)")
_BATCHED = re.compile(r"^([A-Z]+) \S*?/b/([^/\s]+)/o/([^/?\s]+)", re.MULTILINE)
_METADATA = re.compile(rb"\r?\n\r?\n\s*(\{.*?\})\s*\r?\n--", re.DOTALL)


def wants_body(method: str, target: str) -> bool:
    """Whether the object of this request may be named in its body only, so that ``identify`` needs its beginning."""
    parts = urlsplit(target)
    query = parse_qs(parts.query)
    if parts.path.startswith("/batch"):
        return True
    return method == "POST" and parts.path.startswith("/upload/") and not query.keys() & {"name", "upload_id"}


def upload_id(target: str) -> str:
    """The resumable upload that a request is a part of, empty for others. Clients quote the rest as they like.

    >>> upload_id("/upload/storage/v1/b/data/o?uploadType=resumable&name=a%2Fb&upload_id=17")
    '17'
    """
    return parse_qs(urlsplit(target).query).get("upload_id", [""])[0]


def identify(
    method: str, target: str, head: bytes = b"", uploads: Mapping[str, tuple[str, str]] | None = None
) -> StoreRequest:
    """What a request is about.

    Args:
        method: The HTTP verb.
        target: Path and query as sent, with its percent signs.
        head: The beginning of the body, where ``wants_body`` asks for it.
        uploads: Target of each resumable upload under way to its bucket and object.

    Example:
        >>> request = identify("GET", "/storage/v1/b/data/o/run%2Fx?alt=media")
        >>> request.operation.value, request.bucket, request.name
        ('download', 'data', 'run/x')
    """
    under_way = (uploads or {}).get(target)
    if under_way is not None:
        kind = Operation.DELETE if method == "DELETE" else Operation.CREATE
        return StoreRequest(method, kind, *under_way)
    parts = urlsplit(target)
    if parts.path.startswith("/batch"):
        return _batch(method, head)
    found = _BUCKET_PATH.fullmatch(parts.path)
    return _xml(method, parts.path) if found is None else _json_api(method, parts, found, head)


def _json_api(method: str, parts: SplitResult, found: re.Match[str], head: bytes) -> StoreRequest:
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    bucket, name, rest = unquote(found[1]), unquote(found[2] or ""), found[3] or ""
    if parts.path.startswith("/upload/"):
        begins = method == "POST" and "upload_id" not in query
        return StoreRequest(method, Operation.CREATE, bucket, query.get("name") or _named_in(head), begins)
    if not name:
        kind = Operation.LIST if method in ("GET", "HEAD") else Operation.OTHER
        return StoreRequest(method, kind, bucket, query.get("prefix", ""))
    if copied := _COPY.fullmatch(rest):
        return StoreRequest(method, Operation.CREATE, unquote(copied[1]), unquote(copied[2]), begins=True)
    content = query.get("alt") == "media" or parts.path.startswith("/download/")
    return _about_object(method, bucket, name, content=content, makes=rest == "/compose")


def _about_object(method: str, bucket: str, name: str, *, content: bool, makes: bool) -> StoreRequest:
    kinds = {
        "GET": Operation.DOWNLOAD if content else Operation.READ,
        "HEAD": Operation.READ,
        "DELETE": Operation.DELETE,
    }
    kind = kinds.get(method, Operation.CREATE)
    return StoreRequest(method, kind, bucket, name, begins=makes and kind is Operation.CREATE)


def _xml(method: str, path: str) -> StoreRequest:
    """The older API: ``/bucket/object``."""
    bucket, _, name = unquote(path).lstrip("/").partition("/")
    if path.startswith("/storage/") or not bucket:
        return StoreRequest(method, Operation.OTHER)
    if not name:
        return StoreRequest(method, Operation.LIST if method == "GET" else Operation.OTHER, bucket)
    return _about_object(method, bucket, name, content=True, makes=True)


def _batch(method: str, head: bytes) -> StoreRequest:
    inner = _BATCHED.findall(head.decode(errors="replace"))
    names = "\n".join(unquote(name) for _, _, name in inner)
    deletes = bool(inner) and inner[0][0] == "DELETE"
    return StoreRequest(method, Operation.DELETE if deletes else Operation.OTHER, inner[0][1] if inner else "", names)


def _named_in(head: bytes) -> str:
    """The object that an upload's metadata names: the whole body, or the first part of a multipart one."""
    found = _METADATA.search(head)
    try:
        name = json.loads(found[1] if found else head)["name"]
    except (ValueError, KeyError, TypeError):
        return ""  # the server is the one to refuse it
    return str(name)
