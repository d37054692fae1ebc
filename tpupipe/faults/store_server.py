"""The proxy's own process: forwards HTTP to the store, and carries out what ``store_faults.decide`` says.

Only this module imports the web framework; it runs in the process that ``store_proxy`` starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web
from multidict import CIMultiDict
from yarl import URL

from tpupipe.errors import UsageError
from tpupipe.faults.store_faults import SPOILS, Decision, StoreFault, StoreFaults, decide, fresh_marks, withdrawn
from tpupipe.faults.store_requests import CONTROL_PATH, Operation, StoreRequest, identify, upload_id, wants_body

HOST = "127.0.0.1"

_HEAD_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10
_LOG_LENGTH = 1000
_LOST_REMEMBERED = 1000
_DRIP_S = 0.1
_HOP = ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect")
_MADE_HERE = ("host", "date", "server")
_REASONS = {401: "authError", 403: "forbidden", 404: "notFound", 412: "conditionNotMet", 429: "rateLimitExceeded"}


class Forwarder:
    """Handles every request that is not about the proxy itself.

    Args:
        upstream: ``http://host:port`` of the store.
        faults: The faults to begin with.
    """

    def __init__(self, upstream: str, faults: StoreFaults) -> None:
        self.upstream = upstream
        self.url = ""
        self.requests: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.log: deque[dict[str, Any]] = deque(maxlen=_LOG_LENGTH)
        self._uploads: dict[str, tuple[str, str]] = {}
        self._lost: dict[str, tuple[int, CIMultiDict[str], bytes]] = {}  # by upload: its last answer
        self._created: dict[tuple[str, str], float] = {}
        self._session: ClientSession
        self.use(faults)

    def use(self, faults: StoreFaults) -> None:
        """Replaces the faults; each starts anew."""
        self.faults = faults
        self._marks = fresh_marks(faults)

    async def connected(self, _: web.Application) -> AsyncIterator[None]:
        """Holds the connections to the store while the application runs."""
        async with ClientSession(
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=None, sock_connect=10.0),
            auto_decompress=False,  # what the store sends is what the client gets
            read_bufsize=1 << 20,
        ) as self._session:
            yield

    # -- control -------------------------------------------------------------------------------

    async def control(self, request: web.Request) -> web.Response:
        """``GET``: what was done so far. ``PUT``: a JSON list of faults that replace those in force."""
        if request.method == "PUT":
            try:
                self.use(StoreFaults.parse(*await request.json()))
            except (UsageError, TypeError, ValueError) as error:
                return web.json_response({"error": str(error)}, status=400)
        return web.json_response(
            {
                "upstream": self.upstream,
                "faults": self.faults.texts,
                "requests": dict(self.requests),
                "fired": dict(self.fired),
                "log": list(self.log),
            }
        )

    def _decide(self, asked: StoreRequest) -> Decision:
        self.requests[asked.operation] += 1
        decision, self._marks = decide(self.faults, self._marks, asked, time.monotonic())
        for fault in decision.hits:
            if fault.kind not in SPOILS:
                self._note(asked, fault)
        return decision

    def _note(self, asked: StoreRequest, fault: StoreFault) -> None:
        self.fired[fault.text] += 1
        about = {"operation": asked.operation, "bucket": asked.bucket, "name": asked.name}
        self.log.append({"at_s": time.time(), "fault": fault.text, **about})

    def _spoils(self, asked: StoreRequest, fault: StoreFault, answer: ClientResponse) -> bool:
        """Whether a fault that spoils answers has one to spoil; if not, it waits for the next request."""
        if 200 <= answer.status < 300:
            self._note(asked, fault)
            return True
        self._marks = withdrawn(self.faults, self._marks, fault)
        return False

    # -- forwarding ----------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Decides about one request and carries the decision out."""
        target = request.raw_path
        head = await _beginning(request) if wants_body(request.method, target) else b""
        if (told := self._lost.get(upload_id(target))) is not None:
            # Cloud Storage gives the answer again; the embedded server has forgotten the upload with its first answer.
            await _read_on(request)
            status, headers, body = told
            return web.Response(status=status, headers=_without_length(headers), body=body)
        asked = identify(request.method, target, head, self._uploads)
        decision = self._decide(asked)
        for delay in decision.delays:
            await asyncio.sleep(delay.seconds)
        fault = decision.fault
        if fault is not None and (kept_off := await _kept_off(request, fault, head)) is not None:
            return kept_off
        try:
            return await self._forward(request, asked, fault, head)
        except ClientError as error:
            return web.Response(status=502, text=f"{self.upstream} does not answer the proxy: {error!r}")

    async def _forward(
        self, request: web.Request, asked: StoreRequest, fault: StoreFault | None, head: bytes
    ) -> web.StreamResponse:
        kind = "" if fault is None else fault.kind
        async with self._session.request(
            request.method,
            URL(self.upstream + request.raw_path, encoded=True),
            headers=_kept(request.headers),
            data=_body(request, head) if request.body_exists else None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as answer:
            if fault is not None and kind in SPOILS and not self._spoils(asked, fault, answer):
                kind = ""
            headers = _kept(answer.headers)
            self._learn(request.raw_path, asked, answer, headers)
            length = answer.content_length
            pieces: AsyncIterator[bytes] = answer.content.iter_chunked(_PIECE_BYTES)
            if kind == "lost":
                body = await answer.read()
                if (upload := upload_id(request.raw_path)) and answer.status in (200, 201):
                    self._lost[upload] = answer.status, headers, body
                    if len(self._lost) > _LOST_REMEMBERED:
                        del self._lost[next(iter(self._lost))]
                return _reset(request)
            if asked.operation is not Operation.DOWNLOAD and "json" in answer.content_type:
                # An answer may name the store (selfLink, mediaLink); a client that follows must come back here.
                body = (await answer.read()).replace(self.upstream.encode(), self.url.encode())
                if kind == "stale-list" and fault is not None and answer.status == 200:
                    body = await self._stale(body, asked, fault.seconds)
                length, pieces = len(body), _once(body)
            headers.popall("Content-Length", None)
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
            if request.method == "HEAD" or answer.status in (204, 304):
                response.content_length = answer.content_length
                length = 0
            elif length is not None:
                response.content_length = length
            else:
                response.enable_chunked_encoding()
            return await _send(request, response, pieces, length, kind)

    def _learn(self, target: str, asked: StoreRequest, answer: ClientResponse, headers: CIMultiDict[str]) -> None:
        """Remembers uploads under way and what was created, and leads the client's next request here."""
        location = headers.get("Location", "")
        if location.startswith(self.upstream):
            rest = location.removeprefix(self.upstream)
            headers["Location"] = self.url + rest
            if asked.operation is Operation.CREATE:
                self._uploads[rest] = asked.bucket, asked.name
                return
        done = asked.operation is Operation.CREATE and answer.status in (200, 201)
        if done and (asked.begins or target in self._uploads):
            self._uploads.pop(target, None)
            self._created[asked.bucket, asked.name] = time.monotonic()

    async def _stale(self, body: bytes, asked: StoreRequest, seconds: float) -> bytes:
        """A listing without the objects created in the last ``seconds``, and without folders of nothing else."""
        since_s = time.monotonic() - seconds
        new = {name for (bucket, name), at_s in self._created.items() if bucket == asked.bucket and at_s > since_s}
        page = json.loads(body)
        if page.get("items"):
            page["items"] = [item for item in page["items"] if item.get("name") not in new]
        if page.get("prefixes"):
            page["prefixes"] = [
                folder
                for folder in page["prefixes"]
                if not any(name.startswith(folder) for name in new) or await self._has_others(asked.bucket, folder, new)
            ]
        return json.dumps(page).encode()

    async def _has_others(self, bucket: str, folder: str, new: set[str]) -> bool:
        url = f"{self.upstream}/storage/v1/b/{quote(bucket)}/o?fields=items(name),nextPageToken&prefix={quote(folder)}"
        token = ""
        while True:
            async with self._session.get(URL(url + token, encoded=True)) as answer:
                page = await answer.json()
            if any(item["name"] not in new for item in page.get("items", ())):
                return True
            if not page.get("nextPageToken"):
                return False
            token = f"&pageToken={quote(page['nextPageToken'], safe='')}"


def _kept(headers: Any) -> CIMultiDict[str]:
    """Headers that go on to the other side."""
    named = [name.strip().lower() for name in headers.get("Connection", "").split(",")]
    dropped = {*_HOP, *_MADE_HERE, *named}
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in dropped)


