"""The agent's side of mutual TLS: its files at each attempt to connect, and what to say when they do not do.

An ended certificate does not stop an agent: it goes on reading and spooling, and connects when it is renewed.
"""

from __future__ import annotations

import logging
import time

import grpc

from drover_agent.config import TlsConfig
from drover_core import x509

log = logging.getLogger(__name__)


class ClientTls:
    """Of one stream: the certificate that it uses, and whether a newer one lies there."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._paths = (config.ca or "", config.cert or "", config.key or "")
        self._stamp: object = None
        self._used: x509.TlsFiles | None = None
        self._told = ""

    @property
    def on(self) -> bool:
        return all(self._paths)

    def credentials(self) -> grpc.ChannelCredentials:
        """
        Raises:
            x509.CertificateError: files that cannot be used, in one line.
        """
        stamp = x509.file_versions(*self._paths)
        files = x509.read_files(*self._paths)
        self._stamp, self._used = stamp, files
        told = "; ".join(self.troubles())
        if told and told != self._told:
            log.warning("%s", told)
        self._told = told
        return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)

    def renewed(self) -> bool:
        """Whether files that can be used, and others than those of the stream, lie there: time to connect anew."""
        if self._used is None or x509.file_versions(*self._paths) == self._stamp:
            return False
        try:
            files = x509.read_files(*self._paths)
        except x509.CertificateError as error:  # perhaps half written; the stream has what it needs
            if str(error) != self._told:
                self._told = str(error)
                log.warning("%s; the stream goes on with the files as they were", error)
            return False
        if files == self._used:
            self._stamp = x509.file_versions(*self._paths)
            return False
        return True

    def troubles(self) -> list[str]:
        """Of the certificates' times: a line each."""
        if self._used is None:
            return []
        return x509.expiry_warnings(self._used, self._paths[0], self._paths[1], time.time())

    def explain(self, text: str) -> str:
        """gRPC's words for a connection that did not come about, and what these files have to do with it."""
        if not self.on:
            if "socket closed" in text.lower():
                return f"{text}; does it want certificates? Set tls.ca, tls.cert and tls.key"
            return text
        return x509.explain_failure(text, self.troubles(), self._paths[0], self._paths[1])


def report(config: TlsConfig, now_s: float) -> str:
    """One line for people: whose certificate, until when; "" for plain connections."""
    if not (config.ca and config.cert and config.key):
        return ""
    try:
        files = x509.read_files(config.ca, config.cert, config.key)
    except x509.CertificateError as error:
        return str(error)
    names = ", ".join(files.own.uris) or "no name drover://ROLE/NAME"
    lines = x509.expiry_warnings(files, config.ca, config.cert, now_s)
    return "; ".join([f"{names}, until {x509.format_time(files.own.ends_s)}", *lines])
