"""The collector's settings, and the checks that need more than one of them."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drover_collector.actions.settings import ActConfig, validate_act
from drover_collector.auth.identity import Denied, DeniedError
from drover_collector.auth.tls import TlsConfig
from drover_collector.exporters.settings import ExportConfig, validate_export
from drover_collector.notify.dead_man_settings import HeartbeatConfig, ping_urls
from drover_collector.notify.maintenance_events import MaintenanceEventsConfig, validate_events
from drover_collector.notify.maintenance_windows import MaintenanceConfig, validate_windows
from drover_collector.notify.settings import NotifyConfig, WebhookConfig, http_url, validate_notify
from drover_collector.policy.policy import PRESETS
from drover_collector.probes.settings import ProbesConfig, validate_probes
from drover_collector.scrape.settings import OtlpInConfig, ScrapeConfig, WriteInConfig, validate_scrape
from drover_core.settings import (
    SettingsError,
    between,
    error_at_key,
    load,
    one_of,
    required,
    setting,
)

DEFAULT_FLEET = "/etc/drover/fleet.toml"
LEAST_BYTES = 1_000_000_000  # of a store with a limit


def _address(value: str) -> str | None:
    try:
        split_address(value)
    except ValueError as error:
        return str(error)
    return None


def _size_limit(value: int) -> str | None:
    """Refuse a limit that is likely in gigabytes: nearly all stored data would be deleted at once."""
    return None if value == 0 or LEAST_BYTES <= value <= 2**60 else f"must be 0 or at least {LEAST_BYTES} (bytes)"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    url: str = setting("chdb:///var/lib/drover/store", "where data is: chdb:///PATH is embedded, needs no server")
    retention_days: int = setting(30, "samples older than this are deleted", between(1, 3650))
    retention_10s_days: int = setting(90, "10 s values, as in charts, are deleted after this", between(1, 3650))
    retention_5min_days: int = setting(1100, "5 min values are deleted after this", between(1, 3650))
    cluster: str = setting(
        "", "name of the server's cluster, as in its remote_servers: tables are spread over it; empty: one server"
    )
    password_file: str | None = setting(None, "file with the password of a server's user, not readable by everyone")
    password_env: str | None = setting(None, "or the environment variable that holds it")
    keep_free_bytes: int = setting(
        0,
        "when less of the disk is free, the oldest samples go, then the oldest rollups; 0: by the size of the disk"
        " (2 GiB or 5 %, the larger, but no more than 20 %)",
        between(0, 2**60),
    )
    max_bytes: int = setting(
        0, "the oldest samples go when the store is larger than this; 0: no such limit", _size_limit
    )
    backup_folder: str = setting(
        "/var/lib/drover/backups", "where `drover backup` copies an embedded store to; best on another disk"
    )


@dataclass(frozen=True, slots=True)
class IngestConfig:
    listen: str = setting("127.0.0.1:7301", "address for agents, HOST:PORT", _address)


@dataclass(frozen=True, slots=True)
class ApiConfig:
    listen: str = setting("127.0.0.1:7302", "address of the Fleet API, for console and commands, HOST:PORT", _address)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    path: str | None = setting(None, "a policy of your own, TOML; overrides preset")
    preset: str = setting("nvidia", "built-in policy", one_of(*PRESETS))


@dataclass(frozen=True, slots=True)
class DetectConfig:
    lag_s: float = setting(7.0, "how long after its end a bucket is read; agents send every 5 s", between(0, 60))
    role: str = setting(
        "auto",
        "on a server: auto: detect if no other collector does, else stand by; ingest: never detect",
        one_of("auto", "ingest"),
    )
    lease_s: float = setting(8.0, "on a server: how long a silent collector stays the active one", between(2, 300))


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    listen: str = setting(
        "", "address of the Prometheus page /metrics, HOST:PORT; empty: off", lambda v: _address(v) if v else None
    )


@dataclass(frozen=True, slots=True)
class RestConfig:
    listen: str = setting(
        "", "address of the Fleet API as REST, HOST:PORT; empty: off", lambda v: _address(v) if v else None
    )
    remote_write: WriteInConfig = field(default_factory=WriteInConfig)
    otlp: OtlpInConfig = field(default_factory=OtlpInConfig)


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    url: str = setting("http://127.0.0.1:8501", "where people reach the console; messages link to it", http_url)


@dataclass(frozen=True, slots=True)
class PoolPrice:
    pool: str = required("a pool of the fleet file")
    gpu_hour: float = required("price of one of its GPU-hours", between(0, 1e6))


@dataclass(frozen=True, slots=True)
class SkuPrice:
    sku: str = required("a model of the fleet file (sku)")
    gpu_hour: float = required("price of one of its GPU-hours", between(0, 1e6))


@dataclass(frozen=True, slots=True)
class CostConfig:
    currency: str = setting(
        "", "what prices are in, such as EUR; empty: costs are shown in GPU-hours alone",
        lambda v: None if len(v) <= 8 and v.isprintable() else "must be a word of at most 8 letters",
    )  # fmt: skip
    gpu_hour: float = setting(0.0, "price of a GPU-hour of pools not named below; 0: they have none", between(0, 1e6))
    kwh: float = setting(0.0, "price of a kWh that GPUs take; 0: none", between(0, 1e3))
    availability: float = setting(
        0.999, "share of GPU time in service that reports compare with", between(0.5, 0.999999)
    )  # fmt: skip
    pools: tuple[PoolPrice, ...] = setting((), "Prices by pool, one table each.")
    skus: tuple[SkuPrice, ...] = setting((), "Prices by model, of GPUs whose pool has none; one table each.")

    def price(self, pool: str, sku: str = "") -> float | None:
        """Return the price of a GPU-hour: of its pool, else of its model, else of all; None: not set."""
        own = next((entry.gpu_hour for entry in self.pools if entry.pool == pool), None)
        if own is None and sku:
            own = next((entry.gpu_hour for entry in self.skus if entry.sku == sku), None)
        return own if own is not None else self.gpu_hour or None


@dataclass(frozen=True, slots=True)
class TeamConfig:
    account: str = required("Slurm's account, or a namespace of Kubernetes; * matches any text")
    team: str = setting("", "whose its jobs are; empty: the account's own name")
    project: str = setting("", "what they work on; empty: what the job says")


@dataclass(frozen=True, slots=True)
class CollectorConfig:
    fleet: str = setting(
        DEFAULT_FLEET,
        "file with the nodes that should exist; empty, or this default and not there: learned from what reports",
    )
    store: StoreConfig = field(default_factory=StoreConfig)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    act: ActConfig = field(default_factory=ActConfig)
    detect: DetectConfig = field(default_factory=DetectConfig)
    probes: ProbesConfig = field(default_factory=ProbesConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    rest: RestConfig = field(default_factory=RestConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    teams: tuple[TeamConfig, ...] = setting((), "Teams and projects by account or namespace; the first that matches.")
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    scrape: tuple[ScrapeConfig, ...] = setting(
        (), "Pages of other exporters, for nodes without an agent; one table for each kind of page."
    )
    webhooks: tuple[WebhookConfig, ...] = setting((), "The older form of [[notify.webhook]], with the same keys.")
    maintenance: tuple[MaintenanceConfig, ...] = setting(
        (), "Weekly windows without notifications about some nodes, and without actions on them."
    )
    maintenance_events: MaintenanceEventsConfig = field(default_factory=MaintenanceEventsConfig)


def load_config(path: Path | None, environment: Mapping[str, str] = os.environ) -> CollectorConfig:
    """Load the settings of `path` (None: defaults) and validate them.

    Raises:
        SettingsError: one line, what is wrong and what to do.
    """
    config = load(CollectorConfig, path)
    try:
        validate(config, environment)
    except SettingsError as error:
        raise error_at_key(str(error), path) from None
    return config


def validate(config: CollectorConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Check what concerns several settings, and the files they name.

    Raises:
        SettingsError: one line, what is wrong and what to do.
    """
    _check_tls(config)
    validate_act(config.act)
    validate_probes(config.probes)
    store_password(config.store, environment)
    if config.policy.path is not None and not Path(config.policy.path).is_file():
        raise SettingsError(f"policy.path: {config.policy.path}: no such file; leave it out for the preset")
    validate_notify(config.notify, config.webhooks, environment)
    ping_urls(config.heartbeat, environment)
    validate_windows(config.maintenance)
    validate_events(config.maintenance_events, config.act.kubernetes.enabled or bool(config.act.kubernetes.server))
    validate_export(config.export)
    validate_scrape(config.scrape)
    if config.rest.remote_write.enabled and not config.rest.listen:
        raise SettingsError("rest.remote_write.enabled: it is served at rest.listen; set it")
    if config.rest.otlp.enabled and not config.rest.listen:
        raise SettingsError("rest.otlp.enabled: it is served at rest.listen; set it")
    if config.export.page.names and not config.metrics.listen:
        raise SettingsError("export.page.names: the pages are served at metrics.listen; set it")


