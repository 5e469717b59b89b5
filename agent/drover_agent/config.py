"""Settings of the agent. One declaration gives the parser, its errors, `drover-agent config` and the docs."""

from __future__ import annotations

import dataclasses
import re
import socket
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drover_agent.urls import url_error, urls_error
from drover_core.metrics.series import GPU_METRICS
from drover_core.settings import (
    SettingsError,
    between,
    load,
    one_of,
    setting,
)

DEFAULT_PATH = Path("/etc/drover/agent.toml")


def _check_addresses(value: tuple[str, ...]) -> str | None:
    if not value:
        return 'must name at least one collector, as in ["collector1:7301"]'
    for item in value:
        host, _, port = item.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            return "must be addresses with a port, as in collector1:7301"
    return None


def _check_page(value: str) -> str | None:
    if value in ("", "auto"):
        return None
    return url_error(value)


def _check_servers(value: tuple[str, ...]) -> str | None:
    if not value:
        return None
    return urls_error(value)


def _check_dumps(value: tuple[str, ...]) -> str | None:
    for item in value:
        if not item.startswith("/") or item.count("{job}") > 1 or "**" in item:
            return "must be absolute paths, with {job} once at most and no **"
    return None


@dataclass(frozen=True)
class SpoolConfig:
    """Where data waits until a collector has stored it."""

    dir: str = setting("/var/lib/drover/agent", "folder for data that no collector has acknowledged yet")
    max_bytes: int = setting(
        512 * 2**20,
        "size of the spool in bytes; above it the oldest telemetry is dropped first, then the oldest events",
        between(2**20, 2**40),
    )
    max_age_s: float = setting(7 * 86400.0, "telemetry older than this is dropped", between(60, 10 * 365 * 86400))
    keep_acked_s: float = setting(
        600.0,
        "how long acknowledged data is kept in case the collector's machine loses power",
        between(0, 86400),
    )


@dataclass(frozen=True)
class TlsConfig:
    """Mutual TLS to the collectors: all three files, or none for connections without TLS."""

    ca: str | None = setting(None, "PEM file of the authority that signed the collectors' certificates")
    cert: str | None = setting(None, "PEM file of this agent's certificate, with the name drover://agent/NODE")
    key: str | None = setting(None, "PEM file of this agent's private key")


def _check_listen(value: str) -> str | None:
    host, _, port = value.rpartition(":")
    if not value or (host and port.isdigit() and int(port) < 65536):
        return None
    return "must be HOST:PORT, such as 127.0.0.1:9401, or empty"


def _check_metrics(value: tuple[str, ...]) -> str | None:
    wrong = next((name for name in value if name not in GPU_METRICS), None)
    return None if wrong is None else f"{wrong!r} is no metric of GPUs; docs/reference/metrics.md lists them"


@dataclass(frozen=True)
class PageConfig:
    """The node's own Prometheus pages."""

    listen: str = setting(
        "",
        "address of the Prometheus pages of this node's GPUs, HOST:PORT: /metrics, and /metrics/dcgm with the names of"
        " dcgm-exporter; without TLS or login, as dcgm-exporter's; empty: off",
        _check_listen,
    )
    metrics: tuple[str, ...] = setting(GPU_METRICS, "GPU metrics on the pages", _check_metrics)


@dataclass(frozen=True)
class GateConfig:
    """What `drover-agent gate` answers from, and what it does while no collector answers."""

    file: str = setting(
        "/run/drover/gate.json", "where the agent keeps the collector's verdict for `drover-agent gate`; empty: nowhere"
    )
    unanswered: str = setting(
        "open",
        "when this node finds a fault itself and no collector answers: open: jobs begin; closed: they are refused,"
        " without the guard's leave",
        one_of("open", "closed"),
    )
    age_s: float = setting(
        3600.0, "how long the last verdict, and a fault that this node found, count while no collector answers",
        between(180, 7 * 86400),
    )  # fmt: skip


