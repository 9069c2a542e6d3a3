"""A small X11 client over a given socket: pointer, keyboard (XTEST), window properties, nothing else.

The X server belongs to the desktop, and a program inside may have replaced it: every wait has a time-out, every reply a
size limit, and whatever is not as expected is a SandboxError.
Source: X Window System Protocol, version 11 (encoding, appendix B); XTEST Extension Protocol 2.2.
"""

from __future__ import annotations

import socket
import struct

from slime_cua.core.errors import SandboxError

MAX_REPLY_BYTES = 1 << 20
ANSWER_S = 5.0
_MOTION, _BUTTON, _KEY = 6, 4, 2
ATOM_CARDINAL, ATOM_STRING, ATOM_WINDOW = 6, 31, 33


class XConnection:
    """One connection. Blocking; use it from one thread at a time."""

    def __init__(self, connection: socket.socket, timeout_s: float = ANSWER_S) -> None:
        self._socket = connection
        self._socket.settimeout(timeout_s)
        self._sequence = 0
        self._out = bytearray()
        self._setup()
        self._xtest = self._extension("XTEST")

    def close(self) -> None:
        self._socket.close()

    def be_patient(self, timeout_s: float) -> None:
        """Wait so long for each answer from now on."""
        self._socket.settimeout(timeout_s)

    # input

    def move(self, x_px: int, y_px: int, is_relative: bool = False) -> None:
        self._fake(_MOTION, int(is_relative), x_px, y_px)

    def button(self, number: int, is_down: bool) -> None:
        self._fake(_BUTTON + (not is_down), number)

    def key(self, keycode: int, is_down: bool) -> None:
        self._fake(_KEY + (not is_down), keycode)

    def flush(self) -> None:
        """Send what was collected."""
        data, self._out = bytes(self._out), bytearray()
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise SandboxError(f"the X server does not take input: {error}") from error

    def sync(self) -> None:
        """Wait until the server has done everything sent so far (GetInputFocus)."""
        self._ask(struct.pack("<BxH", 43, 1))

    def pointer(self) -> tuple[int, int]:
        """The pointer's place in pixels (QueryPointer)."""
        x_px, y_px = struct.unpack_from("<hh", self._query_pointer(), 16)
        return x_px, y_px

    def is_button_down(self, number: int) -> bool:
        """Whether the server holds button 1..5 for pressed (QueryPointer)."""
        return bool(struct.unpack_from("<H", self._query_pointer(), 24)[0] & 0x80 << number)

    def _query_pointer(self) -> bytes:
        return self._ask(struct.pack("<BxHI", 38, 2, self.root))

    # keyboard map

    def keymap(self) -> dict[int, tuple[int, ...]]:
        """Keysyms of every keycode (GetKeyboardMapping)."""
        count = self.max_keycode - self.min_keycode + 1
        reply = self._ask(struct.pack("<BxHBBxx", 101, 2, self.min_keycode, count))
        per_code = reply[1]
        symbols = struct.unpack_from(f"<{count * per_code}I", reply, 32)
        return {self.min_keycode + n: tuple(symbols[n * per_code : (n + 1) * per_code]) for n in range(count)}

    def map_key(self, keycode: int, keysym: int) -> None:
        """Give a keycode one symbol, shifted or not (ChangeKeyboardMapping)."""
        self._add(struct.pack("<BBHBBxxII", 100, 1, 4, keycode, 2, keysym, keysym))

    # windows

    def atom(self, name: str) -> int:
        """The number of an atom, made if missing (InternAtom)."""
        raw = name.encode()
        request = struct.pack("<BBHHxx", 16, 0, 2 + _words(raw), len(raw)) + _padded(raw)
        return int(struct.unpack_from("<I", self._ask(request), 8)[0])

    def property_words(self, window: int, name: str, max_words: int = 1024) -> tuple[int, ...]:
        """A 32-bit property of a window; empty when missing (GetProperty)."""
        request = struct.pack("<BBHIIIII", 20, 0, 6, window, self.atom(name), 0, 0, max_words)
        reply = self._ask(request)
        count = struct.unpack_from("<I", reply, 16)[0]
        if reply[1] != 32 or len(reply) < 32 + 4 * count:
            return ()
        return struct.unpack_from(f"<{count}I", reply, 32)

    def set_text_property(self, window: int, name: str, text: str) -> None:
        """Replace a STRING property (ChangeProperty)."""
        raw, atom = text.encode("latin-1"), self.atom(name)
        head = struct.pack("<BBHIIIBxxxI", 18, 0, 6 + _words(raw), window, atom, ATOM_STRING, 8, len(raw))
        self._add(head + _padded(raw))

    def set_background(self, rgb: int) -> None:
        """Colour of the empty desktop (ChangeWindowAttributes, ClearArea)."""
        self._add(struct.pack("<BxHIII", 2, 4, self.root, 0x2, rgb))
        self._add(struct.pack("<BBHIhhHH", 61, 0, 4, self.root, 0, 0, 0, 0))

    # wire

    def _fake(self, kind: int, detail: int, x_px: int = 0, y_px: int = 0) -> None:
        x_px, y_px = max(-32768, min(32767, x_px)), max(-32768, min(32767, y_px))
        self._add(struct.pack("<BBHBBxxII8xhh8x", self._xtest, 2, 9, kind, detail, 0, 0, x_px, y_px))

    def _extension(self, name: str) -> int:
        raw = name.encode()
        reply = self._ask(struct.pack("<BxHHxx", 98, 2 + _words(raw), len(raw)) + _padded(raw))
        if not reply[8]:
            raise SandboxError(f"the X server has no {name} extension")
        return reply[9]

    def _add(self, request: bytes) -> None:
        self._out += request
        self._sequence = (self._sequence + 1) & 0xFFFF

    def _ask(self, request: bytes) -> bytes:
        """Send and wait for this request's reply; events and errors of earlier requests are passed over."""
        self._add(request)
        self.flush()
        for _ in range(10_000):
            packet = self._receive(32)
            if packet[0] > 1:
                if packet[0] & 0x7F == 35:
                    self._receive(self._extra(packet))
                continue
            sequence = struct.unpack_from("<H", packet, 2)[0]
            if packet[0] == 0:
                if sequence == self._sequence:
                    raise SandboxError(f"X error {packet[1]} for request {packet[10]}")
                continue
            packet += self._receive(self._extra(packet))
            if sequence == self._sequence:
                return packet
        raise SandboxError("the X server sends events without end")

    def _extra(self, packet: bytes) -> int:
        length = 4 * int(struct.unpack_from("<I", packet, 4)[0])
        if length > MAX_REPLY_BYTES:
            raise SandboxError(f"X reply of {length} bytes is too long")
        return length

    def _receive(self, count: int) -> bytes:
        parts = bytearray()
        try:
            while len(parts) < count:
                chunk = self._socket.recv(count - len(parts))
                if not chunk:
                    raise SandboxError("the X server closed the connection")
                parts += chunk
        except OSError as error:
            raise SandboxError(f"the X server does not answer: {error}") from error
        return bytes(parts)

    def _setup(self) -> None:
        self._out += struct.pack("<BxHHHHxx", ord("l"), 11, 0, 0, 0)
        self.flush()
        head = self._receive(8)
        body = self._receive(4 * struct.unpack_from("<H", head, 6)[0])
        if head[0] != 1:
            raise SandboxError("the X server refuses the connection: " + body[: head[1]].decode("latin-1"))
        try:
            vendor_bytes = struct.unpack_from("<H", body, 16)[0]
            num_formats = body[21]
            self.min_keycode, self.max_keycode = body[26], body[27]
            screen = 32 + (vendor_bytes + 3) // 4 * 4 + 8 * num_formats
            self.root = int(struct.unpack_from("<I", body, screen)[0])
            self.wh_px: tuple[int, int] = struct.unpack_from("<HH", body, screen + 20)
        except (struct.error, IndexError) as error:
            raise SandboxError(f"the X server's greeting is too short: {error}") from error


def _words(raw: bytes) -> int:
    return (len(raw) + 3) // 4


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 4)
