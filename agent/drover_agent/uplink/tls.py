"""The agent's side of mutual TLS: read the certificate's files for each connection, and explain what fails.

An ended certificate does not stop an agent: it goes on reading and spooling, and connects when the file is renewed.
"""

from __future__ import annotations

import logging
import time

import grpc

from drover_agent.config import TlsConfig
from drover_core import x509

log = logging.getLogger(__name__)


class ClientTls:
    """The certificate that one agent's stream uses, and whether a newer one is there."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._paths = (config.ca or "", config.cert or "", config.key or "")
        self._versions: object = None  # of the files in use
        self._used: x509.TlsFiles | None = None
        self._logged = ""

    @property
    def on(self) -> bool:
        return all(self._paths)

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what a channel needs, from the files that are there now.

        Raises:
            x509.CertificateError: the files cannot be used; one line.
        """
        versions = x509.file_versions(*self._paths)
        files = x509.read_files(*self._paths)
        self._versions, self._used = versions, files
        text = "; ".join(self.expiry_warnings())
        if text and text != self._logged:
            log.warning("%s", text)
        self._logged = text
        return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)

    def renewed(self) -> bool:
        """Return whether there are usable files other than those of the stream, so that it is time to reconnect."""
        if self._used is None or x509.file_versions(*self._paths) == self._versions:
            return False
        try:
            files = x509.read_files(*self._paths)
        except x509.CertificateError as error:  # perhaps half written; the stream does not need them yet
            if str(error) != self._logged:
                self._logged = str(error)
                log.warning("%s. The stream goes on with the old files.", error)
            return False
        if files == self._used:
            self._versions = x509.file_versions(*self._paths)
            return False
        return True

    def expiry_warnings(self) -> list[str]:
        """Return a line for each certificate that has ended or soon will."""
        if self._used is None:
            return []
        return x509.expiry_warnings(self._used, self._paths[0], self._paths[1], time.time())

    def explain(self, text: str) -> str:
        """Return gRPC's text for a failed connection, with what these files have to do with it."""
        if not self.on:
            if "socket closed" in text.lower():
                return f"{text}; does it want certificates? Set tls.ca, tls.cert and tls.key"
            return text
        return x509.explain_failure(text, self.expiry_warnings(), self._paths[0], self._paths[1])


def describe_certificate(config: TlsConfig, now_s: float) -> str:
    """Return one line for people: the certificate's names and its end; "" for connections without TLS."""
    if not (config.ca and config.cert and config.key):
        return ""
    try:
        files = x509.read_files(config.ca, config.cert, config.key)
    except x509.CertificateError as error:
        return str(error)
    names = ", ".join(files.own.uris) or "no name drover://ROLE/NAME"
    warnings = x509.expiry_warnings(files, config.ca, config.cert, now_s)
    return "; ".join([f"{names}, until {x509.format_time(files.own.ends_s)}", *warnings])
