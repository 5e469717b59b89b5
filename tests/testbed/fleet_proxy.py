"""Between the console and its collector: answers that come late, and a collector that is one version older.

The older one is what the Fleet service was one version ago, by its own `.proto` (tests/cases/older/): of each answer
only the fields that it knew are passed on, and questions that it did not know are answered as gRPC answers them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

OLDER = Path(__file__).resolve().parents[1] / "cases" / "older"
SERVICE = "drover.fleet.v1.Fleet"
DEADLINE_S = 30.0
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))


@functools.cache
def older() -> dict[str, Any]:
    """Class of the answer of each question that the older service knew."""
    from grpc_tools import protoc

    with TemporaryDirectory() as folder:
        told = Path(folder) / "older.bin"
        assert protoc.main(["protoc", f"-I{OLDER}", f"--descriptor_set_out={told}", "fleet.proto"]) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(told.read_bytes())
    pool = descriptor_pool.DescriptorPool()  # type: ignore[no-untyped-call]  # protobuf's own
    for file in files.file:
        pool.Add(file)  # type: ignore[no-untyped-call]  # likewise
    service = pool.FindServiceByName(SERVICE)
    return {method.name: message_factory.GetMessageClass(method.output_type) for method in service.methods}


class Between(grpc.GenericRpcHandler):
    """Set between two calls: `delay_s`, how long each answer is held back; `old`, to be one version older.

    Attributes:
        asked: names of the questions that came.
    """

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.old = False
        self.asked: list[str] = []
        self._released = threading.Event()
        self._channel = grpc.insecure_channel(target, [*OPTIONS, ("grpc.max_reconnect_backoff_ms", 500)])

    def close(self) -> None:
        self._released.set()
        self._channel.close()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        self.asked.append(name)
        if self.old and name not in older():
            return None  # gRPC says UNIMPLEMENTED
        call = self._channel.unary_unary(details.method)
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._pass_on, name, call))

    def _pass_on(self, name: str, call: Callable[..., bytes], request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            body = call(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")
        if self.delay_s:
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
    server = grpc.server(futures.ThreadPoolExecutor(32), options=OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler
    finally:
        handler.close()
        server.stop(None).wait()
