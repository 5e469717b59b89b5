"""Mends of Streamlit itself (1.67), each with its reason; applied once, before it serves."""

from __future__ import annotations

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue

_clear = ForwardMsgQueue.clear
_receive_bytes = WebSocket.receive_bytes
GONE = 1006  # RFC 6455: closed without a word


def mend() -> None:
    """Apply all patches. Calling it again has no effect."""
    ForwardMsgQueue.clear = clear  # type: ignore[method-assign, assignment]  # a method is replaced, on purpose
    WebSocket.receive_bytes = receive_bytes  # type: ignore[method-assign, assignment]  # a method is replaced, on purpose


def clear(
    queue: ForwardMsgQueue, retain_lifecycle_msgs: bool = False, fragment_ids_this_run: list[str] | None = None
) -> None:
    """Deliver what a fragment sent although the same fragment starts again.

    Streamlit drops what of a fragment's run is not sent yet when its next run begins, but for references to what the
    browser has already (`ref_hash`): these name no fragment. A page whose server is busy then got "put this at place
    3" without the places 1 and 2, failed with "Bad delta path index", and showed nothing more until it was reloaded.
    Delivering all of it is what happens anyway when the server is quick.
    """
    if retain_lifecycle_msgs and fragment_ids_this_run:
        queue._delta_index_map = {}
    else:
        _clear(queue, retain_lifecycle_msgs, fragment_ids_this_run)


async def receive_bytes(socket: WebSocket) -> bytes:
    """A page that went away while something was sent to it has gone, nothing worse.

    Starlette then says so by a RuntimeError, which Streamlit takes for a text frame: it closes what is closed, which
    fails, and the log has an "Exception in ASGI application" for each browser that leaves at such a moment.
    """
    try:
        return await _receive_bytes(socket)
    except RuntimeError:
        if socket.application_state is WebSocketState.DISCONNECTED:
            raise WebSocketDisconnect(GONE) from None
        raise
