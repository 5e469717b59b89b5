"""An API server in memory that speaks policy/v1 evictions, as current clusters do; the real one of the tests does not.

Its answers to evictions are those that 1.36 was seen to give; the rest is as little as the actuator asks for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

FRESH = "Cannot evict pod as the disruption budget train is still being processed by the server."
BUDGET = "The disruption budget train needs 2 healthy pods and has 2 currently"
TWO = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."


def _refusal(message: str, cause: str) -> dict[str, Any]:
    causes = [{"reason": "DisruptionBudget", "message": cause}]
    return {"kind": "Status", "reason": "TooManyRequests", "message": message, "details": {"causes": causes}}


ANSWERS: dict[str, tuple[int, dict[str, Any], dict[str, str]]] = {
    "fresh": (429, _refusal(FRESH, FRESH), {"Retry-After": "10"}),
    "budget": (429, _refusal("Cannot evict pod as it would violate the pod's disruption budget.", BUDGET), {}),
    "two": (500, {"kind": "Status", "message": TWO}, {}),
    "gone": (404, {"kind": "Status", "reason": "NotFound", "message": "pods not found"}, {}),
    "successor": (409, {"kind": "Status", "reason": "Conflict", "message": "the UID in the precondition"}, {}),
    "forbidden": (403, {"kind": "Status", "message": "cannot create resource pods/eviction"}, {}),
}


COLUMNS = [{"name": name, "type": "string"} for name in ("Name", "Status", "Roles", "Age", "Version")]


def merged(there: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """By a JSON merge patch (RFC 7386)."""
    found = dict(there)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key) or {}, value) if isinstance(value, dict) else value
    return found


class StandIn:
    """One node. `says` names what each pod's eviction is answered; a pod that it does not name goes at once."""

    def __init__(self, node: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        self.url = ""
        self.node, self.pods = node, pods
        self.says: dict[str, str] = {}
        self.evictions: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []  # of the table of nodes
        self.broken: tuple[int, bytes] | None = None  # what everything is answered, as by a proxy before it
        self.tracks = True  # who has set the cordon, in managedFields, as current servers do
        self.manager = ""  # of the request that is answered now
        self.others: list[dict[str, Any]] = []  # nodes that are only listed
        self.asks_table, self.query = True, dict[str, list[str]]()  # of the request that is answered now

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        if path.endswith("/eviction"):
            self.evictions.append(body)
            name = body["metadata"]["name"]
            if name in self.says:
                return ANSWERS[self.says[name]]
            self.pods = [pod for pod in self.pods if pod["metadata"]["name"] != name]
            return 201, {"kind": "Status", "status": "Success"}, {}
        if path in ("/api/v1", "/api/v1/"):
            eviction = {"name": "pods/eviction", "group": "policy", "version": "v1", "kind": "Eviction"}
            return 200, {"kind": "APIResourceList", "resources": [eviction]}, {}
        if path == "/api/v1/nodes" and not self.asks_table:
            return self.node_list()
        if path == "/api/v1/nodes":
            return 200, {"kind": "Table", "columnDefinitions": COLUMNS, "rows": self.rows}, {}
        if path == "/api/v1/pods":
            return 200, {"kind": "PodList", "items": self.pods}, {}
        if method == "PATCH" and path.endswith("/status"):
            conditions = {c["type"]: c for c in (*self.node["status"]["conditions"], *body["status"]["conditions"])}
            self.node["status"]["conditions"] = list(conditions.values())  # merged by their types
        elif method == "PATCH":
            self.change(body, self.manager)
        return 200, self.node, {}

    def node_list(self) -> tuple[int, dict[str, Any], dict[str, str]]:
        """In pages of `limit`, with a token for the next one, as "Retrieving large results sets in chunks" says."""
        first, most = int(self.query.get("continue", ["0"])[0]), int(self.query.get("limit", ["500"])[0])
        every = [self.node, *self.others]
        more = {"continue": str(first + most)} if first + most < len(every) else {}
        return 200, {"kind": "NodeList", "metadata": more, "items": every[first : first + most]}, {}

    def change(self, patch: dict[str, Any], manager: str) -> None:
        """A field has the manager that has last given it another value; of one that is not there nobody is noted."""
        before = self.node["spec"].get("unschedulable")
        self.node |= merged(self.node, patch)
        now = self.node["spec"].get("unschedulable")
        if self.tracks and now != before:
            owned = {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}
            self.node["metadata"]["managedFields"] = [owned] if now else []

    def cordon(self, on: bool = True) -> None:
        """What somebody does with kubectl."""
        self.change({"spec": {"unschedulable": True if on else None}}, "kubectl-cordon")


@contextmanager
def stand_in(made: StandIn) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            path, _, query = self.path.partition("?")
            made.query = parse_qs(query)
            made.manager = made.query.get("fieldManager", [""])[0]
            made.asks_table = "as=Table" in self.headers.get("Accept", "")
            status, answer, headers = made.answer(self.command, path, body)
            text = json.dumps(answer).encode()
            if made.broken is not None:
                status, text = made.broken
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = _do

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
