"""Serve TLS with the collector's certificate. Renewed files are used from the next handshake on; open streams continue.

Each handshake checks the three files' times (three calls of stat). Files that cannot be used, such as a key written
before its certificate, change nothing: the previous pair stays in force, and Status says so.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from drover_core import x509
from drover_core.settings import SettingsError, setting

log = logging.getLogger(__name__)

_AGENTS = ("h2",)  # the protocol of the agents' server


@dataclass(frozen=True, slots=True)
class TlsConfig:
    ca: str | None = setting(None, "PEM file of the authority that signs agents, operators and viewers")
    cert: str | None = setting(None, "PEM file of this collector's certificate")
    key: str | None = setting(None, "PEM file of its private key; all three or none")
    denied_serials_file: str | None = setting(
        None, "file with serial numbers of certificates to refuse, one a line, as `openssl x509 -noout -serial` prints"
    )


class ServerTls:
    """The settings' ca, cert and key. Safe from the event loop and from the threads of gRPC, metrics page and API.

    `connections` counts the TLS handshakes begun, by listener. One that no stream or call follows has failed.
    """

    def __init__(self, ca: Path | str, cert: Path | str, key: Path | str) -> None:
        """
        Raises:
            SettingsError: files that cannot be used, in one line. Expired ones can: no peer trusts them, but files
                written in their place are used without a restart.
        """
        self.trouble = ""  # why files that changed are not in force
        self.connections: Counter[str] = Counter()
        self._paths = ca, cert, key
        self._lock = threading.Lock()
        self._stamp = x509.file_versions(*self._paths)
        try:
            self._files = x509.read_files(*self._paths)
            self._context, self._agents_context = self._new_context(), self._new_context(_AGENTS)
        except x509.CertificateError as error:
            raise SettingsError(str(error)) from None
        self._version = 1
        for line in self.troubles():
            log.error("%s", line)

    @property
    def own(self) -> x509.Certificate:
        return self._files.own

    def credentials(self, listener: str) -> grpc.ServerCredentials:
        """Return credentials for one gRPC server. Only peers with a certificate of the authority pass."""
        self._reload()
        with self._lock:
            first, given = self._configuration(), [self._version]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return the files if they changed. gRPC calls this at each handshake; None: keep the current ones."""
            self.connections[listener] += 1
            self._reload()
            with self._lock:
                if self._version == given[0]:
                    return None
                given[0] = self._version
                return self._configuration()

        # The stubs lack None, which gRPC documents.
        fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
        return grpc.dynamic_ssl_server_credentials(first, fetcher, require_client_authentication=True)

    def contexts(self, listener: str) -> Callable[[], ssl.SSLContext]:
        """Return a function for the agents' server, which calls it at each handshake."""

        def context() -> ssl.SSLContext:
            self.connections[listener] += 1
            self._reload()
            with self._lock:
                return self._agents_context

        return context

    def context(self) -> ssl.SSLContext:
        """Return the context for one connection of the metrics page."""
        self._reload()
        with self._lock:
            return self._context

    def troubles(self, now_s: float | None = None) -> list[str]:
        """Return sentences about files that are wrong or expire soon."""
        self._reload()
        with self._lock:
            found = x509.expiry_warnings(self._files, self._paths[0], self._paths[1], now_s)
            if self.trouble:
                found.append(f"{self.trouble}; the previous files stay in force")
        return found

    def _reload(self) -> None:
        """Load the files if they changed."""
        stamp = x509.file_versions(*self._paths)
        with self._lock:
            if stamp == self._stamp:
                return
            try:
                files = x509.read_files(*self._paths)
                context, agents_context = self._new_context(), self._new_context(_AGENTS)
            except x509.CertificateError as error:
                if self.trouble != str(error):
                    log.error("%s; the previous files stay in force", error)
                self.trouble = str(error)
                return  # read again at the next handshake: the stamp is still the old one
            self._stamp, self.trouble = stamp, ""
            if files != self._files:
                self._files, self._context, self._agents_context = files, context, agents_context
                self._version += 1
                log.info(
                    "certificate with serial %X is in force, until %s",
                    files.own.serial,
                    x509.format_time(files.own.ends_s),
                )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.ca)

    def _new_context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext:
        ca, cert, key = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        if protocols:
            context.set_alpn_protocols(list(protocols))
            context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
            context.num_tickets = 0  # gRPC's clients resume no session
        try:
            context.load_cert_chain(cert, key)
            context.load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise x509.CertificateError(f"tls: {cert}, {key} and {ca} cannot be used together: {error}") from None
        return context


def server_tls(config: TlsConfig) -> ServerTls | None:
    """Return the TLS of the settings; None: plain connections, which settings allow on loopback only.

    Raises:
        SettingsError: files that cannot be used.
    """
    if config.ca is None or config.cert is None or config.key is None:
        return None
    return ServerTls(config.ca, config.cert, config.key)


Contexts = Callable[[], ssl.SSLContext]
