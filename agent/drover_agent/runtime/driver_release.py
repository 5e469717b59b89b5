"""Release the NVIDIA driver at an operator's request: two small files in the spool's folder.

While NVML is open, the agent holds /dev/nvidia*, so `rmmod nvidia` and `nvidia-smi --gpu-reset` fail. The command
writes a request and waits for the answer. The agent reads requests every three seconds, closes NVML, answers, and opens
NVML again when the time is over. There is no signal and no port: a user who may write into the folder may ask.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from drover_agent.atomic_file import write_whole

MAX_S = 3600  # a forgotten request must not leave a node without GPU telemetry
ANSWER_S = 15.0  # that the command waits; closing NVML takes up to 3 s, and requests are read every 3 s

_log = logging.getLogger(__name__)


class ReleaseError(Exception):
    """The driver is not released. The message says why and what to do."""


class Request(NamedTuple):
    """One request; `until_ms` is when NVML is opened again."""

    id: str
    until_ms: int


class ReleaseRequests:
    """The agent's side: read requests, write answers."""

    def __init__(self, folder: Path) -> None:
        self._request, self._answer = folder / "nvml-release.json", folder / "nvml-released.json"
        self._answered: tuple[str, bool] | None = None  # request id, whether the driver is released

    def read(self, now_ms: int) -> Request | None:
        """Return the request in force, None if there is none. Remove one that is over or invalid."""
        try:
            text = self._request.read_bytes()[:1000]
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s: %s", self._request, error.strerror)
            return None
        try:
            found = json.loads(text)
            request = Request(str(found["id"]), int(found["until_ms"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            request = Request("", 0)
            _log.warning("%s is not a request to release the driver and is removed", self._request)
        if now_ms < request.until_ms <= now_ms + MAX_S * 1000:
            return request
        for path in (self._request, self._answer):
            with contextlib.suppress(OSError):
                path.unlink()
        self._answered = None
        return None

    def answer(self, request: Request, *, released: bool, text: str) -> None:
        """Write the answer for the command, if it has changed."""
        if self._answered == (request.id, released):
            return
        answer = {"id": request.id, "released": released, "text": text}
        try:
            write_whole(self._answer, json.dumps(answer).encode(), sync=False)
        except OSError as error:
            _log.warning("%s: %s", self._answer, error.strerror)
        else:
            self._answered = (request.id, released)


def request_release(folder: Path, seconds: float, wait_s: float = ANSWER_S) -> str:
    """Ask the running agent to release the driver, and wait until it has. 0 seconds: to open it again.

    Returns:
        A sentence for the operator.

    Raises:
        ReleaseError: it has not; the request is removed.
    """
    if not 0 <= seconds <= MAX_S:
        raise ReleaseError(f"--seconds {seconds:g}: must be between 0 and {MAX_S}")
    request, answer = folder / "nvml-release.json", folder / "nvml-released.json"
    until_ms = int((time.time() + seconds) * 1000)
    token = os.urandom(8).hex()
    try:
        # A new file, then a rename: the folder belongs to the agent's user, who must not redirect root's write.
        descriptor, name = tempfile.mkstemp(prefix="nvml-release.", dir=folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"id": token, "until_ms": until_ms}, file)
            os.fchmod(file.fileno(), 0o644)
        Path(name).replace(request)
    except OSError as error:
        raise ReleaseError(f"{folder}: {error.strerror}; run this as root or as the agent's user") from None
    if seconds == 0:
        return "the agent opens the driver again within seconds"
    refused = ""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        time.sleep(0.1)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(answer.read_bytes())
            if found["id"] == token and found["released"]:
                return str(found["text"])
            refused = str(found["text"]) if found["id"] == token else refused
    with contextlib.suppress(OSError):
        request.unlink()
    raise ReleaseError(refused or f"no answer within {wait_s:g} s; is drover-agent running with its spool in {folder}?")
