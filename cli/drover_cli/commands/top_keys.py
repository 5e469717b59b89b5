"""Keys of `drover top`: what each does to what is looked at (pure), and reading them off a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from dataclasses import dataclass, replace

VIEWS = {"1": "fleet", "2": "nodes", "3": "incidents", "4": "jobs"}
ORDERS = {"nodes": ("trouble", "name"), "incidents": ("worst", "newest"), "jobs": ("hurt", "gpus")}
HELP = "1 fleet  2 nodes  3 incidents  4 jobs   up/down choose   Enter open   Esc back   / filter   s sort   q quit"
FILTER_CHARS = 60
PAGE = 10
_SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown", b"\x1b": "esc", b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace",
    b"\x03": "quit",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """What is looked at. `at`: the chosen row of the list; `node`: that of the node's own screen."""

    view: str = "fleet"
    at: int = 0
    contains: str = ""
    order: int = 0
    node: str = ""
    typing: bool = False
    back: str = "fleet"
    over: bool = False

    def sorted_by(self) -> str:
        orders = ORDERS.get(self.view, ("",))
        return orders[self.order % len(orders)]


def press(look: Look, key: str, nodes: list[str]) -> Look:
    """Return what is looked at after a key. `nodes`: the node that each row of the list is about, "" for none."""
    if key == "quit":
        return replace(look, over=True)
    if look.typing:
        return _typed(look, key)
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -PAGE, "pagedown": PAGE}
    if key in steps:
        return replace(look, at=max(0, min(look.at + steps[key], len(nodes) - 1)))
    if key in VIEWS:
        return Look(VIEWS[key])
    if key == "enter" and look.at < len(nodes) and nodes[look.at]:
        return replace(look, view="node", node=nodes[look.at], back=look.view)
    if key == "esc":
        if look.view == "node":
            return replace(look, view=look.back, node="", back="fleet")
        return replace(look, contains="", at=0) if look.contains else Look()
    if key == "/" and look.view in ORDERS:
        return replace(look, typing=True)
    if key == "s":
        return replace(look, order=look.order + 1, at=0)
    return replace(look, over=True) if key == "q" else look


def _typed(look: Look, key: str) -> Look:
    if key == "enter":
        return replace(look, typing=False)
    if key == "esc":
        return replace(look, typing=False, contains="", at=0)
    if key == "backspace":
        return replace(look, contains=look.contains[:-1], at=0)
    if len(key) == 1 and key.isprintable():
        return replace(look, contains=(look.contains + key)[:FILTER_CHARS], at=0)
    return look


def key_of(data: bytes) -> str:
    """Return the name of what a terminal sent for one key; "" for what has no meaning here."""
    if data in _SEQUENCES:
        return _SEQUENCES[data]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return text if len(text) == 1 and text.isprintable() else ""


def keys_of(data: bytes) -> list[str]:
    """Return the keys in what a terminal sent at once: text that was pasted, a key that repeats."""
    found: list[str] = []
    while data:
        known = max((s for s in _SEQUENCES if data.startswith(s)), key=len, default=b"")
        if known == b"\x1b" and len(data) > 1:
            return found  # a sequence without a meaning here
        size = len(known) or _utf8_size(data[0])
        found.append(key_of(data[:size]))
        data = data[size:]
    return [key for key in found if key]


def _utf8_size(first: int) -> int:
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


@contextlib.contextmanager
def keyboard() -> Iterator[int]:
    """Give keys as they are pressed, unseen; the terminal is as before afterwards, whatever happens."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def pressed(terminal: int, wait_s: float) -> list[str]:
    """Return the keys of the next `wait_s`, as soon as there are any. A terminal that is gone says quit."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, wait_s))
    if not ready:
        return []
    data = os.read(terminal, 256)
    return keys_of(data) if data else ["quit"]
