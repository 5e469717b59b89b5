"""Reading one page again and again: keep-alive, its end, and servers that misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from drover_agent.sources.http_page import Page, PageError
from drover_agent.urls import url_error
from drover_core.metrics.catalog import Absent
from testbed.pages import serving


def failure(page: Page) -> PageError:
    with pytest.raises(PageError) as caught:
        page.read()
    assert "\n" not in str(caught.value)
    return caught.value


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes whatever it is asked, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65_536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_one_connection_serves_many_reads() -> None:
    with serving() as served:
        page = Page(served.url)
        for text in ("up 1\n", "up 2\n", "ümlaut 3\n"):
            served.body = text.encode()
            assert page.read() == text
        assert served.connections == 1
        assert served.requests == ["/metrics"] * 3
        page.close()


def test_a_connection_that_the_server_closed_is_made_again() -> None:
    with serving() as served:
        served.body, served.close_first = b"up 1\n", True
        page = Page(served.url)
        assert [page.read() for _ in range(3)] == ["up 1\n"] * 3
        assert served.connections == 3
        served.headers["Connection"] = "close"
        assert [page.read() for _ in range(2)] == ["up 1\n"] * 2
        page.close()


def test_a_server_that_comes_back_is_read_again() -> None:
    with serving() as served:
        served.body = b"up 1\n"
        page = Page(served.url)
        page.read()
    assert failure(page).absent is Absent.LOST
    with serving(served.port) as again:
        again.body = b"up 2\n"
        assert page.read() == "up 2\n"
    page.close()


def test_no_answer_in_time_is_a_timeout() -> None:
    with serving() as served:
        served.hang = True
        error = failure(Page(served.url, limit_s=0.05))
        assert error.absent is Absent.TIMEOUT
        assert served.url in str(error)


@pytest.mark.parametrize(
    ("start", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"y"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["headers", "body", "chunk", "continue"],
)
def test_a_server_that_sends_a_little_now_and_then_is_a_timeout(start: bytes, again: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):  # until the reader has had enough
                connection.sendall(start)
                while not stop.wait(0.02):
                    connection.sendall(again)

        stop = threading.Event()
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        giving_up = threading.Timer(20, stop.set)
        giving_up.start()
        error = failure(Page(f"http://127.0.0.1:{server.getsockname()[1]}/", limit_s=0.2))
        assert not stop.is_set(), "it would have read for as long as something came"
        assert error.absent is Absent.TIMEOUT
        stop.set()
        giving_up.cancel()
        thread.join()


def test_a_redirect_is_refused_and_says_where_to() -> None:
    with serving() as served:
        served.status, served.headers["Location"] = 307, "/metrics/"
        error = failure(Page(served.url))
        assert error.absent is Absent.ERROR
        assert "redirects to /metrics/" in str(error)
        assert served.requests == ["/metrics"]


@pytest.mark.parametrize("status", [404, 401, 500, 204])
def test_any_other_status_is_an_error(status: int) -> None:
    with serving() as served:
        served.status = status
        assert f"answers {status}" in str(failure(Page(served.url)))


def test_a_page_is_bounded() -> None:
    with serving() as served:
        served.body = b"x" * 1001
        assert "more than 1000 bytes" in str(failure(Page(served.url, max_bytes=1000)))
        assert len(Page(served.url, max_bytes=1001).read()) == 1001


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nup 1\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nup 1\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 2xx OK\r\n\r\n",
        b"\0" * 100_000,
    ],
)
def test_whatever_answers_is_a_page_or_an_error(answer: bytes) -> None:
    with answering(answer) as url:
        assert failure(Page(url)).absent in (Absent.LOST, Absent.ERROR)


def test_a_page_without_length_ends_with_its_connection() -> None:
    with answering(b"HTTP/1.0 200 OK\r\n\r\nup 1\n") as url:
        assert Page(url).read() == "up 1\n"


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving() as served:
        served.body = b"up 1\n"
        assert Page(served.url).read() == "up 1\n"


@pytest.mark.parametrize("url", ["http://h:8000/metrics", "http://10.0.0.1", "http://[::1]:9400/metrics?a=b"])
def test_addresses_that_are_right(url: str) -> None:
    assert url_error(url) is None
    Page(url)


@pytest.mark.parametrize(
    "url",
    ["", "h:8000", "https://h/metrics", "http://", "http://h:0/", "http://h:70000/", "http://a b/", "http://u:p@h/"],
)
def test_addresses_that_are_wrong(url: str) -> None:
    assert "http://127.0.0.1:8000/metrics" in str(url_error(url))
    with pytest.raises(ValueError, match="must be an address"):
        Page(url)
