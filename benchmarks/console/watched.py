"""A Chromium session of the Fleet page, watched through the DevTools protocol: bytes on the wire, and when the picture
of a refresh was painted."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from streamlit.proto.BackMsg_pb2 import BackMsg

POLLING_MS = 100  # by a timer: a browser gives no frames to a page that another one covers

# In the page before its own scripts: when a picture was asked for, and when the frame with it had been painted.
# `__drover_fleet` is set at the end of each drawing (assets/fleet.js); two animation frames later it is on the screen.
# `first`: of the first drawing; `stands`: of the first by Streamlit's component, which takes over from it.
PROBE = """
(() => {
  const seen = window.__watched = { refreshes: [], first: null, stands: null };
  const fetched = window.fetch;
  let asked = null;
  window.fetch = (...given) => {
    if (String(given[0]).includes("drover/picture")) asked = performance.now();
    return fetched(...given);
  };
  let shown;
  Object.defineProperty(window, "__drover_fleet", {
    configurable: true,
    get: () => shown,
    set: (value) => {
      shown = value;
      const from = asked;
      asked = null;
      requestAnimationFrame(() => requestAnimationFrame(() => {
        const now = performance.now();
        if (seen.stands === null && !value.early) seen.stands = now;
        if (seen.first === null) seen.first = now;
        else if (from !== null) seen.refreshes.push(now - from);
      }));
    },
  });
})();
"""


@dataclass
class Session:
    """One viewer: a browser context of its own, so with an empty cache."""

    context: Any
    page: Any = None
    picture_bytes: list[int] = field(default_factory=list)  # encoded, of each picture
    layout_bytes: list[int] = field(default_factory=list)
    socket_bytes: int = 0
    all_bytes: int = 0  # every HTTP answer
    reruns: int = 0  # asked for over the websocket
    asked: dict[str, str] = field(default_factory=dict)  # request -> what for
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, browser: Any) -> Session:
        context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="dark")
        session = cls(context)
        session.page = context.new_page()
        session.page.add_init_script(PROBE)
        session.page.on("pageerror", lambda error: session.problems.append(str(error)))
        wire = context.new_cdp_session(session.page)
        wire.send("Network.enable")
        wire.on("Network.requestWillBeSent", session._sent)
        wire.on("Network.loadingFinished", session._loaded)
        wire.on("Network.webSocketFrameReceived", session._frame)
        wire.on("Network.webSocketFrameSent", session._rerun)
        return session

    def _sent(self, event: dict[str, Any]) -> None:
        url = event["request"]["url"]
        self.asked[event["requestId"]] = next((w for w in ("picture", "layout") if f"drover/{w}" in url), "")

    def _loaded(self, event: dict[str, Any]) -> None:
        size = round(event["encodedDataLength"])  # on the wire: compressed, with the headers
        self.all_bytes += size
        what = self.asked.pop(event["requestId"], "")
        if what == "picture":
            self.picture_bytes.append(size)
        elif what == "layout":
            self.layout_bytes.append(size)

    def _frame(self, event: dict[str, Any]) -> None:
        response = event["response"]
        text = response["payloadData"]
        # Binary payloads come in base64; what permessage-deflate saves on the wire is not known, so this is the most.
        self.socket_bytes += len(text) * 3 // 4 if response["opcode"] == 2 else len(text)

    def _rerun(self, event: dict[str, Any]) -> None:
        if event["response"]["opcode"] == 2:
            self.reruns += BackMsg.FromString(base64.b64decode(event["response"]["payloadData"])).HasField(
                "rerun_script"
            )

    def open(self, url: str, limit_ms: float) -> tuple[float, float]:
        """Go there; ms until the first picture was painted, and until the page's own had taken its place, by the page's
        own clock since the navigation began."""
        self.page.bring_to_front()
        self.page.goto(url, wait_until="commit", timeout=limit_ms)
        painted = "window.__watched && window.__watched.stands !== null"
        self.page.wait_for_function(painted, timeout=limit_ms, polling=POLLING_MS)
        first, stands = self.page.evaluate("[window.__watched.first, window.__watched.stands]")
        return float(first), float(stands)

    def forget(self) -> None:
        """Count from now on."""
        self.picture_bytes, self.layout_bytes, self.socket_bytes, self.all_bytes, self.reruns = [], [], 0, 0, 0
        self.page.evaluate("window.__watched.refreshes.length = 0")

    def refreshes(self) -> list[float]:
        """ms of each refresh since then: from asking for the picture until it was painted."""
        return [float(ms) for ms in self.page.evaluate("window.__watched.refreshes")]
