"""The Fleet API for commands: a deadline on every call, and errors as one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from drover_cli import contexts
from drover_cli.arguments import address
from drover_cli.errors import CliError, NotFoundError, RefusedError, UnreachableError
from drover_core import x509
from drover_proto.call_errors import reason_of
from drover_proto.fleet_methods import FleetMethod

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

DEFAULT = "127.0.0.1:7302"
DEADLINE_S = 15.0
ERRORS: dict[grpc.StatusCode, type[CliError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: RefusedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UnreachableError,
    grpc.StatusCode.INTERNAL: UnreachableError,
}
# Said once in a shell, or in its profile, and not with each command: at 3 a.m. nobody types four paths.
COLLECTOR, CA, CERT, KEY = "DROVER_COLLECTOR", "DROVER_CA", "DROVER_CERT", "DROVER_KEY"


class FleetClient:
    """The methods of the table (fleet_methods.py) over one channel, blocking."""

    def __init__(self, channel: grpc.Channel, args: argparse.Namespace | None = None) -> None:
        self._channel, self._args = channel, args

    def call(self, method: FleetMethod[Q, R], request: Q, deadline_s: float = DEADLINE_S) -> R:
        """Return the reply.

        Raises:
            grpc.RpcError: the collector refuses, or does not answer in time.
            CliError: it acts, and a person did not confirm its cluster.
        """
        if method.acts and self._args is not None:
            contexts.before_act(self._args, _words_of(self._args))
        most_s = float(getattr(self._args, "deadline_s", deadline_s))
        return method.of(self._channel)(request, timeout=min(deadline_s, most_s))

    def stream(self, method: FleetMethod[Q, R], request: Q, deadline_s: float) -> Iterator[R]:
        """Yield the replies of a method that streams them.

        Raises:
            grpc.RpcError: as for `call`.
        """
        return iter(method.stream_of(self._channel)(request, timeout=deadline_s))


def add_arguments(parser: argparse.ArgumentParser, default: str | None = DEFAULT) -> None:
    """`default`: the collector asked when neither option nor environment names one."""
    parser.add_argument(
        "--collector", type=address, default=os.environ.get(COLLECTOR) or default, metavar="HOST:PORT",
        action=contexts.Named, help=f"Fleet API (or environment {COLLECTOR}; default {DEFAULT})",
    )  # fmt: skip
    parser.set_defaults(collector_env=bool(os.environ.get(COLLECTOR)))
    parser.add_argument(
        "--cluster", default=argparse.SUPPRESS, metavar="NAME",
        help=f"ask this cluster (drover config list; or {contexts.CLUSTER})",
    )  # fmt: skip
    parser.add_argument("--ca", **_file(CA), help=f"CA certificate of the collector, for mutual TLS (or {CA})")
    parser.add_argument("--cert", **_file(CERT), help=f"own certificate (or {CERT})")
    parser.add_argument("--key", **_file(KEY), help=f"own key (or {KEY})")


def _file(variable: str) -> dict[str, Any]:
    return {"type": Path, "action": contexts.Named, "metavar": "FILE", "default": os.environ.get(variable) or None}


def tls_files(args: argparse.Namespace) -> list[Path]:
    """Authority, certificate and key, or nothing.

    Raises:
        CliError: some are given, and not all.
    """
    given = [args.ca, args.cert, args.key]
    if any(given) and not all(given):
        raise CliError(
            f"--ca, --cert and --key belong together: give all three, here or as {CA}, {CERT}, {KEY}, or none"
        )
    return given if all(given) else []


@contextmanager
def connect(args: argparse.Namespace) -> Iterator[FleetClient]:
    """Yield a client of the collector that `args` name.

    Raises:
        UnreachableError: nothing answers there, or it cannot now. RefusedError, NotFoundError, CliError: it answers
            that it may not be done, that there is no such thing, that the request is wrong.
    """
    options = [("grpc.max_receive_message_length", 64 * 2**20)]
    tls = tls_files(args)
    troubles: list[str] = []
    if tls:
        try:
            files = x509.read_files(*tls)
        except x509.CertificateError as error:
            raise CliError(str(error).replace("tls.", "--", 1)) from None
        troubles = [line.replace("tls.", "--", 1) for line in x509.expiry_warnings(files, args.ca, args.cert)]
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        channel = grpc.secure_channel(args.collector, credentials, options)
    else:
        channel = grpc.insecure_channel(args.collector, options)
    try:
        yield FleetClient(channel, args)
    except grpc.RpcError as error:
        raise _cli_error(error, args, troubles) from None
    finally:
        channel.close()


def _words_of(args: argparse.Namespace) -> str:
    """What a person typed of an act: `drain r01n01`."""
    named = getattr(args, "node", None) or getattr(args, "id", None) or ""
    return " ".join([str(args.command), *([named] if isinstance(named, str) else map(str, named))]).rstrip()


def error_of(error: grpc.RpcError, args: argparse.Namespace) -> CliError:
    """Return the error that a command ends with, for one that goes on."""
    return _cli_error(error, args, [])


def _cli_error(error: grpc.RpcError, args: argparse.Namespace, troubles: list[str]) -> CliError:
    """`troubles`: of our own certificates."""
    code, detail, where = error.code(), error.details() or "", args.collector
    if code is grpc.StatusCode.UNAVAILABLE and args.cert and "connection refused" not in detail.lower():
        explained = x509.explain_failure(detail, troubles, args.ca, args.cert)
        if explained != detail:
            return UnreachableError(f"the collector at {where}: {explained}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return UnreachableError(
            f"the collector at {where} does not answer ({_why(code, detail)}); "
            "is drover-collector running there? Give another address with --collector"
        )
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return RefusedError(f"the collector at {where} refuses: {detail or code.name}")
    return ERRORS.get(code, CliError)(detail or f"the collector at {where} answered {code.name}")


def _why(code: grpc.StatusCode, detail: str) -> str:
    """The reason inside gRPC's long texts."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    if "socket closed" in detail.lower():
        return "it closed the connection; does it want --ca, --cert and --key?"
    return reason_of(detail) or code.name.lower()
