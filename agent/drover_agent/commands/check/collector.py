"""Check the way to the collectors: name, port, both certificates, and whether they accept this agent.

That is tried by a stream without a Hello: a Hello would make the collector close the stream of a running agent.
"""

from __future__ import annotations

import socket
import ssl
import time
from urllib.parse import quote

import grpc

from drover_agent.commands.check.result import CheckResult, CheckState
from drover_agent.config import AgentConfig
from drover_agent.uplink.stream import OPTIONS
from drover_core import x509
from drover_proto import telemetry_pb2_grpc as rpc

CONNECT_S = 3.0
ISSUE = "drover certs issue agent --fleet FILE on the authority's machine, then copy the files"


def own_certificate(config: AgentConfig) -> list[CheckResult]:
    tls = config.tls
    if not (tls.ca and tls.cert and tls.key):
        local = all(address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]") for address in config.collectors)
        text = "none: connections have no TLS, which collectors accept on loopback only"
        return [
            CheckResult("certificate", CheckState.MISSING if local else CheckState.BROKEN, text, "" if local else ISSUE)
        ]
    try:
        files = x509.read_files(tls.ca, tls.cert, tls.key)
    except x509.CertificateError as error:
        return [CheckResult("certificate", CheckState.BROKEN, str(error), ISSUE)]
    wanted = f"drover://agent/{quote(config.node_name, safe='')}"
    if wanted not in files.own.uris:
        text = f"{tls.cert} is for {', '.join(files.own.uris) or 'nobody'}, and this node is {config.node_name}"
        return [CheckResult("certificate", CheckState.BROKEN, text, f"set node, or issue one for {wanted}")]
    warnings = x509.expiry_warnings(files, tls.ca, tls.cert)
    if warnings:
        state = (
            CheckState.BROKEN
            if files.own.ended(time.time()) or time.time() < files.own.begins_s
            else CheckState.LIMITED
        )
        return [CheckResult("certificate", state, "; ".join(warnings), "drover certs renew, then copy the files")]
    return [CheckResult("certificate", CheckState.OK, f"{wanted}, until {x509.format_time(files.own.ends_s)}")]


def collector(config: AgentConfig, address: str) -> list[CheckResult]:
    """Check one address step by step, and return the first step that fails."""
    name = f"collector {address}"
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    began = time.monotonic()
    try:
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            text = f"answers in {(time.monotonic() - began) * 1000:.1f} ms"
            certificate = _server_certificate(config, host, connection)
    except socket.gaierror as error:
        return [
            CheckResult(name, CheckState.BROKEN, f"{host}: {error.strerror}", "check the name, and DNS on this node")
        ]
    except ssl.SSLError as error:
        return [CheckResult(name, CheckState.BROKEN, _explain(config, str(error)), "docs/how-to/tls.md")]
    except OSError as error:
        why = error.strerror or f"no answer within {CONNECT_S:g} s"
        remedy = "is it running and listening there (ingest.listen), and does a firewall let this node through?"
        return [CheckResult(name, CheckState.BROKEN, why, remedy)]
    state, remedy = CheckState.OK, ""
    if certificate is not None:
        text += f", certificate until {x509.format_time(certificate.ends_s)}"
        if ending := x509.expiry_text("the collector's certificate", certificate):
            state, remedy = CheckState.LIMITED, ending
    if refused := _refused(config, address):
        return [CheckResult(name, CheckState.BROKEN, f"{text}; {refused}", "docs/how-to/tls.md lists each refusal")]
    return [CheckResult(name, state, f"{text}, takes agents", remedy)]


def _server_certificate(config: AgentConfig, host: str, connection: socket.socket) -> x509.Certificate | None:
    """Return the collector's certificate, which TLS has checked; None for plain connections.

    Raises:
        ssl.SSLError: the handshake failed.
    """
    tls = config.tls
    if not (tls.ca and tls.cert and tls.key):
        return None
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(connection, server_hostname=host) as secure:
        der = secure.getpeercert(binary_form=True)
    return x509.parse(der) if der else None


def _refused(config: AgentConfig, address: str) -> str:
    """Return why the collector refuses a stream of this agent, "" if it accepts it."""
    tls = config.tls
    if tls.ca and tls.cert and tls.key:
        files = x509.read_files(tls.ca, tls.cert, tls.key)
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        channel = grpc.secure_channel(address, credentials, options=OPTIONS)
    else:
        channel = grpc.insecure_channel(address, options=OPTIONS)
    with channel:
        try:
            for _ in rpc.TelemetryStub(channel).Stream(iter(()), timeout=CONNECT_S):
                continue
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.UNIMPLEMENTED:
                return "it speaks gRPC but takes no telemetry: is this the port of ingest.listen?"
            return _explain(config, f"{code.name.lower().replace('_', ' ')}: {details}")
    return ""


def _explain(config: AgentConfig, text: str) -> str:
    from drover_agent.uplink.tls import ClientTls

    return ClientTls(config.tls).explain(text)
