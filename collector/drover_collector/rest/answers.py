"""Make the answers of REST: a reply as JSON, and a page of a list."""

from __future__ import annotations

import zlib
from typing import Any

from google.protobuf.message import Message

from drover_collector.rest.requests import Cursor
from drover_collector.rest.routes import Paging
from drover_collector.rest.shapes import to_plain


def plain(reply: Message) -> dict[str, Any]:
    return to_plain(reply)


def page_of(paging: Paging, reply: dict[str, Any], begin: Cursor | None, size: int) -> dict[str, Any]:
    """Return a reply with the items of one page, and `next_cursor`: null on the last one.

    The page begins behind the item that ended the one before, wherever that is now; at its old place if it has left.
    """
    items = reply[paging.items]
    start = 0
    if begin is not None:
        keys = [key_of(paging, item) for item in items]
        start = min(begin.place, len(items))
        if begin.key in keys and keys[start - 1] != begin.key:  # two items may share a key: where it was counts first
            start = keys.index(begin.key) + 1
    shown = items[start : start + size]
    more = len(items) > start + size
    cursor = str(Cursor(start + size, key_of(paging, shown[-1]))) if more and shown else None
    found = {**reply, paging.items: shown, "next_cursor": cursor}
    keys_shown = {key_of(paging, item) for item in shown}
    for name in paging.keyed:
        found[name] = {key: value for key, value in reply[name].items() if key in keys_shown}
    return found


def key_of(paging: Paging, item: Any) -> str:
    for name in paging.key:
        item = item[name] or {}
    return str(item)


def gzipped(body: bytes) -> bytes:
    """Level 1: a picture of 100,000 GPUs must not hold a core."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(body) + packer.flush()
