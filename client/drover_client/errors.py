"""Errors that the client raises."""

from __future__ import annotations

from typing import Any

import httpx

OUTCOME_UNKNOWN = "outcome-unknown"


class DroverError(Exception):
    """An answer that is an error, or no answer.

    Attributes:
        status: of HTTP; 0: there was no answer. code: a word for programs, such as `not-found`.
        detail: what is wrong and what to do. retry_after_s: when to try again; None: it was not said.
    """

    def __init__(self, status: int, code: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {code}: {detail}" if status else detail)
        self.status, self.code, self.detail, self.retry_after_s = status, code, detail, retry_after_s


def answer_of(response: httpx.Response) -> Any:
    """Return the JSON of an answer.

    Raises:
        DroverError: it is none, such as the page of a proxy that asks people to sign in.
    """
    try:
        return response.json()
    except ValueError:
        raise of_response(response) from None


def of_response(response: httpx.Response) -> DroverError:
    try:
        said: Any = response.json()
    except ValueError:
        said = None
    if not isinstance(said, dict) or "detail" not in said:
        return DroverError(response.status_code, "unknown", f"this is no answer of Drover: {response.text[:200]}")
    after = response.headers.get("retry-after", "")
    return DroverError(
        response.status_code, str(said.get("type", "")).rpartition(":")[2], str(said["detail"]),
        float(after) if after.isdigit() else None,
    )  # fmt: skip


def of_transport(error: httpx.HTTPError) -> DroverError:
    return DroverError(0, "no-answer", f"Drover did not answer: {error or type(error).__name__}")


def of_act(error: httpx.HTTPError, key: str) -> DroverError:
    """Return the error of an act: whether the collector may have received it makes the difference."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return of_transport(error)
    return DroverError(
        0, OUTCOME_UNKNOWN,
        f"the connection broke after the act was sent ({error or type(error).__name__}): it may have been done. Look at"
        f" the node's decisions first; idempotency_key={key!r} repeats it safely unless the collector has restarted",
    )  # fmt: skip
