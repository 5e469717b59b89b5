"""What a browser's websocket carries: the bytes of its TCP connection as the kernel counts them, packed and with their
headers. The DevTools protocol shows only what they are when unpacked (`permessage-deflate`, RFC 7692)."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

RECEIVED = re.compile(r"bytes_received:(\d+)")


class Websocket:
    """Of the one Chromium here that has a page of `port` open; `look` twice a second. Of its connections the websocket
    is the one that gets something most often: pictures come once in 5 s."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._grew: Counter[str] = Counter()

    def look(self) -> None:
        command = ["ss", "-tinpHO", "state", "established", "dport", "=", f":{self._port}"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
        for line in lines:
            if "chrom" not in line:
                continue
            own = line.split()[2]
            found = RECEIVED.search(line)
            got = int(found[1]) if found else 0
            self._first.setdefault(own, got)
            self._grew[own] += got > self._last.get(own, got)
            self._last[own] = got

    @property
    def received(self) -> int:
        """Bytes since the first look. Raises RuntimeError when there was no websocket."""
        if not any(self._grew.values()):
            raise RuntimeError("no websocket of a Chromium got anything: is `ss` allowed to see its process?")
        own = self._grew.most_common(1)[0][0]
        return self._last[own] - self._first[own]