@dataclass(frozen=True)
class AgentConfig:
    node: str | None = setting(None, "name of this node; the host name unless set")
    collectors: tuple[str, ...] = setting(
        ("127.0.0.1:7301",), "addresses of collectors; if one fails, the next is tried", _check_addresses
    )
    interval_s: float = setting(1.0, "seconds between two readings", between(0.1, 600))
    batch_s: float = setting(5.0, "seconds of telemetry in one message; events are sent at once", between(1, 30))
    hardware: str = setting(
        "auto",
        "auto (NVML if it is installed), nvml, none (host only) or simulated (needs the extra `simulation`)",
        one_of("auto", "nvml", "none", "simulated"),
    )
    kmsg_enabled: bool = setting(True, "read the kernel log for XIDs, PCIe, memory and OOM lines")
    kmsg_path: str = setting("/dev/kmsg", "the kernel log's device")
    kmsg_accept_user_facility: bool = setting(
        False, "also act on kernel-log lines that user space can forge; for tests, which write such lines"
    )
    proc_root: str = setting("/proc", "where procfs is mounted")
    sys_root: str = setting("/sys", "where sysfs is mounted")
    dcgm_url: str = setting(
        "auto",
        "dcgm-exporter's metrics page; auto: http://127.0.0.1:9400/metrics if it answers; empty: none",
        _check_page,
    )
    inference_urls: tuple[str, ...] = setting(
        (),
        'metrics pages of inference servers with a name for each, as in ["chat=http://127.0.0.1:8000/metrics"]',
        _check_servers,
    )
    steps_socket: str = setting("/run/drover/steps.sock", "socket where training loops report their steps; empty: none")
    rank_dumps: tuple[str, ...] = setting(
        (),
        "paths of flight recorder dumps that ranks of jobs leave; * matches any text and {job} the job's name, as in"
        ' ["/logs/{job}/comm_lib_trace_rank_*"]; empty: none are read',
        _check_dumps,
    )
    kubelet_socket: str = setting(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "socket where the kubelet says which pod holds which GPU; empty: none",
    )
    kubernetes_resources: tuple[str, ...] = setting(
        ("nvidia.com/gpu*", "nvidia.com/mig-*"), "names of GPU resources in Kubernetes; * matches any text"
    )
    probe_address: str = setting(
        "",
        "address at which other nodes reach this one for probes over several nodes; empty: the one the collector sees",
    )
    log_level: str = setting("info", "debug, info, warning or error", one_of("debug", "info", "warning", "error"))
    spool: SpoolConfig = field(default_factory=SpoolConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    page: PageConfig = field(default_factory=PageConfig)

    @property
    def node_name(self) -> str:
        return self.node or socket.gethostname()


def load_config(path: str | None, overrides: Sequence[str] = ()) -> AgentConfig:
    """Return the settings in `path` (None: /etc/drover/agent.toml if it exists), with `key=value` overrides.

    Raises:
        SettingsError: one line that says what to change.
    """
    chosen = Path(path) if path else DEFAULT_PATH if DEFAULT_PATH.exists() else None
    config = load(AgentConfig, chosen, dict(_override(item) for item in overrides))
    name = str(chosen) if chosen else "settings"
    tls = dataclasses.asdict(config.tls)
    if missing := [key for key, value in tls.items() if value is None]:
        if len(missing) < len(tls):
            raise SettingsError(f"{name}: tls.{missing[0]}: missing; give all of tls.ca, tls.cert, tls.key or none")
    else:
        try:
            read_tls(config.tls)
        except SettingsError as error:
            raise SettingsError(f"{name}: {error}") from None
    return config


def read_tls(tls: TlsConfig) -> tuple[bytes, bytes, bytes] | None:
    """Return the content of ca, cert and key; None for connections without TLS.

    Raises:
        SettingsError: a file cannot be read, or holds something else. gRPC would only report a failed handshake.
    """
    if not (tls.ca and tls.cert and tls.key):
        return None
    found = []
    for key, path, holds in (
        ("ca", tls.ca, "CERTIFICATE"),
        ("cert", tls.cert, "CERTIFICATE"),
        ("key", tls.key, "PRIVATE KEY"),
    ):
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise SettingsError(
                f"tls.{key}: cannot read {path}: {error.strerror}; check the path and its permissions"
            ) from None
        if not re.search(rb"-----BEGIN [A-Z ]*" + holds.encode() + rb"-----", data):
            raise SettingsError(f"tls.{key}: {path} holds no {holds} in PEM form; check which file it is")
        found.append(data)
    return found[0], found[1], found[2]


def _override(item: str) -> tuple[str, Any]:
    """Return `interval_s=2` as a key and a TOML value. A text that is not TOML is a string."""
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise SettingsError(f"--set {item}: must be key=value, as in --set interval_s=2")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text
