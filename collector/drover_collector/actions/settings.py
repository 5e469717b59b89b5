"""Settings of the actuators. Nothing is switched on by default: this collector observes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from drover_collector.notify.settings import http_url, webhook_secret, webhook_url
from drover_core.settings import (
    SettingsError,
    between,
    one_of,
    setting,
)

MODES = ("observe", "approve", "enforce")
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # where a pod finds it
_POOLS = "pools whose nodes it has; none: all nodes"


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    enabled: bool = setting(False, "nodes are Slurm's, under the names of the fleet file")
    pools: tuple[str, ...] = setting((), _POOLS)
    scontrol: str = setting("scontrol", "the program, or its path; squeue is expected in the same folder")
    conf: str | None = setting(None, "slurm.conf of the cluster; none: as for any Slurm command (SLURM_CONF)")
    slurmrestd: str | None = setting(
        None,
        "its REST API instead of scontrol, of Slurm 23.02 or newer: unix:/run/slurmrestd.sock or https://HOST:PORT"
        " (http:// on this machine only, or with plain_http); it cannot requeue jobs",
    )
    plain_http: bool = setting(
        False, "slurmrestd may be http:// of another machine; anyone who can listen on the way then gets the token"
    )
    token_file: str | None = setting(
        None, "token for slurmrestd (scontrol token), read for each call; none: a Unix socket knows who asks"
    )
    ca_file: str | None = setting(None, "certificate authority of slurmrestd; none: those of this machine")
    timeout_s: float = setting(10.0, "longest wait for one answer of slurmctld", between(1, 120))
    advise_weight: int = setting(
        10_000,
        "weight of a node that jobs should rather not get: Slurm takes the lightest first",
        between(1, 2**32 - 2),
    )


def _conditions(values: tuple[str, ...]) -> str | None:
    found = [value.partition("=") for value in values]
    wrong = next((value for value, _, status in found if status not in ("", "True", "False")), None)
    return _types(tuple(type_ for type_, _, _ in found)) or (wrong and f"{wrong}: give TYPE, TYPE=True or TYPE=False")


def _types(values: tuple[str, ...]) -> str | None:
    """Return what is wrong with types of conditions. Their form: "qualified name" of the API's conventions."""
    wrong = next((value for value in values if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9./_-]{0,119}", value)), None)
    return None if wrong is None else f"{wrong!r} is no type of a condition, such as KernelDeadlock"


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    enabled: bool = setting(False, "nodes are Kubernetes', under the names of the fleet file")
    pools: tuple[str, ...] = setting((), _POOLS)
    server: str | None = setting(None, "https:// address of the API server; none: that of the cluster it runs in")
    token_file: str = setting(f"{_ACCOUNT}/token", "bearer token of the service account; read again when it is refused")
    ca_file: str = setting(f"{_ACCOUNT}/ca.crt", "certificate authority of the API server")
    timeout_s: float = setting(10.0, "longest wait for one answer of the API server", between(1, 120))
    gpu_resources: tuple[str, ...] = setting(
        ("nvidia.com/", "amd.com/gpu"), "a pod that asks for a resource that begins so is a job"
    )
    conditions: bool = setting(True, "read the conditions that others write on nodes (docs/how-to/conditions.md)")
    warn_conditions: tuple[str, ...] = setting(
        (), "types of conditions to warn of too: TYPE, bad when True, or TYPE=False", _conditions
    )
    ignore_conditions: tuple[str, ...] = setting((), "types of conditions that are not read", _types)


@dataclass(frozen=True, slots=True)
class CommandConfig:
    program: tuple[str, ...] = setting(
        (), "program and its arguments; gets JSON on stdin (docs/how-to/own-scheduler.md); none: off"
    )
    pools: tuple[str, ...] = setting((), _POOLS)
    timeout_s: float = setting(60.0, "it is killed after this long", between(1, 3600))


@dataclass(frozen=True, slots=True)
class TicketConfig:
    url: str | None = setting(None, "where a ticket is posted when a node goes to repair; none: off", http_url)
    url_file: str | None = setting(None, "or the file that holds this address, where it is a secret")
    secret_file: str | None = setting(None, "file with the signing secret, whsec_BASE64, not readable by everyone")
    secret_env: str | None = setting(None, "or the environment variable that holds it")
    timeout_s: float = setting(10.0, "how long to wait for a connection, and for an answer", between(0.1, 60))
    ca_file: str | None = setting(None, "PEM file of the authority that signs its certificate; none: the system's")
    proxy: str | None = setting(None, "http:// address of a proxy to reach it through; none: directly", http_url)

    @property
    def on(self) -> bool:
        return self.url is not None or self.url_file is not None


@dataclass(frozen=True, slots=True)
class ActConfig:
    mode: str = setting(
        "observe",
        "the most that may be done: observe: nothing; approve: what a person has approved; enforce: what the policy"
        " decides. What a person asks for by hand is done in approve and enforce",
        one_of(*MODES),
    )
    validate: bool = setting(True, "a drained node is probed, and resumed when it passes; false: people resume")
    validate_level: str = setting("standard", "level of these probes", one_of("quick", "standard", "deep"))
    give_up_s: float = setting(
        3600.0, "an action that cannot be done is tried again for this long, then it has failed", between(1, 7 * 86_400)
    )
    return_days: float = setting(
        14.0,
        "a node that fails again within this many days of its return is reported as such",
        between(0, 365),
    )
    repair_command: tuple[str, ...] = setting(
        (), "program and its arguments that opens a ticket for a node in repair; gets JSON on stdin; none: off"
    )
    reset_command: tuple[str, ...] = setting(
        (), "program and its arguments that resets the GPUs of a node without jobs, by `drover reset`; none: off"
    )
    reboot_command: tuple[str, ...] = setting(
        (), "program and its arguments that reboots a node, by `drover reboot`; none: off"
    )
    command_timeout_s: float = setting(60.0, "these three are killed after this long", between(1, 3600))
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    command: CommandConfig = field(default_factory=CommandConfig)
    repair_webhook: TicketConfig = field(default_factory=TicketConfig)


def used(config: ActConfig) -> dict[str, tuple[str, ...]]:
    """The actuators that are switched on, and the pools of each."""
    every = {
        "slurm": (config.slurm.enabled, config.slurm.pools),
        "kubernetes": (config.kubernetes.enabled, config.kubernetes.pools),
        "command": (bool(config.command.program), config.command.pools),
    }
    return {name: pools for name, (on, pools) in every.items() if on}


def validate_act(config: ActConfig) -> None:
    """
    Raises:
        SettingsError: one line, what does not go together and what to do.
    """
    actuators = used(config)
    if config.mode != "observe" and not actuators:
        raise SettingsError(
            f'act.mode: "{config.mode}" needs an actuator: set act.slurm.enabled,'
            ' act.kubernetes.enabled or act.command.program, or act.mode = "observe"'
        )
    seen: dict[str, str] = {}
    for name, pools in actuators.items():
        if not pools and len(actuators) > 1:
            raise SettingsError(f"act.{name}.pools: say which pools it has; {', '.join(actuators)} are all switched on")
        for pool in pools:
            if pool in seen:
                raise SettingsError(f"act.{name}.pools: {pool!r} is {seen[pool]}'s already; a pool has one actuator")
            seen[pool] = name
    if config.mode == "observe":
        return
    if config.repair_webhook.on:
        if config.repair_command:
            raise SettingsError(
                "act.repair_webhook: act.repair_command opens the ticket already; leave one of them out"
            )
        webhook_url(config.repair_webhook, "act.repair_webhook")
        webhook_secret(config.repair_webhook, os.environ, "act.repair_webhook")
    if config.slurm.conf is not None and not Path(config.slurm.conf).is_file():
        raise SettingsError(f"act.slurm.conf: {config.slurm.conf}: no such file")
    if config.slurm.enabled and config.slurm.slurmrestd is not None:
        _validate_slurmrestd(config.slurm, config.slurm.slurmrestd)
    if config.kubernetes.enabled:
        _validate_kubernetes(config.kubernetes)


def _validate_slurmrestd(config: SlurmConfig, url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc:  # errors name the address
        raise SettingsError("act.slurm.slurmrestd: no user and no password in the address: see act.slurm.token_file")
    plain = parts.scheme == "http" and (config.plain_http or parts.hostname in ("127.0.0.1", "::1", "localhost"))
    if not (url.startswith("unix:/") or (parts.hostname and (parts.scheme == "https" or plain))):
        raise SettingsError(
            f"act.slurm.slurmrestd: {url}: must be unix:/PATH, https://HOST:PORT, or http://127.0.0.1:PORT; with"
            " act.slurm.plain_http = true also http://HOST:PORT, but then the token can be read on the way"
        )
    if config.token_file is None and not url.startswith("unix:"):
        raise SettingsError("act.slurm.token_file: say where the token is; only a Unix socket does without")
    for key in ("token_file", "ca_file"):
        path = getattr(config, key)
        if path is not None and not Path(path).is_file():
            raise SettingsError(f"act.slurm.{key}: {path}: no such file")


def _validate_kubernetes(config: KubernetesConfig) -> None:
    if find_spec("kubernetes") is None:
        raise SettingsError("act.kubernetes: the client is not installed: pip install 'drover[kubernetes]'")
    if config.server is None and "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise SettingsError("act.kubernetes.server: this is no pod of a cluster; say where the API server is")
    if config.server is not None and not config.server.startswith("https://"):
        raise SettingsError(f"act.kubernetes.server: {config.server}: must begin with https://, the token goes there")
    for key in ("token_file", "ca_file"):
        if not Path(getattr(config, key)).is_file():
            raise SettingsError(f"act.kubernetes.{key}: {getattr(config, key)}: no such file")
