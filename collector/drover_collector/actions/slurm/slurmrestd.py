"""Slurm through slurmrestd, its REST API: for a collector on a machine without Slurm's programs or its munge key.

A client of `slurm.SlurmActuator`, as `scontrol.Scontrol` is. Fields are those of the OpenAPI of versions v0.0.39 (Slurm
23.02) and newer; the first that this slurmrestd serves is used. v0.0.38 (22.05, Debian 12) and older show nodes and
cannot change them. No version has a call that requeues a job: see `requeues`.

Who is asked as: over a Unix socket with no token the user of this process (rest_auth/local); with a token its user
(rest_auth/jwt, `scontrol token`). The token is read from its file for each call, as tokens are short-lived, and never
becomes part of an error.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from drover_collector.actions.base import ActError, AwayError
from drover_collector.actions.settings import SlurmConfig
from drover_collector.actions.slurm.save_signal import SaveSignal, of_words
from drover_collector.actions.slurm.scontrol import SlurmNode, failure, states_of

VERSIONS = tuple(f"v0.0.{number}" for number in range(46, 38, -1))  # newest first; each Slurm serves three or four
TOO_OLD = "v0.0.38"
ONE_BY_ONE = 8  # nodes that are asked for each on its own; more: by one list of all
MAX_BYTES = 256 << 20  # of one answer; a job is some 10 kB
HOLDING = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED"})
UNIX = "unix:"
NO_ERROR = ": No error"
REFUSED = "authentication error"
NO_COMMENT = "slurmrestd shows no batch script, and its comment names no signal (--comment=drover:signal=USR1)"
DAY_S = 86_400


class Slurmrestd:
    """Not for several threads at once. Nothing is asked before the first call."""

    requeues = False

    def __init__(self, config: SlurmConfig) -> None:
        self._url = config.slurmrestd or ""
        self._token_file, self._ca_file, self._timeout_s = config.token_file, config.ca_file, config.timeout_s
        self._version = ""
        self._flags: tuple[str, frozenset[str]] = "", frozenset()  # version, and flags with which it signals

    def nodes(self, names: Sequence[str]) -> Mapping[str, SlurmNode]:
        """Those of `names` that Slurm knows."""
        if len(names) > ONE_BY_ONE:
            listed = self._must("GET", "nodes/")
        else:
            # slurmctld counts what is allocated only when it is asked for all nodes: else one whose jobs have ended
            # shows MIXED until somebody does (24.11). "All that have changed since tomorrow" makes it count, and is
            # answered with none.
            _, body = self._ask("GET", f"nodes/?update_time={int(time.time()) + DAY_S}")
            if isinstance(away := failure(_errors(body)), AwayError):
                raise away
            listed = [entry for name in names for entry in self._node(name)]
        wanted = set(names)
        return {node.name: node for node in map(_node, listed) if node.name in wanted}

    def update(self, node: str, **fields: str) -> None:
        """`state`, `reason` and `weight` as in `scontrol update nodename=`."""
        body: dict[str, Any] = {key: value for key, value in fields.items() if key == "reason"}
        if "state" in fields:
            body["state"] = [fields["state"].upper()]
        if "weight" in fields:
            body["weight"] = {"set": True, "infinite": False, "number": int(fields["weight"])}
        self._must("POST", f"node/{quote(node, safe='')}", body)

    def jobs(self, node: str) -> tuple[str, ...]:
        """Ids of jobs that hold something of the node now. The API has no narrower question than all jobs."""
        found = [
            str(job.get("job_id"))
            for job in self._must("GET", "jobs/", what="jobs")
            if _words(job.get("job_state")) & HOLDING and in_hostlist(node, str(job.get("nodes") or ""))
        ]
        return tuple(dict.fromkeys(found))

    def requeue(self, job: str) -> None:
        raise ActError(f"slurmrestd has no call that requeues a job; scontrol requeue {job}")

    def save_signal(self, job: str) -> SaveSignal | None:
        """Return the signal in a job's comment. No version shows the batch script, which may name one as well."""
        found = self._must("GET", f"job/{quote(job, safe='')}", what="jobs")
        signal = of_words(str(found[0].get("comment") or "")) if found else None
        if signal is None:
            raise ActError(NO_COMMENT)
        return signal

    def signal(self, job: str, signal: SaveSignal) -> None:
        """As scancel(1): the steps get it, or the batch script alone.

        `DELETE /job/{job_id}` with `signal` and `flags`, if the server's own OpenAPI has them. Seen with 24.11: without
        a flag the batch script gets it as well, unlike with scancel, and one without a trap would end; without a signal
        the whole job would. A job that has ended is no error.
        """
        flag = "BATCH_JOB" if signal.to_script else "FULL_STEPS_ONLY"
        if flag not in self._signal_flags():
            raise ActError(f"this slurmrestd has no flag {flag}: the signal could end the job")
        self._must("DELETE", f"job/{quote(job, safe='')}?signal={quote(signal.name, safe='')}&flags={flag}", what="")

    def _signal_flags(self) -> frozenset[str]:
        """Return the flags with which a signal may be sent, by the server's description of itself."""
        self._ask("GET", "ping/")  # sets the version
        if self._flags[0] != self._version:
            paths = self._send("GET", "/openapi/v3")[1].get("paths") or {}
            call = paths.get(f"/slurm/{self._version}/job/{{job_id}}") or {}
            found = [p for p in (call.get("delete") or {}).get("parameters") or () if p.get("name") == "flags"]
            schema = (found[0].get("schema") or {}) if found else {}
            self._flags = self._version, frozenset(schema.get("enum") or ())
        return self._flags[1]

    # ---- one call

    def _node(self, name: str) -> list[dict[str, Any]]:
        """None: Slurm knows no such node. 24.11 calls that error 0, "No error"."""
        status, body = self._ask("GET", f"node/{quote(name, safe='')}")
        error = _errors(body)
        if error.endswith(NO_ERROR) or "invalid node name" in error.lower():
            return []
        return list(_good(status, body, "nodes"))

    def _must(self, method: str, path: str, body: Mapping[str, Any] | None = None, what: str = "nodes") -> Any:
        status, answer = self._ask(method, path, body)
        return _good(status, answer, "" if body is not None else what)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        if not self._version:
            self._version = self._newest()
        try:
            return self._send(method, f"/slurm/{self._version}/{path}", body)
        except AwayError:
            self._version = ""  # it may come back as another one
            raise

    def _newest(self) -> str:
        for version in (*VERSIONS, TOO_OLD):
            if self._send("GET", f"/slurm/{version}/ping/")[0] == 404:
                continue
            if version != TOO_OLD:
                return version
            raise ActError(
                f"slurmrestd at {self._url} serves {TOO_OLD} at the newest (Slurm 22.05), which cannot change nodes:"
                " it takes Slurm 23.02, or act.slurm.scontrol without act.slurm.slurmrestd"
            )
        raise ActError(
            f"slurmrestd at {self._url} serves none of {VERSIONS[-1]} to {VERSIONS[0]}; is openapi/slurmctld loaded?"
        )

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        headers = {"Accept": "application/json"}
        if self._token_file is not None:
            headers["X-SLURM-USER-TOKEN"] = _token(self._token_file)
        if body is not None:
            headers["Content-Type"] = "application/json"
        made = self._connection()
        try:
            made.request(method, path, None if body is None else json.dumps(body), headers)
            answer = made.getresponse()
            text = self._read(answer)
        except (OSError, http.client.HTTPException) as error:
            raise AwayError(f"slurmrestd does not answer at {self._url}: {error or type(error).__name__}") from None
        finally:
            made.close()
        try:
            found = json.loads(text or b"{}")
        except ValueError:
            if answer.status < 300:
                raise AwayError(f"what answers at {self._url} is no slurmrestd: no JSON came") from None
            found = {"errors": [{"error": text[:200].decode(errors="replace")}]}
        found = found if isinstance(found, dict) else {}
        if answer.status in (401, 403) or REFUSED in _errors(found).lower():  # slurmrestd's word, or slurmctld's
            whose = f"the token in {self._token_file}" if self._token_file else "this user without a token"
            raise AwayError(f"slurmrestd at {self._url} refuses {whose} ({answer.status})")
        return answer.status, found

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        text, until = bytearray(), time.monotonic() + self._timeout_s
        while chunk := answer.read1(1 << 20):
            text += chunk
            if len(text) > MAX_BYTES:
                raise AwayError(f"slurmrestd at {self._url} sends more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > until:
                raise AwayError(f"slurmrestd at {self._url} did not end its answer within {self._timeout_s:g} s")
        return bytes(text)

    def _connection(self) -> http.client.HTTPConnection:
        if self._url.startswith(UNIX):
            return _Unix(self._url.removeprefix(UNIX), self._timeout_s)
        parts = urlsplit(self._url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=self._ca_file)
            except OSError as error:
                raise AwayError(f"the certificates in {self._ca_file} cannot be read: {error.strerror}") from None
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def in_hostlist(node: str, hostlist: str) -> bool:
    """Whether a Slurm hostlist such as `gpu[01-04,07],login1` names the node."""
    return any(_named(node, part) for part in re.split(r",(?![^\[]*\])", hostlist))


def _named(node: str, part: str) -> bool:
    words = re.split(r"\[([^]]*)\]", part)  # literal, ranges, literal, ranges, ...
    pattern = "".join(r"(\d+)" if at % 2 else re.escape(word) for at, word in enumerate(words))
    found = re.fullmatch(pattern, node)
    return found is not None and all(
        any(_within(number, *bounds.partition("-")[::2]) for bounds in ranges.split(","))
        for number, ranges in zip(found.groups(), words[1::2], strict=True)
    )


def _within(number: str, first: str, last: str) -> bool:
    """`first` gives the width: 01 to 10, and 8 to 11."""
    return int(first) <= int(number) <= int(last or first) and number == str(int(number)).zfill(len(first))


def _node(entry: Mapping[str, Any]) -> SlurmNode:
    try:
        weight = entry["weight"]
        return SlurmNode(
            str(entry["name"]), states_of([*_words(entry["state"]), *_words(entry.get("state_flags"))]),
            int(weight["number"] if isinstance(weight, dict) else weight),
            str(entry.get("reason") or "").strip(), str(entry.get("reason_set_by_user") or ""),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        raise ActError(f"slurmrestd answered something else than a node: {str(entry)[:80]}") from None


def _words(state: object) -> frozenset[str]:
    """A state is a word in older versions, and a list of words in newer ones."""
    listed = state if isinstance(state, list) else [state] if state else []
    return frozenset(str(word).upper() for word in listed)


def _good(status: int, body: Mapping[str, Any], what: str) -> Any:
    """The list named `what` of a success. Raises the error that the answer stands for."""
    said = _errors(body)
    if status >= 300 or said:
        raise failure(said or f"slurmrestd answered {status}")
    if not what:
        return None
    listed = body.get(what)
    if not isinstance(listed, list):
        raise ActError(f"slurmrestd's answer has no {what}")
    return listed


def _errors(body: Mapping[str, Any]) -> str:
    """What went wrong, in Slurm's words."""
    found = [e for e in body.get("errors") or () if isinstance(e, dict)]
    words = [dict.fromkeys(str(e[key]) for key in ("description", "error") if e.get(key)) for e in found]
    return "; ".join(": ".join(word) for word in words)[:300]


def _token(path: str) -> str:
    try:
        token = Path(path).read_text("ascii").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not plain ASCII"
        raise AwayError(f"the token file {path} cannot be read: {why}") from None
    token = token.removeprefix("SLURM_JWT=")  # as `scontrol token` prints it
    if not token or any(c.isspace() for c in token):  # nor may it get into an error's text
        raise AwayError(f"the token file {path} must hold one token and nothing else")
    return token
