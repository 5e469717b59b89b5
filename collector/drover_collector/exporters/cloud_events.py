"""Incidents, decisions and actions as CloudEvents 1.0: each one POST in structured JSON.

Attributes: https://github.com/cloudevents/spec, v1.0.2, spec.md, formats/json-format.md and bindings/http-protocol-
binding.md. An event that is sent again has the same id, so a receiver can take each once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from drover_collector.exporters.http_post import Answer, Poster
from drover_collector.exporters.records import Record
from drover_collector.exporters.sending import Sender
from drover_collector.exporters.settings import CloudEventsConfig, Credentials
from drover_core.settings import SettingsError
from drover_core.times import iso

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
_NOT_WORD = re.compile(r"[^A-Za-z0-9_]+")


def cloud_event(record: Record, source: str) -> dict[str, Any]:
    """Return a record as an event in structured JSON.

    Args:
        source: of all events of this cluster, a URI reference.
    """
    name = _NOT_WORD.sub("_", record.name).strip("_") or "changed"
    thing = str(record.attributes.get("id") or record.subject or "-")
    version = record.attributes.get("version")  # an incident may have two of them within one millisecond
    when = f"{record.ts_ms}" if version is None else f"{record.ts_ms}/{version}"
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": f"{record.kind}/{thing}/{name}/{when}",
        "source": source,
        "type": f"drover.{record.kind}.{name}",
        "time": iso(record.ts_ms),
        "datacontenttype": "application/json",
        "data": {"severity": str(record.severity), "text": record.text, **record.attributes},
    }
    if record.subject:  # the specification has no empty one
        event["subject"] = record.subject
    return event


class CloudEvents:
    """One receiver. `take` from any thread.

    Raises (at construction):
        SettingsError: a certificate or a token cannot be used.
    """

    def __init__(self, config: CloudEventsConfig, key: str) -> None:
        self._config, self._credentials = config, Credentials(key, config.token_file)
        self._credentials.headers()
        try:
            self._poster = Poster(config.url, config.timeout_s, config.ca_file)
        except OSError as error:
            raise SettingsError(f"{key}.ca_file: {config.ca_file} cannot be used: {error}") from None
        self.sender: Sender[Record] = Sender(config.name, config.spool_bytes, self._send, 1, "cloud_events")

    def take(self, record: Record) -> None:
        if record.kind in self._config.kinds:
            self.sender.put(record)

    def close(self) -> None:
        self.sender.end()
        self._poster.close()
        self.sender.stop()

    def _send(self, records: Sequence[Record]) -> tuple[Answer, int, int]:
        body = json.dumps(cloud_event(records[0], self._config.source), separators=(",", ":"), allow_nan=False)
        try:
            headers = self._credentials.headers()  # read each time: a token may be replaced
        except SettingsError as error:
            return Answer(str(error)), 0, 0
        answer = self._poster.post(body.encode("utf-8", "replace"), {"content-type": CONTENT_TYPE, **headers})
        done = 1 if not answer.trouble or answer.permanent else 0
        return answer, done, done
