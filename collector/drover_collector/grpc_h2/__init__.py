"""The gRPC server for agents: HTTP/2 with what gRPC needs of it, nothing else (docs/decisions/0025-agent-server.md).

`frames` (bytes) -> `headers`, `messages` (what gRPC puts into them) -> `outgoing`, `connection` (one of them, without
sockets) -> `call` (a stream as its service sees it) -> `link` (a socket, perhaps with TLS) -> `poller` -> `server`.
"""

from drover_collector.grpc_h2.call import Behaviour, CallEndedError
from drover_collector.grpc_h2.server import AgentServer

__all__ = ["AgentServer", "Behaviour", "CallEndedError"]