async def _kept_off(request: web.Request, fault: StoreFault, head: bytes) -> web.Response | None:
    """The end of a request that never reaches the store; ``None`` if it does."""
    if fault.kind == "outage":
        return _reset(request)
    if fault.kind == "block":
        # The handler is cancelled when the client hangs up.
        await (asyncio.sleep(fault.seconds) if fault.seconds else asyncio.Event().wait())
        return _reset(request)
    if fault.status is not None:
        await _read_on(request)
        return _refusal(fault, fault.status)
    if fault.kind == "reset" and request.body_exists:
        await _read_on(request, (request.content_length or 2 * _PIECE_BYTES) // 2 - len(head))
        return _reset(request)
    return None


def _without_length(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() != "content-length")


async def _beginning(request: web.Request) -> bytes:
    """The first bytes of the request's body, which then are gone from its stream."""
    head = b""
    while len(head) < _HEAD_BYTES and not request.content.at_eof():
        head += await request.content.readany()
    return head


async def _body(request: web.Request, head: bytes) -> AsyncIterator[bytes]:
    if head:
        yield head
    async for piece in request.content.iter_chunked(_PIECE_BYTES):
        yield piece


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _read_on(request: web.Request, limit: int | None = None) -> None:
    """Takes the rest of the body (at most ``limit`` bytes of it): a client may listen only after it has sent all."""
    taken = 0
    while (limit is None or taken < limit) and (piece := await request.content.readany()):
        taken += len(piece)


async def _send(
    request: web.Request, response: web.StreamResponse, pieces: AsyncIterator[bytes], length: int | None, kind: str
) -> web.StreamResponse:
    """Sends the answer, spoiled if ``kind`` says so. Without a ``length`` the first piece stands for the half."""
    breaks = kind in ("truncate", "reset", "trickle")
    if breaks and length == 0:
        return _reset(request)
    await response.prepare(request)
    half = None if not breaks else 1 if length is None else length // 2
    sent = 0
    async for received in pieces:
        piece = received
        if kind == "damage" and sent == 0 and piece:
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        if kind == "trickle":
            for byte in piece[: max(0, len(piece) - 1)]:
                await response.write(bytes([byte]))
                await asyncio.sleep(_DRIP_S)
            await asyncio.Event().wait()  # the last byte never comes; the handler is cancelled with the connection
        if half is not None and length is not None:
            piece = piece[: half - sent]
        if piece:
            await response.write(piece)
        sent += len(piece)
        if half is not None and sent >= half:
            return _reset(request) if kind == "reset" else _close(request, response)
    await response.write_eof()
    return response


def _reset(request: web.Request) -> web.Response:
    """Ends the connection with RST; the answer that is given back is never sent."""
    if request.transport is not None:
        # Lingering for no time at all makes closing send RST instead of FIN.
        request.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        request.transport.abort()
    return web.Response(status=500)


def _close(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Ends the connection properly, in the middle of the answer."""
    response.force_close()
    if request.transport is not None:
        request.transport.close()
    return response


def _refusal(fault: StoreFault, status: int) -> web.Response:
    message = f"injected by store fault {fault.text}"
    reason = _REASONS.get(status, "backendError")
    body = {"error": {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}}
    headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s else None
    return web.json_response(body, status=status, headers=headers)


# -- the process -----------------------------------------------------------------------------------


def serve(upstream: str, state: Path, faults: StoreFaults, *, port: int = 0) -> None:
    """Runs the proxy until the process is ended; ``state`` says where once it listens.

    Args:
        upstream: ``http://host:port`` of the store.
        state: JSON file that is written then: ``endpoint``, ``upstream``, ``pid``.
        faults: The faults to begin with.
        port: Port on 127.0.0.1; 0 is any free one.
    """
    asyncio.run(_serve(f"http://{urlsplit(upstream).netloc}", state, faults, port))


async def _serve(upstream: str, state: Path, faults: StoreFaults, port: int) -> None:
    forwarder = Forwarder(upstream, faults)
    application = web.Application()
    application.cleanup_ctx.append(forwarder.connected)
    application.router.add_route("*", CONTROL_PATH, forwarder.control)
    application.router.add_route("*", "/{rest:.*}", forwarder.handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, auto_decompress=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        forwarder.url = f"http://{HOST}:{runner.addresses[0][1]}"
        temporary = state.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"endpoint": forwarder.url, "upstream": upstream, "pid": os.getpid()}))
        temporary.replace(state)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
