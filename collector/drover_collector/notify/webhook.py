"""One signed POST, as standardwebhooks.com describes it: id, timestamp and an HMAC-SHA256 over both and the body.

The address of a webhook is often a secret of its own, so no message names it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError, SSLError

from drover_collector.notify.base import Delivery
from drover_proto.events import SEVERITY_ORDER, Incident, Severity
from drover_proto.reports import incident_report
from drover_proto.times import iso


def sign(secret: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of the webhook-signature header."""
    signed = b".".join((message_id.encode(), str(timestamp_s).encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def message(kind: str, incident: Incident, ts_ms: int, console_url: str) -> str:
    """The body: `kind` is incident.opened, incident.changed or incident.closed."""
    data: dict[str, Any] = incident_report(incident)
    data["version"] = incident.version
    data["console"] = f"{console_url.rstrip('/')}/incidents?id={incident.id}"
    return json.dumps({"type": kind, "timestamp": iso(ts_ms), "data": data}, separators=(",", ":"), allow_nan=False)


class Webhook:
    """A receiver. `deliver` blocks for at most about twice `timeout_s`; not for use by two threads at once."""

    kind = "webhook"
    repeat_s: float | None = None

    def __init__(self, name: str, url: str, secret: bytes, min_severity: Severity, timeout_s: float) -> None:
        self.name = name
        self.min_severity = min_severity
        self._url = url
        self._secret = secret
        self._timeout_s = timeout_s
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1)

    def wants(self, severity: Severity) -> bool:
        return SEVERITY_ORDER.index(severity) >= SEVERITY_ORDER.index(self.min_severity)

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        """Post once. Only a 2xx answer counts; a redirect is not followed: it would carry the signature elsewhere."""
        timestamp_s = now_ms // 1000
        headers = {
            "content-type": "application/json",
            "user-agent": "drover",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": sign(self._secret, message_id, timestamp_s, body),
        }
        try:
            answer = self._pool.request(
                "POST",
                self._url,
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=self._timeout_s, read=self._timeout_s),
                redirect=False,
                retries=False,
                preload_content=False,  # nobody reads the body, however long it is
            )
        except NewConnectionError:  # before its parent class, a timeout
            return Delivery(False, "cannot connect; is the receiver running, and its name known here?")
        except ConnectTimeoutError:
            return Delivery(False, f"no connection within {self._timeout_s:g} s")
        except ReadTimeoutError:
            return Delivery(False, f"no answer within {self._timeout_s:g} s")
        except SSLError:
            return Delivery(False, "TLS failed; is the receiver's certificate valid and trusted here?")
        except (HTTPError, OSError) as error:
            return Delivery(False, f"the connection broke ({type(error).__name__})")
        answer.close()
        if 200 <= answer.status < 300:
            return Delivery(True)
        if 300 <= answer.status < 400:
            return Delivery(False, f"answered {answer.status}, a redirect, not followed; set its final address")
        return Delivery(False, f"answered {answer.status}")

    def close(self) -> None:
        self._pool.clear()
