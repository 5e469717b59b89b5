"""Make the answers of REST: a reply as JSON, and a page of a list."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from drover_collector.rest.requests import KEYS_BEFORE, Cursor
from drover_collector.rest.routes import Paging
from drover_collector.rest.shapes import to_plain


def plain(reply: Message) -> dict[str, Any]:
    return to_plain(reply)


def page_of(paging: Paging, reply: dict[str, Any], begin: Cursor | None, size: int) -> dict[str, Any]:
    """Return a reply with the items of one page, and `next_cursor`: null on the last one.

    The page begins behind the item that ended the one before, wherever that is now. If that has left, it begins behind
    the last item before it that has not: rather an item comes twice than one is left out.
    """
    items = reply[paging.items]
    start = 0
    if begin is not None:
        keys = [key_of(paging, item) for item in items]
        start = _behind(keys, begin)
    shown = items[start : start + size]
    more = len(items) > start + size
    cursor = None
    if more and shown:
        behind = items[: start + size][-1 - KEYS_BEFORE :]
        key, *before = (key_of(paging, item) for item in reversed(behind))
        cursor = str(Cursor(start + size, key, before))
    found = {**reply, paging.items: shown, "next_cursor": cursor}
    keys_shown = {key_of(paging, item) for item in shown}
    for name in paging.keyed:
        found[name] = {key: value for key, value in reply[name].items() if key in keys_shown}
    return found


def _behind(keys: Sequence[str], begin: Cursor) -> int:
    """Return where the page begins."""
    at = min(begin.place, len(keys))
    if keys[at - 1 : at] == [begin.key]:  # two items may share a key: where it was counts first
        return at
    for key in (begin.key, *begin.before):
        if key in keys:
            return keys.index(key) + 1
    return max(0, at - 1 - len(begin.before))  # all of these have left


def key_of(paging: Paging, item: Any) -> str:
    for name in paging.key:
        item = item[name] or {}
    return str(item)


def gzipped(body: bytes) -> bytes:
    """Level 1: a picture of 100,000 GPUs must not hold a core."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(body) + packer.flush()