def split_address(value: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `[IPV6]:PORT` into host and port.

    Raises:
        ValueError: neither of these.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:7301")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("must have an IPv6 address in brackets, such as [::1]:7301")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Return True if `HOST:PORT` can be reached from this machine only."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name other than localhost may be anything


def store_password(store: StoreConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the password of a server's user; None: the url has it. It never appears in a message.

    Raises:
        SettingsError: given twice, unreadable, readable by everyone, or not set.
    """
    if store.password_file is not None and store.password_env is not None:
        raise SettingsError("store.password_file: give it or password_env, not both")
    if store.password_env is not None:
        text = environment.get(store.password_env, "")
        if not text:
            raise SettingsError(f"store.password_env: {store.password_env} is not set; put the password there")
        return text
    if store.password_file is None:
        return None
    path = Path(store.password_file)
    try:
        if stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXO:
            raise SettingsError(f"store.password_file: {path} is open to every user; chmod o= {path}")
        return path.read_text("utf-8").rstrip("\r\n")
    except OSError as error:
        raise SettingsError(f"store.password_file: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"store.password_file: {path} is not text") from None


def _check_tls(config: CollectorConfig) -> None:
    if config.tls.denied_serials_file is not None:
        if config.tls.ca is None:
            raise SettingsError("tls.denied_serials_file: without ca, cert and key there are no certificates to refuse")
        try:
            Denied(Path(config.tls.denied_serials_file))
        except DeniedError as error:
            raise SettingsError(str(error)) from None
    files = {"ca": config.tls.ca, "cert": config.tls.cert, "key": config.tls.key}
    missing = [key for key, path in files.items() if path is None]
    if missing and len(missing) < len(files):
        raise SettingsError(f"tls.{missing[0]}: missing; give ca, cert and key, or none of them")
    for key, path in files.items():
        if path is not None and not Path(path).is_file():
            raise SettingsError(f"tls.{key}: {path}: no such file")
    if not missing:
        return
    listeners = {"ingest": config.ingest.listen, "api": config.api.listen, "metrics": config.metrics.listen}
    listeners["rest"] = config.rest.listen
    for name, address in listeners.items():
        if address and not is_loopback(address):
            raise SettingsError(
                f"{name}.listen: {address} can be reached from other machines; set tls.ca, tls.cert and tls.key,"
                " or listen on 127.0.0.1"
            )
