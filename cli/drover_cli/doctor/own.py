"""Checks by the collector's settings, on its own machine: files, rights, certificates, disk, ports, receivers.

Each takes settings that load; nothing is changed, and no secret is shown.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from drover_cli.doctor.finding import Finding, bad, ok, unknown, warn
from drover_collector.actions.settings import used
from drover_collector.config import CollectorConfig, is_loopback, split_address
from drover_collector.notify.settings import receivers
from drover_collector.policy.policy import Policy
from drover_collector.store.durability.backup import PARTIAL
from drover_core import x509
from drover_core.model.fleet import FleetError, load_toml
from drover_core.settings import SettingsError

CONNECT_S = 3.0
BACKUP_DAYS = 8  # a weekly one, and a day
MODES = {
    "observe": "decides and notifies, touches nothing",
    "approve": "does what a person has approved",
    "enforce": "does what the policy decides, within the guard's limits",
}
STRENGTH = tuple(MODES)


def fleet(config: CollectorConfig) -> list[Finding]:
    """Whether the fleet file names nodes."""
    try:
        spec = load_toml(Path(config.fleet))
    except FleetError as error:
        return [bad("fleet", str(error), "mend the file; docs/reference/fleet-file.md shows its form")]
    if not spec.nodes:
        return [bad("fleet", f"{config.fleet} names no node", "add [[nodes]]; what is not in it is not judged")]
    found = [ok("fleet", f"{config.fleet}: {len(spec.nodes)} nodes, {spec.gpu_count} GPUs")]
    without = sum(not node.rack for node in spec.nodes)
    if without:
        text = f"{without} nodes have no rack: faults of a rack cannot be distinguished from those of its nodes"
        found.append(warn("fleet", text, "give rack (and leaf) in the fleet file"))
    return found


def enforcement(config: CollectorConfig) -> list[Finding]:
    """What may be done to nodes, and why: the weaker of act.mode and the policy's mode holds."""
    try:
        policy = Policy.load(None if config.policy.path is None else Path(config.policy.path), config.policy.preset)
    except SettingsError as error:
        return [bad("policy", str(error), "mend the file: drover policy check FILE")]
    asked, most = str(policy.mode), config.act.mode
    holds = min(asked, most, key=STRENGTH.index)
    text = f"{holds}: {MODES[holds]} (the policy {policy.name} says {asked}, act.mode allows {most})"
    if STRENGTH.index(asked) > STRENGTH.index(most):
        remedy = f'act.mode = "{asked}" once you trust it (drover policy if-enforced), or leave it so'
        return [warn("enforcement", text, remedy)]
    return [ok("enforcement", text)]


# ---- certificates and secrets


def certificates(config: CollectorConfig, now_s: float | None = None) -> list[Finding]:
    """Whether files are there, belong together, are a collector's, and do not end soon."""
    tls = config.tls
    if not (tls.ca and tls.cert and tls.key):
        text = "none: plain connections on loopback, where every user of this machine may do all"
        return [
            warn(
                "certificates",
                text,
                "drover certs init, then tls.ca, tls.cert and tls.key: docs/how-to/tls.md",
            )
        ]
    issue = "drover certs issue collector, then copy certificate and key"
    try:
        files = x509.read_files(tls.ca, tls.cert, tls.key)
    except x509.CertificateError as error:
        return [bad("certificates", str(error), issue)]
    if files.own.uris:
        text = f"{tls.cert} is for {', '.join(files.own.uris)}, and no collector's: agents and consoles leave"
        return [bad("certificates", text, issue)]
    now_s = time.time() if now_s is None else now_s
    troubles = x509.expiry_warnings(files, tls.ca, tls.cert, now_s)
    if troubles:
        dead = files.own.ended(now_s) or any(authority.ended(now_s) for authority in files.authorities)
        made = bad if dead or files.own.days_left(now_s) < 1 else warn
        return [made("certificates", line, "drover certs renew, then copy the files; no restart") for line in troubles]
    return [ok("certificates", f"the collector's until {x509.format_time(files.own.ends_s)}")]


def secrets(config: CollectorConfig) -> list[Finding]:
    """Who can read files that hold keys, passwords and addresses."""
    found = []
    for key, path in secret_files(config):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            found.append(bad("secrets", f"{key}: {path}: {error.strerror}", "write the file, or mend its path"))
            continue
        if mode & stat.S_IRWXO:
            remedy = f"chmod o= {path}, and make a new secret: it may have been read"
            found.append(bad("secrets", f"{key}: {path} is open to every user of this machine", remedy))
        elif mode & stat.S_IWGRP:
            found.append(warn("secrets", f"{key}: {path} can be written by its group", f"chmod g-w {path}"))
    return found or [ok("secrets", f"{len(list(secret_files(config)))} files, none open to everyone")]


def secret_files(config: CollectorConfig) -> Iterator[tuple[str, Path]]:
    """(setting, file) of each."""
    if config.tls.key:
        yield "tls.key", Path(config.tls.key)
    named = {
        "store.password_file": config.store.password_file,
        "act.slurm.token_file": config.act.slurm.token_file if config.act.slurm.enabled else None,
        "act.kubernetes.token_file": config.act.kubernetes.token_file if config.act.kubernetes.enabled else None,
        "heartbeat.url_file": config.heartbeat.url_file,
        "heartbeat.fail_url_file": config.heartbeat.fail_url_file,
    }
    for place, receiver in receivers(config.notify, config.webhooks):
        for name in ("url_file", "secret_file", "routing_key_file", "password_file", "token_file"):
            named[f"{place}.{name}"] = getattr(receiver, name, None)
    yield from ((key, Path(path)) for key, path in named.items() if path)


