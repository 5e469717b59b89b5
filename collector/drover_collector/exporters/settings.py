"""Settings of what goes out to other systems, one table for each. All of it is off by default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from drover_collector.notify.settings import http_url, secret_text, word
from drover_core.metrics.series import GPU_METRICS, NAMINGS, USUAL
from drover_core.settings import SettingsError, between, one_of, required, setting

MIB = 2**20
RECORD_KINDS = ("incident", "decision", "action", "event", "audit", "security")  # as `records.Record` has them
# What the conventions of OpenTelemetry for hardware have names for (otlp_names.py).
HARDWARE = (
    "gpu_util_ratio", "framebuffer_used_bytes", "framebuffer_total_bytes", "power_w", "energy_j", "gpu_temp_c",
    "memory_temp_c", "ecc_sram_corrected", "ecc_sram_uncorrected", "ecc_dram_corrected", "ecc_dram_uncorrected",
    "pcie_replays", "nvlink_crc_errors",
)  # fmt: skip


def _each_in(known: tuple[str, ...], hint: str) -> Callable[[tuple[str, ...]], str | None]:
    def check(values: tuple[str, ...]) -> str | None:
        wrong = next((value for value in values if value not in known), None)
        return None if wrong is None else f"{wrong!r} is not known; {hint}"

    return check


def _labels(values: tuple[str, ...]) -> str | None:
    good = all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.+", value) and not value.startswith("__") for value in values)
    return None if good else 'must be like ["cluster=alpha"]'


def _uri_reference(value: str) -> str | None:
    good = value and value.isascii() and value.isprintable() and not set(value) & set(' <>"{}|\\^`')
    return None if good else "must be a URI or a path, such as /drover/alpha"


def host_port(value: str) -> str | None:
    host, _, port = value.rpartition(":")
    return None if host and port.isdigit() and 0 < int(port) < 65536 else "must be HOST:PORT"


_metrics = _each_in(GPU_METRICS, "docs/reference/metrics.md lists the metrics of GPUs")
_signals = _each_in(("metrics", "logs"), "there are metrics and logs")
_kinds = _each_in(RECORD_KINDS, f"there are {', '.join(RECORD_KINDS)}")
_namings = _each_in(NAMINGS, f"there are {' and '.join(NAMINGS)}")


@dataclass(frozen=True, slots=True)
class FleetPageConfig:
    names: tuple[str, ...] = setting(
        (), 'pages at metrics.listen: "drover" at /metrics/fleet, "dcgm" at /metrics/dcgm; empty: off', _namings
    )
    metrics: tuple[str, ...] = setting(USUAL, "GPU metrics on the pages", _metrics)
    interval_s: float = setting(15.0, "a page is made at most this often; scrapes share it", between(1, 600))
    max_series: int = setting(
        3_000_000, "a page has at most so many series; metrics at the end of the list are left out", between(1, 10**8)
    )


@dataclass(frozen=True, slots=True)
class RemoteWriteConfig:
    name: str = required("a word for it, unique among the exporters", word)
    url: str = required("where to write, such as http://prometheus:9090/api/v1/write", http_url)
    version: int = setting(1, "of the protocol: 1 (all receivers) or 2 (Prometheus 3 and newer)", between(1, 2))
    naming: str = setting("drover", "names of the series: drover, or dcgm as dcgm-exporter", one_of(*NAMINGS))
    metrics: tuple[str, ...] = setting(USUAL, "GPU metrics that are sent", _metrics)
    interval_s: float = setting(30.0, "how often each series gets a sample", between(10, 600))
    labels: tuple[str, ...] = setting((), 'further labels of each series, such as "cluster=alpha"', _labels)
    batch: int = setting(10_000, "samples in one request, about", between(100, 100_000))
    spool_bytes: int = setting(
        256 * MIB,
        "memory for what cannot be sent yet, 8 bytes a sample; above it the oldest is dropped",
        between(MIB, 2**36),
    )
    token_file: str | None = setting(None, "file with a bearer token, not readable by everyone")
    username: str | None = setting(None, "or: where it asks for one")
    password_file: str | None = setting(None, "file with the password of username, not readable by everyone")
    ca_file: str | None = setting(None, "PEM file of the authority that signs its certificate; none: the system's")
    timeout_s: float = setting(30.0, "limit for one request as a whole", between(0.1, 300))


@dataclass(frozen=True, slots=True)
class SyslogConfig:
    name: str = required("a word for it, unique among the exporters", word)
    address: str = required("HOST:PORT of the syslog server", host_port)
    transport: str = setting("tls", "tls (RFC 5425), tcp (RFC 6587, octets counted) or udp (RFC 5426)",
                             one_of("tls", "tcp", "udp"))  # fmt: skip
    facility: int = setting(13, "facility of the lines; 13 is log audit", between(0, 23))
    ca_file: str | None = setting(None, "PEM file of the authority that signs its certificate; none: the system's")
    cert_file: str | None = setting(None, "PEM file of a certificate to show it, where it asks for one")
    key_file: str | None = setting(None, "PEM file of its private key")
    spool_bytes: int = setting(
        16 * MIB, "memory for lines that cannot be sent yet; above it the oldest are dropped", between(4096, 2**34)
    )
    timeout_s: float = setting(10.0, "limit for connecting, and for writing", between(0.1, 60))


@dataclass(frozen=True, slots=True)
class OtlpConfig:
    name: str = required("a word for it, unique among the exporters", word)
    url: str = required("of the receiver, such as http://otel:4318 (http) or http://otel:4317 (grpc)", http_url)
    protocol: str = setting("http", "http (protobuf) or grpc", one_of("http", "grpc"))
    signals: tuple[str, ...] = setting(
        ("metrics", "logs"), "what is sent: metrics; logs (events, incidents, decisions, actions, audit)", _signals
    )
    metrics: tuple[str, ...] = setting(HARDWARE, "GPU metrics that are sent", _metrics)
    interval_s: float = setting(30.0, "how often each metric gets a point", between(10, 600))
    labels: tuple[str, ...] = setting((), 'further attributes of each resource, such as "cluster=alpha"', _labels)
    batch: int = setting(10_000, "points in one request, about", between(100, 100_000))
    spool_bytes: int = setting(
        256 * MIB, "memory for metrics that cannot be sent yet, and as much for logs; above it the oldest is dropped",
        between(MIB, 2**36),
    )  # fmt: skip
    token_file: str | None = setting(None, "file with a bearer token, not readable by everyone")
    ca_file: str | None = setting(None, "PEM file of the authority that signs its certificate; none: the system's")
    timeout_s: float = setting(30.0, "limit for one request as a whole", between(0.1, 300))


@dataclass(frozen=True, slots=True)
class CloudEventsConfig:
    name: str = required("a word for it, unique among the exporters", word)
    url: str = required("where events are posted to, one in each request", http_url)
    source: str = setting("/drover", "of the events: a URI reference that names this cluster", _uri_reference)
    kinds: tuple[str, ...] = setting(
        ("incident", "decision", "action"), f"what is sent, of {', '.join(RECORD_KINDS)}", _kinds
    )
    spool_bytes: int = setting(
        16 * MIB, "memory for events that cannot be sent yet; above it the oldest are dropped", between(4096, 2**34)
    )
    token_file: str | None = setting(None, "file with a bearer token, not readable by everyone")
    ca_file: str | None = setting(None, "PEM file of the authority that signs its certificate; none: the system's")
    timeout_s: float = setting(10.0, "limit for one request as a whole", between(0.1, 300))


@dataclass(frozen=True, slots=True)
class ExportConfig:
    page: FleetPageConfig = field(default_factory=FleetPageConfig)
    remote_write: tuple[RemoteWriteConfig, ...] = setting((), "Prometheus remote_write, one table for each receiver.")
    otlp: tuple[OtlpConfig, ...] = setting((), "OTLP metrics and logs, one table for each receiver.")
    syslog: tuple[SyslogConfig, ...] = setting(
        (), "Audit lines and refused peers as syslog (RFC 5424), one table for each server."
    )
    cloud_events: tuple[CloudEventsConfig, ...] = setting(
        (), "Incidents, decisions and actions as CloudEvents 1.0, one table for each receiver."
    )


def label_pairs(values: tuple[str, ...]) -> dict[str, str]:
    """Return `NAME=VALUE` settings as a mapping."""
    return dict(value.split("=", 1) for value in values)


def validate_export(config: ExportConfig) -> None:
    """Check what concerns several settings, and the files they name.

    Raises:
        SettingsError: KEY: what is wrong and what to do; no secret.
    """
    seen: set[str] = set()
    tables: tuple[tuple[str, Sequence[RemoteWriteConfig | OtlpConfig | SyslogConfig | CloudEventsConfig]], ...] = (
        ("remote_write", config.remote_write), ("otlp", config.otlp), ("syslog", config.syslog),
        ("cloud_events", config.cloud_events),
    )  # fmt: skip
    for table, entries in tables:
        for number, entry in enumerate(entries):
            key = f"export.{table}[{number}]"
            # Those of its queues, which metrics and logs show.
            names = {f"{entry.name}-{s}" for s in entry.signals} if isinstance(entry, OtlpConfig) else {entry.name}
            if twice := sorted(names & seen):
                raise SettingsError(f"{key}.name: {twice[0]!r} is there twice; give each its own name")
            seen |= names
            check_file(entry.ca_file, f"{key}.ca_file")
            if isinstance(entry, RemoteWriteConfig):
                check_address(entry.url, f"{key}.url")
                Credentials(key, entry.token_file, entry.username, entry.password_file).headers()
            elif isinstance(entry, OtlpConfig | CloudEventsConfig):
                check_address(entry.url, f"{key}.url")
                Credentials(key, entry.token_file).headers()
            elif (entry.cert_file is None) != (entry.key_file is None):
                raise SettingsError(f"{key}.cert_file: give cert_file and key_file, or neither")
            else:
                check_file(entry.cert_file, f"{key}.cert_file")
                check_file(entry.key_file, f"{key}.key_file")


def check_address(url: str, key: str) -> None:
    """
    Raises:
        SettingsError: the address holds a user or a password, and is not shown.
    """
    if urlsplit(url).username is not None:
        raise SettingsError(f"{key}: must not hold a user or password: settings are no place for secrets")


def check_file(path: str | None, key: str) -> None:
    """
    Raises:
        SettingsError: there is no such file.
    """
    if path is not None and not Path(path).is_file():
        raise SettingsError(f"{key}: {path}: no such file")


@dataclass(frozen=True, slots=True)
class Credentials:
    """How requests to one receiver are authorized. Secrets are read from their files when they are needed."""

    key: str
    token_file: str | None = None
    username: str | None = None
    password_file: str | None = None

    def headers(self) -> Mapping[str, str]:
        """Return the headers to send.

        Raises:
            SettingsError: half of a pair, both ways, or an unreadable file.
        """
        if (self.username is None) != (self.password_file is None):
            raise SettingsError(f"{self.key}.password_file: give username and password_file, or neither")
        if self.username is not None and self.token_file is not None:
            raise SettingsError(f"{self.key}.token_file: give it or username, not both")
        if self.token_file is not None:
            return {"authorization": f"Bearer {self._line('token_file', self.token_file)}"}
        if self.password_file is not None:
            from base64 import b64encode

            pair = f"{self.username}:{self._line('password_file', self.password_file)}"
            return {"authorization": "Basic " + b64encode(pair.encode()).decode()}
        return {}

    def _line(self, name: str, path: str) -> str:
        text = secret_text(f"{self.key}.{name}", path)
        if not text or not text.isascii() or not text.isprintable():  # a line break would begin another header
            raise SettingsError(f"{self.key}.{name}: {path} must hold one line of ASCII")
        return text
