"""Taking the addresses of the settings: the agents' port, the Fleet API's and the metrics page's."""

from __future__ import annotations

import tempfile

import grpc

from drover_collector.api.connection_front import Front
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.auth.tls import ServerTls
from drover_collector.config import CollectorConfig, split_address
from drover_collector.grpc_h2 import GrpcServer
from drover_collector.observability.metrics_server import MetricsServer
from drover_collector.process import open_files


class AddressError(Exception):
    """An address that cannot be listened on."""


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """
    Raises:
        AddressError: none can be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="drover-", ignore_cleanup_errors=True)
    except OSError as error:
        raise AddressError(
            f"api.listen: a folder for a socket file cannot be made in {tempfile.gettempdir()}: {error.strerror}; set"
            " TMPDIR to a folder in which one can"
        ) from None


def listen(front: Front, server: grpc.aio.Server, name: str, address: str, tls: ServerTls | None, path: str) -> str:
    """Listen there, with gRPC behind it on a socket file.

    Returns:
        HOST:PORT, with the port that port 0 became.
    Raises:
        AddressError: occupied, or not an address of this machine.
    """
    host, port = split_address(address)
    try:
        port = front.listen(host, port)
    except OSError:
        raise _no_address(name, address) from None
    try:
        if tls is None:
            server.add_insecure_port(f"unix:{path}")
        else:
            server.add_secure_port(f"unix:{path}", tls.credentials(name))
    except RuntimeError:
        raise AddressError(
            f"{name}: gRPC cannot listen on the file {path}: set TMPDIR to a folder in which files can be made, with a"
            " path of less than 80 characters"
        ) from None
    return f"{address.rpartition(':')[0]}:{port}"


def listen_for_agents(server: GrpcServer, name: str, address: str, tls: ServerTls | None) -> str:
    """The same for agents."""
    host, port = split_address(address)
    try:
        port = server.listen(host, port, None if tls is None else tls.contexts(name))
    except OSError:
        raise _no_address(name, address) from None
    return f"{address.rpartition(':')[0]}:{port}"


def _no_address(name: str, address: str) -> AddressError:
    return AddressError(
        f"{name}: cannot listen on {address}; it is taken (by another collector?) or not an address of this"
        f" machine: stop what holds it, or set {name} to another"
    )


def metrics_server(config: CollectorConfig, facts: ApiSnapshot, tls: ServerTls | None) -> MetricsServer:
    host, port = split_address(config.metrics.listen)
    try:
        return MetricsServer(facts, host, port, None if tls is None else tls.context, open_files.scrapers())
    except OSError as error:
        raise AddressError(
            f"metrics.listen: cannot serve on {config.metrics.listen}: {error.strerror or error};"
            " set metrics.listen to another address, or to nothing"
        ) from None
