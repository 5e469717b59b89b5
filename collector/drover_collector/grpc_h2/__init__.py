"""A gRPC server for thousands of connections with one long stream each (docs/decisions/0025-agent-server.md).

It serves any gRPC method as a bidirectional stream of bytes, and nothing of HTTP/2 that gRPC does not need.

`frames` (bytes) -> `headers`, `messages` (what gRPC puts into them) -> `send_queue`, `connection` (one connection,
without sockets) -> `call` (one stream, as its handler sees it) -> `link` (a socket, perhaps with TLS) -> `poller` ->
`server`.
"""

from drover_collector.grpc_h2.call import CallEndedError, Handler
from drover_collector.grpc_h2.server import GrpcServer, ServerOptions

__all__ = ["CallEndedError", "GrpcServer", "Handler", "ServerOptions"]
