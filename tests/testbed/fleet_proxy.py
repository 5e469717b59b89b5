"""Between the console and its collector: answers that come late, and a collector that is one version older.

The older one is what the Fleet service was one version ago (`older_fleet.py`): of each answer only the fields that it
knew are passed on, and questions that it did not know are answered as gRPC answers them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from testbed.older_fleet import older
from testbed.system_processes import SOON

DEADLINE_S = 120.0
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))


class Between(grpc.GenericRpcHandler):
    """Set between two calls: `delay_s`, how long each answer is held back, of the methods in `late` (none: of all);
    `old`, to be one version older."""

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.late: frozenset[str] = frozenset()
        self.old = False
        self._released = threading.Event()
        self._channel = grpc.insecure_channel(target, [*OPTIONS, *SOON])

    def close(self) -> None:
        self._released.set()
        self._channel.close()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        if self.old and name not in older():
            return None  # gRPC says UNIMPLEMENTED
        call = self._channel.unary_unary(details.method)
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._pass_on, name, call))

    def _pass_on(self, name: str, call: Callable[..., bytes], request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            body = call(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")
        if self.delay_s and (not self.late or name in self.late):
            self._released.wait(self.delay_s)
        if not self.old:
            return body
        answer = older()[name].FromString(body)
        answer.DiscardUnknownFields()
        return bytes(answer.SerializeToString())


@contextmanager
def between(target: str) -> Iterator[tuple[str, Between]]:
    """(address, what stands there) until the end of the block."""
    handler = Between(target)
    server = grpc.server(futures.ThreadPoolExecutor(128), options=OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler
    finally:
        handler.close()
        server.stop(None).wait()
