"""Settings of what is read of other exporters, one table for each kind of page. Off by default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drover_collector.notify.settings import secret_text, word
from drover_collector.scrape.tables import ALL_NAMES, NAMES
from drover_core.settings import SettingsError, between, one_of, required, setting

MAX_TARGETS = 20_000  # of all tables together
THIS_HOST = frozenset({"localhost", "::1", "::", "0.0.0.0"})  # noqa: S104  # compared, not listened on
_TARGET = re.compile(r"(?:(?P<node>[^\s/=]{1,253})=)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Target:
    """One page. `node`: whose it is, as the fleet file names it."""

    node: str
    host: str
    port: int


def parse_target(text: str, node: str = "", short: bool = False) -> Target:
    """Return the target of `HOST:PORT` or `NODE=HOST:PORT`.

    Args:
        node: whose page it is; "": NODE, else the host. short: of a host's name the part before the first dot.

    Raises:
        ValueError: another form.
    """
    match = _TARGET.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{text[:100]!r} must be HOST:PORT or NODE=HOST:PORT, such as n01=10.0.0.1:9400")
    host = match["host"].strip("[]")
    named = node or match["node"] or _short(host, short)
    if not _names_node(named):
        raise ValueError(f"{named[:100]!r} cannot name a node")
    return Target(named, host, int(match["port"]))


def node_name(text: str, with_port: bool = False, short: bool = False) -> str:
    """Return the node that a label names; "": none.

    Args:
        with_port: the label may be HOST:PORT, as `instance` is. short: as for `parse_target`.
    """
    match = _TARGET.fullmatch(text) if with_port else None
    name = _short(text if match is None else match["host"].strip("[]"), short)
    return name if _names_node(name) else ""


def node_of_instance(text: str, short: bool = False) -> str:
    """Return the node of `HOST:PORT`; "": it has another form, such as the random text that an SDK makes, or HOST is
    this host to its sender, as to a Collector on each node."""
    match = _TARGET.fullmatch(text)
    host = "" if match is None else match["host"].strip("[]")
    return "" if is_this_host(host) else node_name(host, short=short)


def is_this_host(host: str) -> bool:
    """Return whether a sender means its own machine: many senders would speak for one node of this name."""
    return host in THIS_HOST or host.startswith("127.")


def _short(host: str, short: bool) -> str:
    is_address = ":" in host or re.fullmatch(r"[0-9.]+", host) is not None
    return host.partition(".")[0] if short and not is_address else host


def _names_node(name: str) -> bool:
    return 0 < len(name) <= 253 and name.isprintable() and not set(name) & {"/", " "}


def _targets(values: tuple[str, ...]) -> str | None:
    for value in values:
        try:
            parse_target(value)
        except ValueError as error:
            return str(error)
    return None


def _path(value: str) -> str | None:
    good = value.startswith("/") and value.isascii() and value.isprintable() and " " not in value
    return None if good else "must be a path, such as /metrics"


@dataclass(frozen=True, slots=True)
class ScrapeConfig:
    name: str = required("a word for it, unique among these tables", word)
    exporter: str = required("whose pages: dcgm (NVIDIA), amd (device-metrics-exporter) or node (node_exporter)",
                             one_of(*NAMES))  # fmt: skip
    targets: tuple[str, ...] = setting(
        (), 'pages: HOST:PORT, or NODE=HOST:PORT where the fleet file names the node otherwise', _targets
    )  # fmt: skip
    file_sd: tuple[str, ...] = setting(
        (), "JSON files of targets as Prometheus' file_sd_configs has them, read again when they change; a label"
        " `node` names the node",
    )  # fmt: skip
    short_names: bool = setting(False, "a node is named as its host up to the first dot")
    path: str = setting("/metrics", "of the pages", _path)
    interval_s: float = setting(
        10.0,
        "how often pages are read: all of a node together, at the shortest of its tables; detectors judge every 10 s",
        between(5, 300),
    )
    timeout_s: float = setting(5.0, "limit for one page as a whole", between(0.5, 60))
    tls: bool = setting(False, "pages are read over HTTPS")
    ask_first: bool = setting(
        True,
        "pages without TLS: a person is asked before Drover takes such a node out, also in"
        " enforce mode, because a user of the node could have written them",
    )
    ca_file: str | None = setting(None, "PEM file of the authority that signs their certificates; none: the system's")
    token_file: str | None = setting(None, "file with a bearer token, not readable by everyone")


def _tables(known: tuple[str, ...]) -> Callable[[tuple[str, ...]], str | None]:
    def check(values: tuple[str, ...]) -> str | None:
        wrong = next((value for value in values if value not in known), None)
        return f"{wrong!r} is not known; there are {', '.join(known)}" if wrong is not None else None

    return check


@dataclass(frozen=True, slots=True)
class WriteInConfig:
    """How values of nodes are taken by remote_write. It is served where REST is."""

    enabled: bool = setting(
        False, "take Prometheus remote_write 1.0 at /api/v1/write of rest.listen, by certificates of the role writer"
    )
    exporters: tuple[str, ...] = setting(
        NAMES, "whose series are used: dcgm, amd, node; series of others are left out", _tables(NAMES)
    )
    node_labels: tuple[str, ...] = setting(
        ("node", "instance"), "the first of these labels that a series has names its node; of `instance` the host"
    )
    short_names: bool = setting(False, "a node is named as that label up to the first dot")
    ask_first: bool = setting(
        True, "a person is asked before Drover takes out a node that has no agent, also in enforce mode"
    )
    drop_labels: tuple[str, ...] = setting(
        ("replica", "prometheus_replica", "prometheus"), "labels in which copies of one Prometheus differ: left out"
    )


@dataclass(frozen=True, slots=True)
class OtlpInConfig:
    """How values of nodes are taken by OTLP: over HTTP where REST is, over gRPC where agents report."""

    enabled: bool = setting(
        False, "take OTLP metrics (HTTP, protobuf or JSON) at /v1/metrics of rest.listen, by certificates of the role"
        " writer",
    )  # fmt: skip
    grpc: bool = setting(
        False, "take OTLP metrics over gRPC at ingest.listen, by certificates of the role writer; with or without the"
        " above",
    )  # fmt: skip
    exporters: tuple[str, ...] = setting(
        ALL_NAMES, "whose metrics are used: dcgm, amd, node by the names on their pages, hw by OpenTelemetry's"
        " conventions for hardware; others are left out", _tables(ALL_NAMES),
    )  # fmt: skip
    node_attributes: tuple[str, ...] = setting(
        ("node", "k8s.node.name", "service.instance.id", "host.name"),
        "the first of these attributes that a point or its resource has names the node; service.instance.id where it is"
        " HOST:PORT, as a Collector's prometheus receiver makes it",
    )
    short_names: bool = setting(False, "a node is named as that attribute up to the first dot")
    ask_first: bool = setting(
        True, "a person is asked before Drover takes out a node that has no agent, also in enforce mode"
    )

    @property
    def taken(self) -> bool:
        """Whether it is taken in any way."""
        return self.enabled or self.grpc


def validate_scrape(configs: Sequence[ScrapeConfig]) -> None:
    """Check what concerns several settings, and the files they name.

    Raises:
        SettingsError: KEY: what is wrong and what to do; no secret.
    """
    seen: set[str] = set()
    for number, config in enumerate(configs):
        key = f"scrape[{number}]"
        if config.name in seen:
            raise SettingsError(f"{key}.name: {config.name!r} is there twice; give each its own name")
        seen.add(config.name)
        if not config.targets and not config.file_sd:
            raise SettingsError(f"{key}.targets: name targets, or files in file_sd")
        for path in config.file_sd:
            if not Path(path).is_file():
                raise SettingsError(f"{key}.file_sd: {path}: no such file")
        if config.ca_file is not None and not config.tls:
            raise SettingsError(f"{key}.ca_file: pages are read without TLS; set tls = true")
        if config.ca_file is not None and not Path(config.ca_file).is_file():
            raise SettingsError(f"{key}.ca_file: {config.ca_file}: no such file")
        if config.token_file is not None and not config.tls:
            raise SettingsError(f"{key}.token_file: it would be sent in the clear; set tls = true")
        headers(config, key)


def headers(config: ScrapeConfig, key: str = "scrape") -> Mapping[str, str]:
    """
    Raises:
        SettingsError: the token cannot be read.
    """
    if config.token_file is None:
        return {}
    text = secret_text(f"{key}.token_file", config.token_file)
    if not text or not text.isascii() or not text.isprintable():
        raise SettingsError(f"{key}.token_file: {config.token_file} must hold one line of ASCII")
    return {"Authorization": f"Bearer {text}"}
