"""Settings of the receivers, and the secrets they name: out of files or the environment, never out of the settings."""

from __future__ import annotations

import base64
import binascii
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from drover_collector.notify.routes import RouteConfig, validate_routes
from drover_core.settings import (
    SettingsError,
    between,
    one_of,
    required,
    setting,
)

SECRET_PREFIX = "whsec_"  # noqa: S105  # not a secret: the prefix that Standard Webhooks gives all of them
PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
WEBHOOK_FORMATS = ("drover", "cloudevents")
LOCAL = ("localhost", "127.0.0.1", "::1")

_NAME = "a word for it, unique among all receivers; shown in an incident's notifications"
_SEVERITY = "from which severity on, where no route says otherwise"
_TIMEOUT = "how long to wait for a connection, and for an answer"
_CA = "PEM file of the authority that signs its certificate; none: those of the system"
_PROXY = "http:// address of a proxy to reach it through; none: directly"
_FILE = "not readable by everyone"


def word(value: str) -> str | None:
    return None if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value) else "must be a word of letters, digits, - and _"


def http_url(value: str) -> str | None:
    """What is wrong with an address, as a check of a setting."""
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        good = good and value.isprintable() and " " not in value  # urlsplit takes more than one line
    except ValueError:
        good = False
    return None if good else "must be an http:// or https:// address"


def _http_urls(values: tuple[str, ...]) -> str | None:
    wrong = next((said for value in values if (said := http_url(value))), None)
    return wrong or (None if values else "name at least one address")


def _labels(values: tuple[str, ...]) -> str | None:
    good = all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.+", value) for value in values)
    return None if good else 'must be like ["cluster=alpha"]'


@dataclass(frozen=True, slots=True)
class WebhookConfig:
    # Part of the ids of messages, which stand in a header and are signed, parted by dots.
    name: str = required(_NAME, word)
    url: str | None = setting(None, "where incidents are posted to", http_url)
    url_file: str | None = setting(None, f"or the file that holds this address, where it is a secret; {_FILE}")
    secret_file: str | None = setting(None, f"file with the signing secret, whsec_BASE64, {_FILE}")
    secret_env: str | None = setting(None, "or the environment variable that holds it")
    format: str = setting(
        "drover", "of the body: drover, or cloudevents (CloudEvents 1.0, structured JSON)", one_of(*WEBHOOK_FORMATS)
    )
    min_severity: str = setting("warning", _SEVERITY, one_of("info", "warning", "critical"))
    timeout_s: float = setting(10.0, _TIMEOUT, between(0.1, 60))
    ca_file: str | None = setting(None, _CA)
    proxy: str | None = setting(None, _PROXY, http_url)


@dataclass(frozen=True, slots=True)
class SlackConfig:
    name: str = required(_NAME, word)
    url_file: str | None = setting(None, f"file with the address of an incoming webhook, {_FILE}")
    url_env: str | None = setting(None, "or the environment variable that holds it")
    min_severity: str = setting("warning", _SEVERITY, one_of("info", "warning", "critical"))
    timeout_s: float = setting(10.0, _TIMEOUT, between(0.1, 60))
    proxy: str | None = setting(None, _PROXY, http_url)


@dataclass(frozen=True, slots=True)
class PagerdutyConfig:
    name: str = required(_NAME, word)
    routing_key_file: str | None = setting(None, f"file with the Integration Key (Events API v2), {_FILE}")
    routing_key_env: str | None = setting(None, "or the environment variable that holds it")
    url: str = setting(PAGERDUTY_URL, "in the EU: https://events.eu.pagerduty.com/v2/enqueue", http_url)
    min_severity: str = setting("critical", _SEVERITY, one_of("info", "warning", "critical"))
    timeout_s: float = setting(10.0, _TIMEOUT, between(0.1, 60))
    proxy: str | None = setting(None, _PROXY, http_url)


@dataclass(frozen=True, slots=True)
class AlertmanagerConfig:
    name: str = required(_NAME, word)
    urls: tuple[str, ...] = required("addresses of all members of the cluster: each alert goes to all", _http_urls)
    labels: tuple[str, ...] = setting((), 'further labels of each alert, such as "cluster=alpha"', _labels)
    username: str | None = setting(None, "where it asks for one")
    password_file: str | None = setting(None, f"file with the password of username, {_FILE}")
    token_file: str | None = setting(None, f"or file with a bearer token, {_FILE}")
    ca_file: str | None = setting(None, _CA)
    repeat_s: float = setting(
        120.0,
        "how often open incidents are sent again; an alert that is not repeated for three times as long ends there",
        between(10, 3600),
    )
    min_severity: str = setting("info", _SEVERITY, one_of("info", "warning", "critical"))
    timeout_s: float = setting(10.0, _TIMEOUT, between(0.1, 60))


