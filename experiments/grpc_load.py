"""Load over gRPC for the experiments: a bare client of HTTP/2, a tenth of what a client of grpc.aio costs.

A client that costs as much as the server takes the processor from it on the same machine just when it offers
more than the server can do. So frames are made once, and only the number of the stream is put in; the server
is told to keep no table of headers, so that a status is found without decoding the others (RFC 9113, 7541).
"""

import re
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from .errors import ExperimentError
from .http_load import Client

STREAMS = 100
"""Calls at once on a connection."""
_SERVICE = "inference.GRPCInferenceService"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_FRAME, _WINDOW, _MOST = 16384, 65535, 2**31 - 1
_REFRESH = 2**24
_STATUS = re.compile(rb"grpc-status([\x01\x02])(\d+)")
# What the statuses are called in HTTP, as the outcomes of a load are told.
_OF_HTTP = {0: 200, 4: 504, 8: 429, 14: 503}


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(value: str) -> bytes:
    if len(value) > 126:
        raise ExperimentError(f"A header of this client has at most 126 bytes; got {len(value)}.")
    return bytes([len(value)]) + value.encode()


_HELLO = b"".join(
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        # No table of headers, no pushes, as much as comes.
        _frame(_SETTINGS, 0, 0, struct.pack(">HIHIHI", 1, 0, 2, 0, 4, _MOST)),
        _frame(_UPDATE, 0, 0, struct.pack(">I", _MOST - _WINDOW)),
    )
)


def _counted(request: bytes) -> int:
    """Bytes that the window counts: those of data, which follow one frame of headers."""
    body = len(request) - 9 - int.from_bytes(request[:3], "big")
    return body - 9 * -(-body // (_FRAME + 9))


def infer_call(message: bytes, timeout_s: float | None, method: str = "ModelInfer") -> bytes:
    """The frames of one call, for stream 0.

    Args:
        message: the encoded request, 60,000 bytes at most.
        timeout_s: told to the server, in whole microseconds; None for none.
        method: of the inference service.

    Raises:
        ExperimentError: the message is longer.
    """
    body = b"\0" + struct.pack(">I", len(message)) + message
    if len(body) > 60_000:
        raise ExperimentError(f"A message of this client has at most 60,000 bytes; got {len(message)}.")
    block = b"\x83\x86\x04" + _text(f"/{_SERVICE}/{method}") + b"\x01" + _text("servax")
    told = {"te": "trailers", "content-type": "application/grpc"}
    if timeout_s is not None:
        told["grpc-timeout"] = f"{round(timeout_s * 1e6):d}u" if timeout_s < 99 else f"{round(timeout_s):d}S"
    block += b"".join(b"\x00" + _text(name) + _text(value) for name, value in told.items())
    parts = [body[at : at + _FRAME] for at in range(0, len(body), _FRAME)]
    last = len(parts) - 1
    return _frame(_HEADERS, _END_HEADERS, 0, block) + b"".join(
        _frame(_DATA, _END_STREAM if place == last else 0, 0, part) for place, part in enumerate(parts)
    )


class GrpcCaller(Client):
    """A connection with many calls at once; each is told its status in HTTP's terms, 0 if all breaks."""

    ended = False
    at_once = STREAMS

    def __init__(self) -> None:
        super().__init__()
        self._tellers: dict[int, Callable[[int], None]] = {}
        self._next = 1
        self._window = _WINDOW
        self._kept: deque[tuple[bytes, Callable[[int], None]]] = deque()
        self._read = 0

    def connection_made(self, transport: Any) -> None:
        """Say hello."""
        super().connection_made(transport)
        transport.write(_HELLO)

    def abort(self) -> None:
        """Leave at once; nobody is told of an answer any more."""
        self._tellers.clear()
        super().abort()

    def send(self, request: bytes, told: Callable[[int], None]) -> None:
        """Send; `told` gets the status of the answer."""
        size = _counted(request)
        if self._kept or self._window < size:
            self._kept.append((request, told))
            return
        self._window -= size
        stream, self._next = self._next, self._next + 2
        self._tellers[stream] = told
        out, at, number = bytearray(request), 0, stream.to_bytes(4, "big")
        while at < len(out):
            out[at + 5 : at + 9] = number
            at += 9 + int.from_bytes(out[at : at + 3], "big")
        self._transport.write(out)

    def data_received(self, data: bytes) -> None:
        """Tell of each answer that is complete."""
        buffer = self._buffer + data if self._buffer else data
        at, size = 0, len(buffer)
        while size - at >= 9:
            length = int.from_bytes(buffer[at : at + 3], "big")
            if size - at < 9 + length:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, buffer[at + 9 : at + 9 + length])
            at += 9 + length
        self._buffer = buffer[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _HEADERS and flags & _END_STREAM:
            found = _STATUS.search(payload)
            self._tell(stream, _OF_HTTP.get(int(found[2]), 500) if found else 500)
        elif kind == _DATA:
            self._read += len(payload)
            if self._read > _REFRESH:
                self._transport.write(_frame(_UPDATE, 0, 0, struct.pack(">I", self._read)))
                self._read = 0
        elif kind == _UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            self._send_kept()
        elif kind == _RST:
            self._tell(stream, {7: 503, 8: 504, 11: 429}.get(int.from_bytes(payload, "big"), 500))
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY:
            self._transport.close()

    def _tell(self, stream: int, status: int) -> None:
        told = self._tellers.pop(stream, None)
        if told is not None:
            told(status)

    def _send_kept(self) -> None:
        while self._kept and _counted(self._kept[0][0]) <= self._window:
            kept, self._kept = self._kept, deque()
            request, told = kept.popleft()
            self.send(request, told)
            self._kept = kept

    def connection_lost(self, exc: Exception | None) -> None:
        """What was asked is not answered any more."""
        self.ended = True
        tellers = [*self._tellers.values(), *(told for _, told in self._kept)]
        self._tellers.clear()
        self._kept.clear()
        for told in tellers:
            told(0)
