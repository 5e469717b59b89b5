"""How an operator asks the running agent to let go of the NVIDIA driver: two small files in the spool's folder.

While NVML is open the agent holds /dev/nvidia*, so that `rmmod nvidia` and `nvidia-smi --gpu-reset` fail. The command
writes a request and waits for the answer; the agent looks every three seconds, closes NVML, answers, and opens it again
when the time is over. No signal and no port: who may write into the folder may ask.
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

MAX_S = 3600  # a request that was forgotten must not leave a node without GPU telemetry
ANSWER_S = 15.0  # that the command waits; closing NVML takes up to 3 s, and requests are looked for every 3 s

_log = logging.getLogger(__name__)


class ReleaseError(Exception):
    """The driver is not let go; the text says why and what to do."""


class Request(NamedTuple):
    id: str
    until_ms: int


class ReleaseRequests:
    """The agent's side."""

    def __init__(self, folder: Path) -> None:
        self._asked, self._answered = folder / "nvml-release.json", folder / "nvml-released.json"
        self._told: tuple[str, bool] | None = None

    def wanted(self, now_ms: int) -> Request | None:
        """What is asked now; a request that is over, or none, is taken away."""
        try:
            text = self._asked.read_bytes()[:1000]
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s: %s", self._asked, error.strerror)
            return None
        try:
            found = json.loads(text)
            request = Request(str(found["id"]), int(found["until_ms"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            request = Request("", 0)
            _log.warning("%s is no request to release the driver; it is removed", self._asked)
        if now_ms < request.until_ms <= now_ms + MAX_S * 1000:
            return request
        for path in (self._asked, self._answered):
            with contextlib.suppress(OSError):
                path.unlink()
        self._told = None
        return None

    def answer(self, request: Request, *, released: bool, text: str) -> None:
        """Tell the command how it stands; again only when that changes."""
        if self._told == (request.id, released):
            return
        answer = {"id": request.id, "released": released, "text": text}
        try:
            write_whole(self._answered, json.dumps(answer).encode(), sync=False)
        except OSError as error:
            _log.warning("%s: %s", self._answered, error.strerror)
        else:
            self._told = (request.id, released)


def ask(folder: Path, seconds: float, wait_s: float = ANSWER_S) -> str:
    """The command's side: have the running agent let go of the driver, and wait until it has; 0 seconds ends it.

    Returns a sentence for the operator.

    Raises:
        ReleaseError: it did not; nothing is asked any more then.
    """
    if not 0 <= seconds <= MAX_S:
        raise ReleaseError(f"--seconds {seconds:g}: must be between 0 and {MAX_S}")
    asked, answered = folder / "nvml-release.json", folder / "nvml-released.json"
    until_ms = int((time.time() + seconds) * 1000)
    token = os.urandom(8).hex()
    try:
        # Under a fresh name: the folder belongs to the agent's user, who must not lead root's write elsewhere.
        descriptor, name = tempfile.mkstemp(prefix="nvml-release.", dir=folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"id": token, "until_ms": until_ms}, file)
            os.fchmod(file.fileno(), 0o644)
        Path(name).replace(asked)
    except OSError as error:
        raise ReleaseError(f"{folder}: {error.strerror}; run this as root or as the agent's user") from None
    if seconds == 0:
        return "the agent opens the driver again within seconds"
    refused = ""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        time.sleep(0.1)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(answered.read_bytes())
            if found["id"] == token and found["released"]:
                return str(found["text"])
            refused = str(found["text"]) if found["id"] == token else refused
    with contextlib.suppress(OSError):
        asked.unlink()
    raise ReleaseError(refused or f"no answer within {wait_s:g} s; is drover-agent running with its spool in {folder}?")