@dataclass(frozen=True, slots=True)
class AppriseConfig:
    name: str = required(_NAME, word)
    url_file: str | None = setting(
        None, f"file with addresses as apprise has them, one a line, such as mailto://...; {_FILE}"
    )
    url_env: str | None = setting(None, "or the environment variable that holds them")
    min_severity: str = setting("warning", _SEVERITY, one_of("info", "warning", "critical"))
    timeout_s: float = setting(20.0, "how long to wait for each step of a delivery", between(0.1, 60))


@dataclass(frozen=True, slots=True)
class NotifyConfig:
    max_silence_h: float = setting(168.0, "a silence lasts at most so many hours", between(0.1, 8784))
    webhook: tuple[WebhookConfig, ...] = setting((), "Signed webhooks (standardwebhooks.com), one table each.")
    slack: tuple[SlackConfig, ...] = setting((), "Slack channels, by an incoming webhook of each.")
    pagerduty: tuple[PagerdutyConfig, ...] = setting((), "PagerDuty services (Events API v2).")
    alertmanager: tuple[AlertmanagerConfig, ...] = setting((), "Alertmanagers, or clusters of them.")
    apprise: tuple[AppriseConfig, ...] = setting((), "E-mail and whatever else apprise knows (extra `apprise`).")
    route: tuple[RouteConfig, ...] = setting(
        (), "Who gets which incidents; the first match decides. None: each receiver from its min_severity on."
    )


Receiver = WebhookConfig | SlackConfig | PagerdutyConfig | AlertmanagerConfig | AppriseConfig


def receivers(config: NotifyConfig, webhooks: tuple[WebhookConfig, ...]) -> Iterator[tuple[str, Receiver]]:
    """Every receiver with the key of its table; `webhooks` are those of the older form `[[webhooks]]`."""
    tables: dict[str, tuple[Receiver, ...]] = {
        "webhooks": webhooks,
        "notify.webhook": config.webhook,
        "notify.slack": config.slack,
        "notify.pagerduty": config.pagerduty,
        "notify.alertmanager": config.alertmanager,
        "notify.apprise": config.apprise,
    }
    for table, entries in tables.items():
        for number, entry in enumerate(entries):
            yield f"{table}[{number}]", entry


def validate_notify(config: NotifyConfig, webhooks: tuple[WebhookConfig, ...], environment: Mapping[str, str]) -> None:
    """
    Raises:
        SettingsError: KEY: what is wrong and what to do; no secret.
    """
    seen: dict[str, str] = {}
    for key, entry in receivers(config, webhooks):
        if entry.name in seen:
            raise SettingsError(
                f"{key}.name: {entry.name!r} is there twice (at {seen[entry.name]}); give each its own name"
            )
        seen[entry.name] = key
        _check_addresses(entry, key)
        if isinstance(entry, WebhookConfig):
            webhook_url(entry, key)
            webhook_secret(entry, environment, key)
        elif isinstance(entry, SlackConfig):
            slack_url(entry, environment, key)
        elif isinstance(entry, PagerdutyConfig):
            routing_key(entry, environment, key)
        elif isinstance(entry, AlertmanagerConfig):
            authorization(entry, key)
        elif isinstance(entry, AppriseConfig):
            if find_spec("apprise") is None:
                raise SettingsError(f"{key}: apprise is not installed; pip install 'drover[apprise]'")
            apprise_urls(entry, environment, key)
    validate_routes(config.route, tuple(seen))


def _check_addresses(entry: Receiver, key: str) -> None:
    for name in ("url", "urls", "proxy"):
        value = getattr(entry, name, None) or ()
        values = (value,) if isinstance(value, str) else value
        if any(urlsplit(url).username is not None for url in values):  # and it is not shown
            raise SettingsError(f"{key}.{name}: must not hold a user or password: settings are no place for secrets")
    ca_file = getattr(entry, "ca_file", None)
    if ca_file is not None and not Path(ca_file).is_file():
        raise SettingsError(f"{key}.ca_file: {ca_file}: no such file")


def secret_text(where: str, path: str) -> str:
    """What a file with a secret holds.

    Raises:
        SettingsError: unreadable, or readable by everyone.
    """
    try:
        if stat.S_IMODE(Path(path).stat().st_mode) & stat.S_IRWXO:
            raise SettingsError(f"{where}: {path} is open to every user; chmod o= {path}")
        return Path(path).read_text("utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{where}: {path}: {error.strerror}; check the path and who may read it") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{where}: {path} is not text") from None


def _either(
    key: str, name: str, path: str | None, variable: str | None, environment: Mapping[str, str], why: str
) -> tuple[str, str]:
    """(key and place, secret), out of `NAME_file` or `NAME_env`."""
    if (path is None) == (variable is None):
        raise SettingsError(f"{key}.{name}_file: give either {name}_file or {name}_env; {why}")
    if path is not None:
        return f"{key}.{name}_file: {path}", secret_text(f"{key}.{name}_file", path)
    text = environment.get(variable or "", "").strip()
    if not text:
        raise SettingsError(f"{key}.{name}_env: environment variable {variable} is not set; put it there")
    return f"{key}.{name}_env: environment variable {variable}", text


