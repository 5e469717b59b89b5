"""E-mail and everything else that the library apprise knows: https://github.com/caronc/apprise (BSD), 14 MB installed.

Its addresses hold passwords. It is kept from logging (its own `secure_logging` masks some), and what it says of a
failure is told without anything that stands in the address.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit

from drover_collector.notify.base import Delivery
from drover_collector.notify.http import Bounded
from drover_collector.notify.wording import Places, Story, cut, story
from drover_core.model.events import Severity
from drover_core.settings import SettingsError

MAX_TITLE = 200  # a subject
REMEMBERED = 1000  # messages of which some address has not taken its own
TYPES = {"critical": "failure", "warning": "warning", "info": "info"}
MAIL = ("mailto", "mailtos")  # whose host is no secret
TALKATIVE = ("apprise", "requests_oauthlib", "oauthlib", "MARKDOWN")

_said = threading.local()  # .lines: what apprise logs in this thread


class _Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines = getattr(_said, "lines", None)
        if lines is not None and len(lines) < 20:
            lines.append(record.getMessage())


def library() -> Any:
    """apprise, silenced.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        apprise = import_module("apprise")
    except ImportError:
        raise SettingsError("apprise is not installed; pip install 'drover[apprise]'") from None
    for name in TALKATIVE:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.handlers = [_Kept()]
    return apprise


def without_secrets(text: str, url: str) -> str:
    """`text` without anything that stands in `url`, except the host that takes e-mail."""
    scheme, _, rest = url.partition("://")
    host = (urlsplit(url).hostname or "") if scheme.lower() in MAIL else ""
    pieces = {form(piece) for piece in re.split(r"[/?&=:@]+", rest) for form in (str, unquote)}
    pieces |= {piece for form in (rest, unquote(rest)) for piece in re.split(r"[^\w.-]+", form)}
    for piece in sorted(pieces, key=len, reverse=True):
        if len(piece) > 2 and piece.lower() not in host:
            text = re.sub(re.escape(piece), "***", text, flags=re.IGNORECASE)
    return " ".join(text.split())


class _Address:
    """One line of the file."""

    def __init__(self, apprise: Any, name: str, url: str, number: int, timeout_s: float) -> None:
        self._url = url
        asset = apprise.AppriseAsset(
            app_id="Drover", app_desc="GPU fleet health", app_url="", async_mode=False, http_redirects=False,
            pgp_autogen=False, pem_autogen=False, storage_mode="memory", service_timeout=0,
        )  # fmt: skip
        self._service = apprise.Apprise(asset=asset)
        if not self._service.add(url) or len(self._service) == 0:
            what = f"address {number} ({url.partition('://')[0]}://...) is none that apprise knows, or lacks a part"
            raise SettingsError(f"apprise {name!r}: {what}; try it with `apprise -vv -b test URL`")
        self._limit_s = 2 * timeout_s
        for plugin in self._service:
            plugin.socket_connect_timeout = plugin.socket_read_timeout = timeout_s
            if url.partition("://")[0].lower() in MAIL:
                plugin.request_rate_per_sec = 0  # else 5.5 s between mails, to one's own server too
            self._limit_s += plugin.request_rate_per_sec  # it sleeps so long between messages
        self._bounded = Bounded[str](f"apprise-{name}-{number}-try", self._limit_s)
        self._who = f"address {number} ({url.partition('://')[0]})"
        self._taken: OrderedDict[str, None] = OrderedDict()

    def start(self, message_id: str, told: Story, now_ms: int) -> None:
        self._message = message_id
        if message_id not in self._taken:
            self._bounded.start(lambda: self._send(message_id, told, now_ms))

    def result(self) -> str:
        """Why it has not been taken; empty: it has."""
        if self._message in self._taken:
            return ""
        try:
            trouble = self._bounded.result()
        except Exception as error:  # noqa: BLE001  # whatever one of 140 plugins does
            trouble = f"failed ({type(error).__name__})"
        if trouble is None:
            trouble = f"has not ended within {self._limit_s:g} s"
        return trouble and f"{self._who} {trouble}"

    def _send(self, message_id: str, told: Story, now_ms: int) -> str:
        _said.lines = []
        kind = "success" if told.over else TYPES.get(told.severity, "warning")
        title = cut(told.headline, MAX_TITLE)
        result = self._service.notify(body=told.text(now_ms), title=title, notify_type=kind, body_format="text")
        if result:
            self._taken[message_id] = None  # even if nobody waits for it any more
            while len(self._taken) > REMEMBERED:
                self._taken.popitem(last=False)
            return ""
        said = without_secrets(_said.lines[-1], self._url) if _said.lines else "it does not say why"
        return f"did not take it: {cut(said, 200)}"


class Apprise:
    """The addresses of one file. One that has taken a message is not sent it again when another has not."""

    kind = "apprise"
    repeat_s: float | None = None

    def __init__(
        self, name: str, urls: tuple[str, ...], min_severity: Severity, timeout_s: float, places: Places
    ) -> None:
        """
        Raises:
            SettingsError: apprise is not installed, or does not know an address.
        """
        self.name = name
        self.min_severity = min_severity
        self._places = places
        apprise = library()
        self._addresses = [_Address(apprise, name, url, number, timeout_s) for number, url in enumerate(urls, 1)]

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        told = story(body, self._places)
        for address in self._addresses:
            address.start(message_id, told, now_ms)
        troubles = [trouble for address in self._addresses if (trouble := address.result())]
        return Delivery(not troubles, "; ".join(troubles))

    def close(self) -> None:
        """It keeps nothing open."""
