"""Settings of the dead-man's switch. Its addresses are secrets: who knows one can hide the silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drover_collector.notify.settings import http_url, secret_text
from drover_core.settings import SettingsError, between, setting


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    url_file: str | None = setting(
        None,
        "file with the address that is requested (GET) while Drover sees, judges and notifies; not open to everyone",
    )
    url_env: str | None = setting(None, "or the environment variable that holds it; neither: no sign of life is given")
    fail_url_file: str | None = setting(
        None, "file with the address that is requested while it is blind, such as that of healthchecks.io with /fail"
    )
    interval_s: float = setting(
        60.0, "seconds between two signs; let the other side alarm after three", between(5, 3600)
    )
    silent_ratio: float = setting(
        0.5, "blind when more than this share of the nodes that ever reported is silent", between(0.01, 1)
    )
    timeout_s: float = setting(10.0, "how long to wait for a connection, and for an answer", between(0.1, 60))
    ca_file: str | None = setting(None, "PEM file of the authority that signs its certificate; none: the system's")
    proxy: str | None = setting(None, "http:// address of a proxy to reach it through; none: directly", http_url)

    @property
    def on(self) -> bool:
        return self.url_file is not None or self.url_env is not None


def ping_urls(config: HeartbeatConfig, environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """(of life, of blindness); None: not set.

    Raises:
        SettingsError: given twice, unreadable, readable by everyone, not set, or no address. No secret is in it.
    """
    if config.url_file is not None and config.url_env is not None:
        raise SettingsError("heartbeat.url_file: give it or url_env, not both")
    if config.fail_url_file is not None and not config.on:
        raise SettingsError("heartbeat.fail_url_file: without url_file or url_env nobody notices the silence")
    if config.ca_file is not None and not Path(config.ca_file).is_file():
        raise SettingsError(f"heartbeat.ca_file: {config.ca_file}: no such file")
    url = None
    if config.url_env is not None:
        url = environment.get(config.url_env, "").strip()
        if not url:
            raise SettingsError(f"heartbeat.url_env: environment variable {config.url_env} is not set; put it there")
    return (
        _address("heartbeat.url_env", url) if url else _of_file("heartbeat.url_file", config.url_file),
        _of_file("heartbeat.fail_url_file", config.fail_url_file),
    )


def _of_file(key: str, path: str | None) -> str | None:
    return None if path is None else _address(f"{key}: {path}", secret_text(key, path))


def _address(where: str, url: str) -> str:
    if http_url(url):
        raise SettingsError(f"{where} does not hold an http:// or https:// address")
    return url