class Addressed(Protocol):
    """What says where a webhook is, and what its messages are signed with."""

    @property
    def url(self) -> str | None: ...

    @property
    def url_file(self) -> str | None: ...

    @property
    def secret_file(self) -> str | None: ...

    @property
    def secret_env(self) -> str | None: ...


def webhook_url(webhook: Addressed, key: str = "webhook") -> str:
    """
    Raises:
        SettingsError: not given, given twice, or no address.
    """
    if (webhook.url is None) == (webhook.url_file is None):
        raise SettingsError(f"{key}.url: give either url or url_file")
    if webhook.url is not None:
        return webhook.url
    url = secret_text(f"{key}.url_file", webhook.url_file or "")
    if http_url(url):
        raise SettingsError(f"{key}.url_file: {webhook.url_file} does not hold an http:// or https:// address")
    return url


def webhook_secret(webhook: Addressed, environment: Mapping[str, str], key: str = "webhook") -> bytes:
    """The signing key of a webhook. It never appears in a message.

    Raises:
        SettingsError: not given, unreadable, readable by everyone, or not of the form whsec_BASE64.
    """
    place, text = _either(
        key, "secret", webhook.secret_file, webhook.secret_env, environment, "every message is signed"
    )
    try:
        secret = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not text.startswith(SECRET_PREFIX) or not 24 <= len(secret) <= 64:  # lengths that Standard Webhooks asks for
        raise SettingsError(f"{place} does not hold {SECRET_PREFIX} and the base64 of 24 to 64 bytes")
    return secret


def slack_url(slack: SlackConfig, environment: Mapping[str, str], key: str = "slack") -> str:
    """The address of a channel, which is the right to post there.

    Raises:
        SettingsError: as above, or not an https:// address (http:// to this machine is taken too).
    """
    place, url = _either(
        key, "url", slack.url_file, slack.url_env, environment, "the address is a secret: who knows it can post"
    )
    if http_url(url) or (urlsplit(url).scheme != "https" and urlsplit(url).hostname not in LOCAL):
        raise SettingsError(f"{place} does not hold an https:// address, as Slack shows it for an incoming webhook")
    return url


def routing_key(pagerduty: PagerdutyConfig, environment: Mapping[str, str], key: str = "pagerduty") -> str:
    """
    Raises:
        SettingsError: as above, or not 32 characters long, as PagerDuty's are.
    """
    place, text = _either(
        key,
        "routing_key",
        pagerduty.routing_key_file,
        pagerduty.routing_key_env,
        environment,
        "the service's page has it",
    )
    if not re.fullmatch(r"[A-Za-z0-9]{32}", text):
        raise SettingsError(f"{place} does not hold an Integration Key of 32 letters and digits (Events API v2)")
    return text


def authorization(alertmanager: AlertmanagerConfig, key: str = "alertmanager") -> str | None:
    """The value of the Authorization header; None: none is asked for.

    Raises:
        SettingsError: half of it, or both ways, or an unreadable file.
    """
    if (alertmanager.username is None) != (alertmanager.password_file is None):
        raise SettingsError(f"{key}.password_file: give username and password_file, or neither")
    if alertmanager.username is not None and alertmanager.token_file is not None:
        raise SettingsError(f"{key}.token_file: give it or username, not both")
    if alertmanager.token_file is not None:
        return f"Bearer {_one_line(f'{key}.token_file', alertmanager.token_file)}"
    if alertmanager.password_file is not None:
        pair = f"{alertmanager.username}:{_one_line(f'{key}.password_file', alertmanager.password_file)}"
        return "Basic " + base64.b64encode(pair.encode()).decode()
    return None


def _one_line(where: str, path: str) -> str:
    text = secret_text(where, path)
    if not text or not text.isprintable():  # a line break would begin another header
        raise SettingsError(f"{where}: {path} must hold one line")
    return text


def apprise_urls(apprise: AppriseConfig, environment: Mapping[str, str], key: str = "apprise") -> tuple[str, ...]:
    """Addresses in apprise's own form; empty lines and those that begin with # are left out.

    Raises:
        SettingsError: as above, or there is none.
    """
    place, text = _either(
        key, "url", apprise.url_file, apprise.url_env, environment, "addresses of apprise hold passwords"
    )
    urls = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    if not urls or not all(re.match(r"[A-Za-z0-9]+://", url) for url in urls):
        raise SettingsError(f"{place} does not hold addresses like mailto://USER:PASSWORD@HOST?to=ops@example.org")
    return urls
