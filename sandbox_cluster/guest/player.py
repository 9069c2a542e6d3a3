"""Plays input events on an X connection: pointer, buttons, keys, and text in any script.

Characters of the keyboard layout are typed with their own key. Others borrow one of the layout's unused key codes. Programs
read the changed layout late, so a borrowed code keeps its character until codes run out, and the oldest is taken then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from sandbox_cluster.guest.events import Button, InputEvent, Key, Move, Text
from sandbox_cluster.guest.keys import keysym_of, keysym_of_char
from sandbox_cluster.guest.x11 import XConnection

_SHIFT = keysym_of("shift")
_LAST_WITH_STATE = 5
"""Buttons above have no place in the pointer state."""
RELEASE_TIMEOUT_S = 1.0
"""The window manager holds a click back until it has raised and focused the window; keys sent meanwhile would overtake it.
The button's release takes effect only then, so that is waited for, at most so long."""
REMAP_WAIT_S = 0.03
"""After a change of the layout and before it is used."""
REUSE_WAIT_S = 0.1
"""Before a borrowed code gets another character: programs may still be reading what was typed with it."""


class Player:
    """Plays events; blocking, from one thread at a time. Pauses are the caller's: see events.Pause."""

    def __init__(self, x: XConnection) -> None:
        self._x = x
        self._places: dict[int, tuple[int, bool]] = {}
        """keysym -> (key code, needs shift)"""
        self._spare: list[int] = []
        self._borrowed: OrderedDict[int, int] = OrderedDict()
        """keysym -> borrowed key code, oldest first"""
        for keycode, keysyms in x.keymap().items():
            if not any(keysyms):
                self._spare.append(keycode)
            for level, keysym in enumerate(keysyms[:2]):
                if keysym:
                    self._places.setdefault(keysym, (keycode, level == 1))
        self._shift_code = self._places[_SHIFT][0]
        self._keys_down: dict[str, int] = {}
        self._buttons_down: set[int] = set()

    def play(self, events: Iterable[InputEvent]) -> None:
        """Play events (no pauses) and wait until the X server has passed them on."""
        for event in events:
            if isinstance(event, Move):
                self._move(event)
            elif isinstance(event, Button):
                self._button(event)
            elif isinstance(event, Key):
                self._key(event)
            elif isinstance(event, Text):
                self._type(event.text)
        self._x.sync()

    def _button(self, event: Button) -> None:
        self._x.button(event.number, event.is_down)
        if event.is_down:
            self._buttons_down.add(event.number)
            return
        self._buttons_down.discard(event.number)
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while event.number <= _LAST_WITH_STATE and self._x.is_button_down(event.number):
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def _move(self, event: Move) -> None:
        if event.num_steps > 1:
            x_px, y_px = self._x.pointer()
            to_x, to_y = (
                (x_px + event.x_px, y_px + event.y_px) if event.is_relative else (event.x_px, event.y_px)
            )
            for step in range(1, event.num_steps):
                share = step / event.num_steps
                self._x.move(round(x_px + (to_x - x_px) * share), round(y_px + (to_y - y_px) * share))
                self._x.sync()
                time.sleep(0.004)
            self._x.move(to_x, to_y)
        else:
            self._x.move(event.x_px, event.y_px, event.is_relative)

    def _key(self, event: Key) -> None:
        keysym = keysym_of(event.name)
        if not event.is_down:
            keycode = self._keys_down.pop(event.name, None)
            if keycode is not None:
                self._x.key(keycode, False)
            return
        if keysym not in self._places:
            self._borrow([keysym])
        keycode, needs_shift = self._place(keysym)
        is_shift_down = self._shift_code in self._keys_down.values()
        if needs_shift and not is_shift_down:
            self._x.key(self._shift_code, True)
        self._x.key(keycode, True)
        if needs_shift and not is_shift_down:
            self._x.key(self._shift_code, False)
        self._keys_down[event.name] = keycode

    def _type(self, text: str) -> None:
        for run in self._runs([keysym_of_char(char) for char in text.replace("\r\n", "\n")]):
            for keysym in run:
                keycode, needs_shift = self._place(keysym)
                if needs_shift:
                    self._x.key(self._shift_code, True)
                self._x.key(keycode, True)
                self._x.key(keycode, False)
                if needs_shift:
                    self._x.key(self._shift_code, False)
            self._x.sync()

    def _runs(self, keysyms: list[int]) -> Iterator[list[int]]:
        """Pieces of `keysyms`, each with no more foreign characters than there are spare codes, borrowed when it is due."""
        run: list[int] = []
        foreign: set[int] = set()
        for keysym in keysyms:
            is_new = keysym not in self._places and keysym not in foreign
            if is_new and len(foreign) == len(self._spare):
                self._borrow(sorted(foreign))
                yield run
                run, foreign = [], set()
            if is_new:
                foreign.add(keysym)
            run.append(keysym)
        self._borrow(sorted(foreign))
        yield run

    def _borrow(self, keysyms: list[int]) -> None:
        for keysym in keysyms:
            if keysym in self._borrowed:
                self._borrowed.move_to_end(keysym)
        wanted = [keysym for keysym in keysyms if keysym not in self._borrowed]
        if not wanted:
            return
        free = [code for code in self._spare if code not in self._borrowed.values()]
        if len(free) < len(wanted):
            time.sleep(REUSE_WAIT_S)
        for keysym in wanted:
            keycode = free.pop() if free else self._borrowed.popitem(last=False)[1]
            self._borrowed[keysym] = keycode
            self._x.map_key(keycode, keysym)
        self._x.sync()
        time.sleep(REMAP_WAIT_S)

    def _place(self, keysym: int) -> tuple[int, bool]:
        known = self._places.get(keysym)
        return known if known is not None else (self._borrowed[keysym], False)
