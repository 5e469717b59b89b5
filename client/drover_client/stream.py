"""Read server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event of the stream of incidents.

    Attributes:
        id: give it as `last_event_id` to go on behind it.
        kind: incident; gap: the id was older than what is kept, so read the list. Later versions may add kinds.
        data: an Incident, or the `from` and `to` of a gap.
    """

    id: str
    kind: str
    data: dict[str, Any]


class Parser:
    """Joins lines to events."""

    def __init__(self, last_id: str) -> None:
        self.last_id = last_id
        self._kind, self._data = "", list[str]()

    def line(self, line: str) -> StreamEvent | None:
        """Take a line. Return the event that it ends."""
        if not line:
            found = StreamEvent(self.last_id, self._kind, json.loads("\n".join(self._data))) if self._data else None
            self._kind, self._data = "", []
            return found
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self.last_id = value
        elif name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        return None
