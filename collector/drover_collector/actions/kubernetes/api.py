"""The few calls of the Kubernetes API that Drover makes, through the official client; each with a timeout.

The client's models are not used: a node has fields of other tools that must come back unchanged, and answers of
servers older or newer than the client must be read too. The rights that they need: deploy/kubernetes/rights/rbac.yaml.

Answers are those of pkg/registry/core/pod/storage/eviction.go and of the API conventions ("Response Status Kind").
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drover_collector.actions.base import ActError, AwayError, LaterError
from drover_collector.actions.settings import KubernetesConfig

MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
RIGHTS = "deploy/kubernetes/rights/rbac.yaml has the rights it needs"
MANAGER = "drover"
PAGE = 200  # whole nodes in one answer, some 10 kB each
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"  # as kubectl asks: columns instead of objects


class ConflictError(LaterError):
    """Somebody has changed it since it was read."""


class HeldError(LaterError):
    """A disruption budget does not let the pod go now."""


class KubernetesApi:
    """Not for several threads at once. Nothing is asked before the first call.

    All calls raise AwayError (no answer, or the token is refused), LaterError (try again) or ActError.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._core: Any = None

    def node(self, name: str) -> dict[str, Any] | None:
        """None: there is none of this name."""
        status, body = self._ask("read_node", name=name)
        return None if status == 404 else good(status, body, f"read node {name}")

    def statuses(self) -> dict[str, str]:
        """Of every node what `kubectl get nodes` shows: Ready, NotReady or Unknown, with ",SchedulingDisabled".

        As a table without its objects ("Receiving resources as Tables" in the API's concepts), some 100 bytes for each:
        whole nodes of a large cluster weigh 100 MB. Of version 0: from the server's memory, not from etcd.
        """
        status, body = self._ask("table", path="/api/v1/nodes")
        table = good(status, body, "list the nodes")
        try:
            titles = [column["name"] for column in table["columnDefinitions"]]
            name, state = titles.index("Name"), titles.index("Status")
            return {row["cells"][name]: row["cells"][state] for row in table.get("rows") or ()}
        except (KeyError, IndexError, TypeError, ValueError):
            raise ActError("this API server lists nodes in a way that Drover does not know") from None

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Yield every node whole, page by page: for taints and conditions, which the table of `statuses` lacks.

        Raises:
            ActError: the list is not whole: no answer, one without a list, or pages without an end.
        """
        after = ""
        while True:
            more = {"_continue": after} if after else {}
            status, body = self._ask("list_node", limit=PAGE, **more)
            page = good(status, body, "list the nodes")
            items, before = page.get("items"), after
            if not isinstance(items, list):
                raise ActError("cannot list the nodes: the API server answers without a list")
            yield from (node for node in items if isinstance(node, dict))
            after = str((page.get("metadata") or {}).get("continue") or "")
            if not after:
                return
            if after == before:
                raise ActError("cannot list the nodes: the API server sends the same page again and again")

    def read(self, path: str) -> dict[str, Any] | None:
        """Return the object at a path of the API; None: there is none."""
        status, body = self.request("GET", path)
        return None if status == 404 else good(status, body, f"read {path}")

    def may(self, verb: str, resource: str, subresource: str = "", group: str = "") -> bool:
        """Whether this token may do so, as the API server itself says (SelfSubjectAccessReview); changes nothing."""
        asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        status, answer = self._ask("review", body=body)
        found = good(status, answer, "ask for its own rights").get("status")
        return isinstance(found, dict) and found.get("allowed") is True

    def patch_node(self, name: str, patch: Mapping[str, Any]) -> None:
        """A merge patch with the node's resourceVersion. Raises ConflictError: it is not the newest."""
        status, body = self._ask(
            "patch_node", name=name, body=dict(patch), field_manager=MANAGER, _content_type=MERGE
        )  # fmt: skip
        good(status, body, f"change node {name}")

    def patch_conditions(self, name: str, condition: Mapping[str, str]) -> None:
        """Set one condition; others' stay, as the list is merged by their types."""
        patch = {"status": {"conditions": [dict(condition)]}}
        status, body = self._ask(
            "patch_node_status", name=name, body=patch, field_manager=MANAGER, _content_type=STRATEGIC
        )
        good(status, body, f"set condition {condition['type']} of node {name}")

    def pods(self, node: str) -> list[dict[str, Any]]:
        """Of a node, those that have not ended."""
        selector = f"spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
        status, body = self._ask("list_pod_for_all_namespaces", field_selector=selector)
        return list(good(status, body, f"list the pods of node {node}").get("items") or ())

    def eviction_version(self) -> str:
        """policy/v1 (from 1.22 on) or policy/v1beta1, whichever this server says it takes."""
        status, body = self._ask("get_api_resources")
        found = good(status, body, "list what the server knows").get("resources") or ()
        for resource in found:
            if resource.get("name") == "pods/eviction":
                return f"{resource.get('group') or 'policy'}/{resource.get('version') or 'v1beta1'}"
        raise ActError("this API server has no evictions; delete the pods by hand")

    def evict(self, pod: Mapping[str, Any], version: str) -> bool:
        """Ask this very pod, not a successor of its name, to end. False: it is gone. Raises HeldError."""
        meta = pod["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        eviction = {
            "apiVersion": version, "kind": "Eviction", "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": meta["uid"]}},
        }  # fmt: skip
        status, body = self._ask("create_namespaced_pod_eviction", name=name, namespace=namespace, body=eviction)
        if status in (404, 409):  # 409: the precondition; another pod has its name
            return False
        if status == 429 or (status == 500 and "PodDisruptionBudget" in str(body.get("message"))):
            causes = [c["message"] for c in (body.get("details") or {}).get("causes") or () if c.get("message")]
            raise HeldError("; ".join(map(str, causes or [body.get("message") or "it does not say which"])))
        good(status, body, f"evict pod {namespace}/{name}")
        return True

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Return status and body of a call of an API group that older clients and servers lack."""
        return self._ask("request", method=method, path=path, body=body, query=query or {})

    # ---- one call

    def _ask(self, call: str, **arguments: Any) -> tuple[int, dict[str, Any]]:
        """Status and body. A token that is refused is read from its file again, once: it may have been renewed."""
        status, body = self._send(call, arguments)
        if status == 401:
            self._read_token()
            status, body = self._send(call, arguments)
        if status == 401:
            raise AwayError(
                f"Kubernetes refuses the token in {self._config.token_file} (401): it has expired or is not of this"
                " cluster; renew the file, it is read again by itself"
            )
        return status, body

    def _send(self, call: str, arguments: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        import urllib3

        if self._core is None:
            self._connect()
        limit = self._config.timeout_s
        try:
            own: Mapping[str, Any] = {"table": self._table, "review": self._review, "request": self._request}
            ask = own[call] if call in own else getattr(self._core, call)
            answer = ask(**arguments, _preload_content=False, _request_timeout=(limit, limit))
            status, text = int(answer.status), answer.data
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise AwayError(f"Kubernetes does not answer at {self._url()}: {_first(error)}") from None
        except self._refused as error:
            if not error.status:  # TLS has failed
                raise AwayError(f"Kubernetes at {self._url()}: {_first(error.reason)}") from None
            status, text = int(error.status), (error.body or str(error.reason)).encode()
        try:
            body = json.loads(text or b"{}")
        except ValueError:
            if status < 300:
                raise AwayError(f"what answers at {self._url()} is no API server: no JSON came") from None
            body = {"message": text[:200].decode(errors="replace")}
        return status, body if isinstance(body, dict) else {}

    def _table(self, path: str, _preload_content: bool, _request_timeout: tuple[float, float]) -> Any:
        """A GET that the client's own methods cannot make: none of them asks for tables."""
        client = self._core.api_client
        query = [("includeObject", "None"), ("resourceVersion", "0")]
        request = client.param_serialize(
            "GET", path, query_params=query, header_params={"Accept": TABLE}, auth_settings=["BearerToken"]
        )
        return client.call_api(*request, _request_timeout=_request_timeout).response

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str],
        _preload_content: bool, _request_timeout: tuple[float, float],
    ) -> Any:  # fmt: skip
        client = self._core.api_client
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = MERGE if method == "PATCH" else "application/json"
        request = client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        return client.call_api(*request, _request_timeout=_request_timeout).response

    def _review(self, **arguments: Any) -> Any:
        from kubernetes import client

        return client.AuthorizationV1Api(self._core.api_client).create_self_subject_access_review(**arguments)

    def _connect(self) -> None:
        try:
            from kubernetes import client
        except ImportError:
            raise ActError("the Kubernetes client is not installed: pip install 'drover[kubernetes]'") from None
        made = client.Configuration(host=self._url(), retries=False)  # the worker tries again, and says so
        made.ssl_ca_cert = self._config.ca_file
        self._settings, self._refused = made, client.ApiException
        self._read_token()
        self._core = client.CoreV1Api(client.ApiClient(made))

    def _read_token(self) -> None:
        try:
            token = Path(self._config.token_file).read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise AwayError(f"the token file {self._config.token_file} cannot be read: {_first(error)}") from None
        if not token or any(c.isspace() for c in token):  # nor may it get into an error's text
            raise AwayError(f"the token file {self._config.token_file} must hold one token and nothing else")
        self._settings.api_key = {"authorization": f"Bearer {token}"}

    def _url(self) -> str:
        return self._config.server or in_cluster(os.environ)


def in_cluster(environment: Mapping[str, str]) -> str:
    """Return the API server's address in a pod; "" outside of a cluster."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def good(status: int, body: dict[str, Any], what: str) -> dict[str, Any]:
    """The body of a success. Raises the error that the status stands for."""
    if 200 <= status < 300:
        return body
    said = f"cannot {what}: {body.get('message') or 'no reason given'} ({status})"
    if status == 403:
        raise ActError(f"{said}; {RIGHTS}")
    if status == 409:
        raise ConflictError(said)
    if status in (502, 503, 504):
        raise AwayError(said)
    if status == 429 or status >= 500:
        raise LaterError(said)
    raise ActError(said)


def _first(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
