"""The X client against a scripted server: its bytes, and what a hostile server can do to it (nothing but an error)."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

import pytest

from sandbox_cluster.guest.x11 import XConnection
from slime_cua.core.errors import SandboxError

ROOT = 0x1234


def greeting() -> bytes:
    vendor = b"test"
    screen = struct.pack("<IIII", ROOT, 0, 0, 0) + struct.pack("<IHH", 0, 640, 384) + bytes(16)
    head = struct.pack("<IIIIHHBBBBBBBB4x", 0, 0, 0, 0, len(vendor), 65535, 1, 0, 0, 0, 32, 32, 8, 255)
    body = head + vendor + screen
    return struct.pack("<BxHHH", 1, 11, 0, len(body) // 4) + body


def reply(sequence: int, extra: bytes = b"", body: bytes = b"") -> bytes:
    head = struct.pack("<BBHI", 1, 0, sequence, len(body) // 4) + extra
    return head + bytes(32 - len(head)) + body


def serve(script: Callable[[socket.socket], None]) -> tuple[socket.socket, threading.Thread]:
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            theirs.recv(12)
            script(theirs)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return ours, thread


def ready(server: socket.socket) -> None:
    server.sendall(greeting())
    server.recv(4096)
    server.sendall(reply(1, struct.pack("<BB", 1, 132)))


def test_input_requests_have_xtests_layout_and_events_are_passed_over() -> None:
    seen: list[bytes] = []

    def script(server: socket.socket) -> None:
        ready(server)
        data = b""
        while len(data) < 2 * 36 + 4:
            data += server.recv(4096)
        seen.append(data)
        event, older = struct.pack("<BBH28x", 34, 0, 4), struct.pack("<BBH28x", 0, 3, 2)
        server.sendall(event + older + reply(4))

    ours, thread = serve(script)
    x = XConnection(ours)
    assert (x.root, x.wh_px) == (ROOT, (640, 384))
    x.move(300, 200)
    x.button(1, True)
    x.sync()
    thread.join(5)
    x.close()
    move, press = seen[0][:36], seen[0][36:72]
    assert struct.unpack("<BBHBB", move[:6]) == (132, 2, 9, 6, 0)
    assert struct.unpack("<hh", move[24:28]) == (300, 200)
    assert struct.unpack("<BBHBB", press[:6]) == (132, 2, 9, 4, 1)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda server: None, "closed the connection"),
        (lambda server: server.sendall(struct.pack("<BBHHH", 0, 4, 11, 0, 1) + b"no!!"), "refuses"),
        (lambda server: server.sendall(struct.pack("<BxHHH", 1, 11, 0, 1) + b"xxxx"), "too short"),
        (lambda server: (server.sendall(greeting()), server.recv(99), server.sendall(reply(1))), "no XTEST"),
        (
            lambda server: (
                server.sendall(greeting()),
                server.recv(99),
                server.sendall(b"\1\0\1\0" + b"\xff" * 28),
            ),
            "too long",
        ),
        (lambda server: (server.sendall(greeting()), server.recv(99), server.recv(99)), "does not answer"),
        (
            lambda server: (
                server.sendall(greeting()),
                server.recv(99),
                server.sendall(b"\0\1\1\0" + bytes(28)),
            ),
            "X error 1",
        ),
    ],
)
def test_a_hostile_server_gives_a_named_error_in_bounded_time(script, message) -> None:  # type: ignore[no-untyped-def]
    ours, _ = serve(script)
    with ours, pytest.raises(SandboxError, match=message):
        XConnection(ours, timeout_s=0.3)
