"""Errors of REST: RFC 9457's problem details, each with a sentence that says what to do."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus

import grpc

from drover_collector.api.snapshot import RefusalError
from drover_collector.store import StoreError

log = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"
TYPE = "urn:drover:problem:"
# As https://google.aip.dev/193 and grpc-gateway map them, but a state that is against an act is a conflict.
STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class ProblemError(Exception):
    """An answer that is an error.

    Attributes:
        code: a word for programs, the end of `type`. detail: what is wrong and what to do.
    """

    def __init__(self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.headers = status, code, detail, dict(headers or {})

    def body(self) -> bytes:
        title = HTTPStatus(self.status).phrase
        said = {"type": TYPE + self.code, "title": title, "status": self.status, "detail": self.detail}
        return json.dumps(said).encode()


def of_failed_act(error: BaseException) -> ProblemError:
    """Return the answer to one who repeats an act that failed. No Retry-After: its key leads to the same end again."""
    found = of_error(error)
    return ProblemError(
        found.status if found.status >= 500 else 409, "act-failed",
        f"this act failed before: {found.detail}. It may have been done: look, and send it with a new Idempotency-Key"
        " if it was not",
    )  # fmt: skip


def of_error(error: BaseException) -> ProblemError:
    """Return the answer to what a method raised. What is no refusal is logged."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, RefusalError):
        status = STATUS.get(error.code, 500)
        again = {"retry-after": "5"} if status in (429, 503) else {}
        return ProblemError(status, error.code.name.lower().replace("_", "-"), str(error), again)
    if isinstance(error, StoreError):
        return ProblemError(503, "unavailable", f"the store cannot answer: {error}", {"retry-after": "5"})
    if isinstance(error, TimeoutError):
        return ProblemError(504, "deadline-exceeded", "this took too long; ask for less, or try again")
    if isinstance(error, CancelledError):
        return ProblemError(503, "unavailable", "the collector stops; ask again in a minute", {"retry-after": "60"})
    log.error("a request failed", exc_info=error)
    return ProblemError(500, "internal", "this failed inside the collector; its log says how")
