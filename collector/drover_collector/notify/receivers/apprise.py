"""Send e-mail and whatever else the library apprise supports: https://github.com/caronc/apprise (BSD), 14 MB installed.

Apprise's addresses contain passwords. Its logging is switched off (its own `secure_logging` masks only some), and its
error texts are reported without any part of the address.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit

from drover_collector.notify.base import Delivery, ReceiverOptions
from drover_collector.notify.http import TimeLimited
from drover_collector.notify.wording import Notification, cut, read_message
from drover_core.settings import SettingsError

MAX_TITLE = 200  # characters of an e-mail's subject
MAX_ACCEPTED = 1000  # ids of messages
TYPES = {"critical": "failure", "warning": "warning", "info": "info"}
MAIL = ("mailto", "mailtos")  # the host of these is not a secret
LOGGERS = ("apprise", "requests_oauthlib", "oauthlib", "MARKDOWN")

_logged = threading.local()  # .lines: what apprise logs in this thread


class _KeepLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines = getattr(_logged, "lines", None)
        if lines is not None and len(lines) < 20:
            lines.append(record.getMessage())


def library() -> Any:
    """Return the module apprise, with its logging switched off.

    Raises:
        SettingsError: apprise is not installed.
    """
    try:
        apprise = import_module("apprise")
    except ImportError:
        raise SettingsError("apprise is not installed: pip install 'drover[apprise]'") from None
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.handlers = [_KeepLines()]
    return apprise


def without_secrets(text: str, url: str) -> str:
    """Return `text` without any part of `url`, except the host of an e-mail server."""
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

    def __init__(self, apprise: Any, options: ReceiverOptions, url: str, number: int) -> None:
        self._url = url
        asset = apprise.AppriseAsset(
            app_id="Drover", app_desc="GPU fleet health", app_url="", async_mode=False, http_redirects=False,
            pgp_autogen=False, pem_autogen=False, storage_mode="memory", service_timeout=0,
        )  # fmt: skip
        self._service = apprise.Apprise(asset=asset)
        if not self._service.add(url) or len(self._service) == 0:
            what = f"address {number} ({url.partition('://')[0]}://...) is unknown to apprise or incomplete"
            raise SettingsError(f"apprise {options.name!r}: {what}; try it with `apprise -vv -b test URL`")
        self._limit_s = 2 * options.timeout_s
        for plugin in self._service:
            plugin.socket_connect_timeout = plugin.socket_read_timeout = options.timeout_s
            if url.partition("://")[0].lower() in MAIL:
                plugin.request_rate_per_sec = 0  # apprise waits 5.5 s between e-mails
            self._limit_s += plugin.request_rate_per_sec  # apprise sleeps so long between messages
        self._call = TimeLimited[str](f"apprise-{options.name}-{number}-try", self._limit_s)
        self._who = f"address {number} ({url.partition('://')[0]})"
        self._accepted: OrderedDict[str, None] = OrderedDict()

    def start(self, message_id: str, notification: Notification, now_ms: int) -> None:
        self._message = message_id
        if message_id not in self._accepted:
            self._call.start(lambda: self._send(message_id, notification, now_ms))

    def result(self) -> str:
        """Return why the message was not accepted; "": it was."""
        if self._message in self._accepted:
            return ""
        try:
            trouble = self._call.result()
        except Exception as error:  # noqa: BLE001  # 140 plugins may raise anything
            trouble = f"failed ({type(error).__name__})"
        if trouble is None:
            trouble = f"did not finish within {self._limit_s:g} s"
        return trouble and f"{self._who} {trouble}"

    def _send(self, message_id: str, notification: Notification, now_ms: int) -> str:
        _logged.lines = []
        kind = "success" if notification.over else TYPES.get(notification.severity, "warning")
        title = cut(notification.headline, MAX_TITLE)
        result = self._service.notify(body=notification.text(now_ms), title=title, notify_type=kind, body_format="text")
        if result:
            self._accepted[message_id] = None  # also after the time limit
            while len(self._accepted) > MAX_ACCEPTED:
                self._accepted.popitem(last=False)
            return ""
        reason = without_secrets(_logged.lines[-1], self._url) if _logged.lines else "no reason given"
        return f"did not accept the message: {cut(reason, 200)}"


class Apprise:
    """The addresses of one file. A retry skips the addresses that accepted the message."""

    kind = "apprise"
    repeat_s: float | None = None

    def __init__(self, options: ReceiverOptions, urls: tuple[str, ...]) -> None:
        """
        Raises:
            SettingsError: apprise is not installed or does not know an address.
        """
        self.name = options.name
        self.min_severity = options.min_severity
        self._places = options.places
        apprise = library()
        self._addresses = [_Address(apprise, options, url, number) for number, url in enumerate(urls, 1)]

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        notification = read_message(body, self._places)
        for address in self._addresses:
            address.start(message_id, notification, now_ms)
        troubles = [trouble for address in self._addresses if (trouble := address.result())]
        return Delivery(not troubles, "; ".join(troubles))

    def close(self) -> None:
        """Do nothing: no connection stays open."""
