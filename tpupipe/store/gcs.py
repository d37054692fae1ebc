"""Objects in Cloud Storage, or in an emulator that speaks its JSON API.

Plain requests on google-auth's session: one request per attempt, so that the retries are ours. Every upload is one
``multipart`` request: emulators honour ``ifGenerationMatch=0`` for that kind only, and one request is what makes
"create if absent" atomic at any size.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar, final
from urllib.parse import quote

from tpupipe.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from tpupipe.store.bucket import FIELDS, BucketInfo, parse_bucket
from tpupipe.store.connection import (
    Connection,
    PastTheEnd,
    decode_crc32c,
    encode_crc32c,
    failure_of,
    verify_crc32c,
    whole_body,
)
from tpupipe.store.objects import (
    Listing,
    Names,
    ObjectInfo,
    Store,
    check_object_name,
    check_prefix,
    check_range,
    crc32c_of,
    folder_of,
    require_folder,
)
from tpupipe.store.retry import Attempt, AttemptError, Failure, RetryPolicy, run
from tpupipe.store.uri import StoreURI

T = TypeVar("T")

_PAGE = 1000
_DELETERS = 8
_COLUMNS = "name,size,crc32c,generation"
_ITEM = f"{_COLUMNS},timeCreated"


@final
class GcsStore(Store):
    """Objects of one bucket below a prefix."""

    def __init__(self, root: StoreURI, policy: RetryPolicy, connection: Connection) -> None:
        super().__init__(root, policy)
        self._connection = connection

    def _at(self, root: StoreURI, policy: RetryPolicy) -> GcsStore:
        return GcsStore(root, policy, self._connection)

    # -- writing -------------------------------------------------------------------------------

    def create(self, name: str, data: bytes) -> ObjectInfo:
        """See ``Store.create``."""
        checksum = crc32c_of(data)

        def attempt(limit: Attempt) -> ObjectInfo:
            try:
                return self._upload(name, data, checksum, limit, {"ifGenerationMatch": "0"})
            except AttemptError as error:
                if error.failure.leaf is not ObjectExistsError or limit.number == 1:
                    raise
                # An earlier attempt of ours may have got through although its answer did not.
                there = self._info(name, limit)
                if (there.size, there.crc32c) != (len(data), checksum):
                    raise
                return there

        return self._counted("create", name, attempt)

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """See ``Store.put``."""
        checksum = crc32c_of(data)
        return self._counted("put", name, lambda limit: self._upload(name, data, checksum, limit, {}))

    def delete(self, name: str, missing_ok: bool = True) -> None:
        """See ``Store.delete``."""

        def attempt(limit: Attempt) -> None:
            try:
                self._connection.request("DELETE", self._object(name), limit).close()
            except AttemptError as error:
                # After a repeated attempt "gone" is what was wanted: the first one got through.
                if error.failure.leaf is not ObjectNotFoundError or not (missing_ok or limit.number > 1):
                    raise

        self._run("delete", name, attempt)

    def delete_prefix(self, prefix: str) -> int:
        """See ``Store.delete_prefix``."""
        names = [info.name for info in self.list(require_folder(self, prefix))]
        if names:
            with ThreadPoolExecutor(min(_DELETERS, len(names)), thread_name_prefix="tpupipe-delete") as pool:
                for _ in pool.map(self.delete, names):
                    pass
        return len(names)

    # -- reading -------------------------------------------------------------------------------

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """See ``Store.read``."""
        check_range(name, start, end)
        if end is not None and end <= start:
            return b""
        whole = start == 0 and end is None
        span = f"bytes={start}" if start < 0 else f"bytes={start}-{'' if end is None else end - 1}"
        headers = {"Accept-Encoding": "identity"} | ({} if whole else {"Range": span})
        path = self._object(name, "/download/storage/v1") + "?alt=media"

        def attempt(limit: Attempt) -> bytes:
            try:
                response = self._connection.request("GET", path, limit, headers=headers)
            except AttemptError as error:
                if isinstance(error.failure, PastTheEnd):
                    return b""
                raise
            body = whole_body(response, limit)
            if whole:
                verify_crc32c(body, response.headers.get("x-goog-hash", ""))
            elif response.status_code == 200:  # the whole object although a part was asked for
                body = body[start:end]
            return body

        return self._run("read", name, attempt)[0]

    def info(self, name: str) -> ObjectInfo:
        """See ``Store.info``."""
        return self._counted("info", name, lambda limit: self._info(name, limit))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See ``Store.list``."""
        query = {"fields": f"items({_ITEM}),nextPageToken"}
        for infos in self._pages(check_prefix(prefix), query, lambda page: [*map(self._parsed, page.get("items", []))]):
            yield from infos

    def pages(self, prefix: str = "") -> Iterator[Listing]:
        """See ``Store.pages``."""
        return self._pages(check_prefix(prefix), {"fields": f"items({_COLUMNS}),nextPageToken"}, self._columns)

    def children(self, prefix: str) -> Names:
        """See ``Store.children``."""
        folder = folder_of(prefix)
        names: set[str] = set()
        query = {"delimiter": "/", "fields": "items(name),prefixes,nextPageToken"}
        for page in self._pages(folder, query, _as_it_is):
            found = [item["name"] for item in page.get("items", [])] + page.get("prefixes", [])
            names.update(self._relative(name).removeprefix(folder).rstrip("/") for name in found)
        return sorted(names - {""})

    def checksum(self, name: str) -> int:
        """See ``Store.checksum``; Cloud Storage vouches for the one it keeps, an emulator's files may have changed."""
        if self._connection.endpoint.emulated:
            return super().checksum(name)
        known = self.info(name).crc32c
        return super().checksum(name) if known is None else known

    def bucket(self) -> BucketInfo:
        """See ``Store.bucket``."""

        def attempt(limit: Attempt) -> BucketInfo:
            path = f"/storage/v1/b/{self.root.bucket}"
            resource = self._connection.json("GET", path, limit, params={"fields": FIELDS})
            try:
                return parse_bucket(self.root.bucket, resource)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise AttemptError(Failure(StoreError, f"the store described the bucket as {resource!r}")) from error

        return run(self.policy, "describe", f"gs://{self.root.bucket}", attempt, failure_of)[0]

    # -- parts ---------------------------------------------------------------------------------

    def _require_root(self) -> None:
        if not self._connection.bucket_seen:
            next(self._pages("", {"maxResults": "1", "fields": "items(name)"}, _as_it_is))

    def _run(self, operation: str, name: str, attempt: Callable[[Attempt], T]) -> tuple[T, int]:
        return run(self.policy, operation, self.uri(check_object_name(name)), attempt, failure_of)

    def _counted(self, operation: str, name: str, attempt: Callable[[Attempt], ObjectInfo]) -> ObjectInfo:
        info, attempts = self._run(operation, name, attempt)
        return dataclasses.replace(info, attempts=attempts)

    def _full(self, name: str) -> str:
        return f"{self.root.path}/{name}" if self.root.path else name

    def _relative(self, full: str) -> str:
        return full.removeprefix(f"{self.root.path}/") if self.root.path else full

    def _object(self, name: str, api: str = "/storage/v1") -> str:
        return f"{api}/b/{self.root.bucket}/o/{quote(self._full(check_object_name(name)), safe='')}"

    def _upload(self, name: str, data: bytes, checksum: int, limit: Attempt, condition: dict[str, str]) -> ObjectInfo:
        boundary = f"=={os.urandom(16).hex()}=="
        metadata = json.dumps({"name": self._full(name), "crc32c": encode_crc32c(checksum)})
        head = (
            f"--{boundary}\r\ncontent-type: application/json; charset=UTF-8\r\n\r\n{metadata}\r\n"
            f"--{boundary}\r\ncontent-type: application/octet-stream\r\n\r\n"
        )
        answer = self._connection.json(
            "POST",
            f"/upload/storage/v1/b/{self.root.bucket}/o",
            limit,
            params={"uploadType": "multipart", "fields": _ITEM, **condition},
            data=b"".join((head.encode(), data, f"\r\n--{boundary}--".encode())),
            headers={"content-type": f'multipart/related; boundary="{boundary}"'},
        )
        info = self._parsed(answer)
        if info.size != len(data) or info.crc32c not in (None, checksum):
            raise AttemptError(
                Failure(StoreError, f"the store holds {info.size} bytes with another checksum than was sent")
            )
        return dataclasses.replace(info, crc32c=checksum)

    def _info(self, name: str, limit: Attempt) -> ObjectInfo:
        return self._parsed(self._connection.json("GET", self._object(name), limit, params={"fields": _ITEM}))

    def _pages(self, prefix: str, query: dict[str, str], parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        query = {"maxResults": str(_PAGE), "prefix": self._full(prefix), **query}
        while True:
            parsed, token = self._page(query, parse)
            yield parsed
            if not token:
                return
            query = {**query, "pageToken": token}

    def _page(self, query: dict[str, str], parse: Callable[[dict[str, Any]], T]) -> tuple[T, str | None]:
        path = f"/storage/v1/b/{self.root.bucket}/o"

        def attempt(limit: Attempt) -> tuple[T, str | None]:
            page = self._connection.json("GET", path, limit, params=query)
            return parse(page), page.get("nextPageToken")

        return run(self.policy, "list", f"gs://{self.root.bucket}/{query['prefix']}", attempt, failure_of)[0]

    def _columns(self, page: dict[str, Any]) -> Listing:
        items = page.get("items", [])
        try:
            return Listing(
                [self._relative(item["name"]) for item in items],
                [int(item.get("size", 0)) for item in items],
                [_checksum(item) for item in items],
                [str(item["generation"]) for item in items],
            )
        except (KeyError, ValueError, TypeError) as error:
            raise AttemptError(Failure(StoreError, f"the store described objects as {items[:3]!r}")) from error

    def _parsed(self, item: dict[str, Any]) -> ObjectInfo:
        try:
            return ObjectInfo(
                name=self._relative(item["name"]),
                size=int(item.get("size", 0)),
                crc32c=_checksum(item),
                generation=str(item["generation"]),
                updated_s=datetime.fromisoformat(item["timeCreated"]).timestamp(),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise AttemptError(Failure(StoreError, f"the store described an object as {item!r}")) from error


def _checksum(item: dict[str, Any]) -> int | None:
    return decode_crc32c(item["crc32c"]) if "crc32c" in item else None


def _as_it_is(page: dict[str, Any]) -> dict[str, Any]:
    return page
