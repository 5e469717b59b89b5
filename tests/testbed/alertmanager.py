"""A real Alertmanager (Debian: prometheus-alertmanager), or two of them as one cluster, on loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import urllib3

from testbed.system_processes import free_port
from testbed.waiting import wait_until

CONFIG = """
route:
  receiver: hook
  group_by: [rack]
  group_wait: 1s
  group_interval: 1s
  repeat_interval: 1h
receivers:
  - name: hook
    webhook_configs: [{{url: '{hook}', send_resolved: true}}]
"""


class Running(NamedTuple):
    urls: tuple[str, ...]

    def alerts(self, member: int = 0) -> list[dict[str, Any]]:
        """Those that fire there now."""
        answer = urllib3.request("GET", f"{self.urls[member]}/api/v2/alerts", timeout=120, retries=False)
        return list(answer.json())

    def firing(self, member: int = 0) -> list[dict[str, str]]:
        return [alert["labels"] for alert in self.alerts(member)]


@contextmanager
def alertmanager(folder: Path, hook: str, members: int = 1, config: str = CONFIG) -> Iterator[Running]:
    """`hook`: where it posts what it would send people."""
    (folder / "alertmanager.yml").write_text(config.format(hook=hook))
    with ExitStack() as stack:
        while (urls := _started(folder, members, stack)) is None:
            stack.close()
        yield Running(urls)


def _started(folder: Path, members: int, stack: ExitStack) -> tuple[str, ...] | None:
    """Where the members answer; None: another program took one of their ports before they did."""
    gossip = [free_port() for _ in range(members)]
    urls, children = [], []
    for number, port in enumerate(gossip):
        http = free_port()
        args = [
            "prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/am{number}", f"--web.listen-address=127.0.0.1:{http}",
            f"--cluster.listen-address={f'127.0.0.1:{port}' if members > 1 else ''}", "--cluster.settle-timeout=1s",
            *(f"--cluster.peer=127.0.0.1:{other}" for other in gossip if other != port),
        ]  # fmt: skip
        log = stack.enter_context((folder / f"am{number}.log").open("w"))
        child = subprocess.Popen(args, stdout=log, stderr=log)
        stack.callback(child.wait, 20)
        stack.callback(child.terminate)
        children.append(child)
        urls.append(f"http://127.0.0.1:{http}")
    wait_until(
        lambda: all(ready(url) for url in urls) or any(child.poll() is not None for child in children),
        "the Alertmanager is ready",
        30,
    )
    for number, child in enumerate(children):
        if child.poll() is not None:
            log = (folder / f"am{number}.log").read_text()
            assert "address already in use" in log, log[-2000:]
            return None
    return tuple(urls)


def ready(url: str) -> bool:
    try:
        return urllib3.request("GET", f"{url}/-/ready", timeout=10, retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False
