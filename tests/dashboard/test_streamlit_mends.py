"""What is mended in Streamlit: with the defect that is there, so that an update that needs no mend is noticed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.websockets import WebSocket, WebSocketDisconnect
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue

from drover_dashboard.server import streamlit_patches as streamlit_mends

FRAGMENT = "f1"


def delta(*path: int, fragment: str = FRAGMENT) -> ForwardMsg:
    message = ForwardMsg()
    message.metadata.delta_path[:] = path
    message.delta.fragment_id = fragment
    message.delta.new_element.markdown.body = f"at {path}"
    return message


def known(*path: int) -> ForwardMsg:
    """In the place of an element that the browser has already."""
    message = ForwardMsg()
    message.metadata.delta_path[:] = path
    message.ref_hash = "h"
    return message


def places(queue: ForwardMsgQueue) -> list[tuple[int, ...]]:
    return [tuple(message.metadata.delta_path) for message in queue.flush()]


def filled() -> ForwardMsgQueue:
    """A fragment's run with nothing sent yet: its third part is known to the browser."""
    queue = ForwardMsgQueue()
    for message in (delta(0, 1, 0), delta(0, 1, 1), known(0, 1, 2)):
        queue.enqueue(message)
    return queue


def test_streamlit_leaves_a_reference_without_what_stands_before_it() -> None:
    queue = filled()
    streamlit_mends._clear(queue, retain_lifecycle_msgs=True, fragment_ids_this_run=[FRAGMENT])
    assert places(queue) == [(0, 1, 2)], "Streamlit does not do this any more: drop the mend"


def test_what_a_fragment_sent_is_delivered_when_it_begins_again() -> None:
    queue = filled()
    streamlit_mends.clear(queue, retain_lifecycle_msgs=True, fragment_ids_this_run=[FRAGMENT])
    for message in (delta(0, 1, 0), known(0, 1, 1)):
        queue.enqueue(message)
    assert places(queue) == [(0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 0), (0, 1, 1)]


def test_a_run_of_the_whole_page_replaces_what_was_not_sent() -> None:
    queue = filled()
    streamlit_mends.clear(queue, retain_lifecycle_msgs=True)
    assert places(queue) == []


def test_it_is_applied_where_the_console_is_built() -> None:
    from drover_dashboard.server.app import build

    build()
    assert ForwardMsgQueue.clear is streamlit_mends.clear


def left_while_sending(receive: Any) -> None:
    """What a socket's next read makes of a browser that left while it was sent something."""

    async def connect() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def sent(message: Any) -> None:
        if message["type"] == "websocket.send":
            raise ConnectionResetError

    async def leave() -> None:
        socket = WebSocket({"type": "websocket"}, connect, sent)
        await socket.accept()
        with pytest.raises(WebSocketDisconnect):
            await socket.send_bytes(b"a part of the page")
        await receive(socket)

    asyncio.run(leave())


def test_starlette_reports_who_left_while_sending_as_a_fault() -> None:
    with pytest.raises(RuntimeError):  # Starlette does not do this any more? Drop the mend
        left_while_sending(streamlit_mends._receive_bytes)


def test_who_left_while_something_was_sent_has_left() -> None:
    with pytest.raises(WebSocketDisconnect):
        left_while_sending(streamlit_mends.receive_bytes)