# ---- ports


def ports(config: CollectorConfig) -> list[Finding]:
    """Whether each listener answers from here, and who can reach it."""
    found = []
    listeners = {"ingest": config.ingest.listen, "api": config.api.listen, "metrics": config.metrics.listen}
    for name, address in listeners.items():
        if not address:
            remedy = 'metrics.listen = "127.0.0.1:7303", and docs/how-to/monitor.md'
            found.append(warn("ports", f"{name}.listen is empty: nothing watches Drover itself", remedy))
            continue
        why = no_answer(*split_address(address))
        if why:
            remedy = "systemctl status drover-collector; journalctl -u drover-collector -n 50"
            found.append(bad("ports", f"{name}.listen {address}: {why}", remedy))
        else:
            reach = "from this machine only" if is_loopback(address) else "from other machines, by mutual TLS"
            found.append(ok("ports", f"{name}.listen {address} answers; it can be reached {reach}"))
    return [*found, *console(config)]


def console(config: CollectorConfig) -> list[Finding]:
    parts = urlsplit(config.console.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    why = no_answer(parts.hostname or "", port)
    if why:
        remedy = "start drover-dashboard, or set console.url to where people reach it: messages link to it"
        return [warn("ports", f"console.url {config.console.url}: {why}", remedy)]
    return [ok("ports", f"console.url {config.console.url} answers")]


def reachable(address: str) -> str:
    """HOST:PORT by which this machine asks a listener: certificates are for no 0.0.0.0, and seldom for 127.0.0.1."""
    host, port = split_address(address)
    return f"localhost:{port}" if host in ("0.0.0.0", "::", "127.0.0.1", "::1") else address  # noqa: S104  # only asked


def no_answer(host: str, port: int) -> str:
    """Why nobody answers there; "" when somebody does."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # only looked up, never bound
    try:
        with socket.create_connection((host, port), CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or f"no answer within {CONNECT_S:g} s"


# ---- store


def store(config: CollectorConfig) -> list[Finding]:
    """Its folder, its rights and its disk."""
    if not config.store.url.startswith("chdb:"):
        text = "a server's: its disk and rights are not seen from here"
        return [unknown("store", text, "look at them on the ClickHouse hosts: SELECT * FROM system.disks")]
    folder = Path(urlsplit(config.store.url).path)
    if not folder.exists():
        above = next(path for path in folder.parents if path.exists())
        if not os.access(above, os.W_OK):
            return [bad("store", f"{folder} is not there, and {above} cannot be written", f"mkdir and chown {folder}")]
        return [warn("store", f"{folder} is not there yet", "the first start of the collector makes it")]
    found = []
    if stat.S_IMODE(folder.stat().st_mode) & stat.S_IRWXO:
        text = f"{folder} can be read by every user of this machine: telemetry, jobs and actions"
        found.append(warn("store", text, f"chmod o= {folder}"))
    usage = shutil.disk_usage(folder)
    kept = config.store.keep_free_bytes or min(max(2 << 30, usage.total // 20), usage.total // 5)
    text = f"{folder}: {usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB free"
    if usage.free < 256 << 20:
        found.append(bad("store", f"{text}: it takes nothing more below 0.26 GB", "make room: du -xsh /* | sort -h"))
    elif usage.free < kept:
        remedy = "make room, or the oldest samples go; events and incidents stay"
        found.append(warn("store", f"{text}, less than the {kept / 1e9:.1f} GB to be kept free", remedy))
    else:
        found.append(ok("store", text))
    return found


def backups(config: CollectorConfig, now_s: float | None = None) -> list[Finding]:
    if not config.store.url.startswith("chdb:"):
        return [unknown("backups", "a server's: not seen from here", "docs/how-to/back-up.md")]
    folder = Path(config.store.backup_folder)
    try:
        newest = max((p.stat().st_mtime for p in folder.iterdir() if p.suffix != PARTIAL), default=-math.inf)
    except OSError:
        newest = -math.inf
    days = ((time.time() if now_s is None else now_s) - newest) / 86_400
    remedy = "drover backup NAME by a timer, onto another disk: docs/how-to/back-up.md"
    if math.isinf(days):
        return [warn("backups", f"none in {folder}", remedy)]
    if days > BACKUP_DAYS:
        return [warn("backups", f"the newest in {folder} is {days:.0f} days old", remedy)]
    return [ok("backups", f"the newest in {folder} is {days:.1f} days old")]


# ---- receivers


def notifications(config: CollectorConfig) -> list[Finding]:
    """Check that somebody is notified of incidents, and notices when Drover falls silent."""
    named = [receiver.name for _, receiver in receivers(config.notify, config.webhooks)]
    remedy = "[[notify.webhook]], slack, pagerduty ... in the settings: docs/how-to/notify.md"
    found = (
        [ok("receivers", f"{', '.join(named)}; drover-collector notify-test tries them")]
        if named
        else [warn("receivers", "none: nobody is notified of incidents", remedy)]
    )
    if config.heartbeat.on:
        return [*found, ok("dead-man's switch", f"a sign of life each {config.heartbeat.interval_s:g} s")]
    text = "none: nobody notices when Drover itself dies"
    return [*found, warn("dead-man's switch", text, "[heartbeat] url_file in the settings: docs/how-to/monitor.md")]


def actuators(config: CollectorConfig) -> list[str]:
    """Names of those that are switched on and may act."""
    return [] if config.act.mode == "observe" else list(used(config.act))
