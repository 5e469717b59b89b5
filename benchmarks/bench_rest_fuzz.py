"""Fuzz REST: requests made from the OpenAPI document by schemathesis, against a collector's parts on a real store.

Schemathesis and the generator of clients are no part of the development install, as they bring 50 packages:

    python3 -m venv build/fuzz
    build/fuzz/bin/pip install schemathesis openapi-spec-validator openapi-python-client
    PYTHONPATH=tests .venv/bin/python benchmarks/bench_rest_fuzz.py --tools build/fuzz --requests 10000

It ends with 1 if an answer was a 5xx, if the document is not valid, or if the generated client lists no incident.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from drover_collector.api.service import FleetApi
from drover_collector.rest import openapi, server
from drover_collector.store import Store
from testbed.fleet_served import served

VALIDATE = """
import json, sys
from openapi_spec_validator import validate
validate(json.load(open(sys.argv[1])))
"""
USE = """
import sys
sys.path.insert(0, sys.argv[1])
from generated import Client
from generated.api.incidents import list_incidents
from generated.models import IncidentList
found = list_incidents.sync(client=Client(base_url=sys.argv[2]))
assert isinstance(found, IncidentList), found
print([incident.id for incident in found.incidents])
"""


async def run(tools: Path, requests: int) -> int:
    """Return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"chdb://{folder}/store")
        async with served(store) as parts:
            api = FleetApi(parts.facts)
            rest = server.RestServer(api, parts.facts, ("127.0.0.1", 0))
            parts.pipeline.leading = True  # silences are made; a drain is refused, as there is no actuator
            answers: Counter[int] = Counter()
            _count(answers)
            url = f"http://127.0.0.1:{rest.port}"
            document = Path(folder) / "openapi.json"
            document.write_text(json.dumps(openapi.document()))
            good = [
                await _run("openapi-spec-validator", [tools / "bin/python", "-c", VALIDATE, document]),
                await _generated(tools, Path(folder), document, url),
            ]
            seed = 1
            while answers.total() < requests:
                began_s = time.monotonic()
                await _run("schemathesis", _fuzz(tools, url, document, seed), quiet=True)
                print(
                    f"seed {seed}: {answers.total()} requests, {time.monotonic() - began_s:.0f} s, {dict(answers)}",
                    flush=True,
                )
                seed += 1
            rest.close()
            api.close()
        store.close()
    failed = {status: count for status, count in answers.items() if status >= 500}
    print("answers by status:", dict(sorted(answers.items())), "of", answers.total())
    print("5xx:", failed or "none")
    return 0 if all(good) and not failed and answers[200] else 1


def _count(answers: Counter[int]) -> None:
    """Count every answer, also those to what is no HTTP, where it is sent."""
    send = server._Handler.send_response

    def counted(self: object, code: int, message: str | None = None) -> None:
        answers[code] += 1
        send(self, code, message)  # type: ignore[arg-type]  # self is a handler

    server._Handler.send_response = counted  # type: ignore[assignment, method-assign]  # counts, then sends


def _fuzz(tools: Path, url: str, document: Path, seed: int) -> list[object]:
    # The stream has no end; tests/collector/rest has its own.
    return [
        tools / "bin/schemathesis", "run", document, "--url", url, "--checks", "not_a_server_error",
        "--phases", "examples,coverage,fuzzing", "--mode", "all", "--max-examples", "115", "--seed", seed,
        "--exclude-path", "/api/v1/incidents/stream", "--continue-on-failure", "--workers", "2",
        "--request-timeout", "30",
    ]  # fmt: skip


async def _generated(tools: Path, folder: Path, document: Path, url: str) -> bool:
    """Generate a client, compile it, and list incidents with it."""
    generate = [
        tools / "bin/openapi-python-client", "generate", "--path", document, "--meta", "none", "--output-path",
        folder / "generated", "--fail-on-warning",
    ]  # fmt: skip
    return (
        await _run("openapi-python-client", generate)
        and await _run("compile", [tools / "bin/python", "-m", "compileall", "-q", folder / "generated"])
        and await _run("its list_incidents", [tools / "bin/python", "-c", USE, folder, url])
    )


async def _run(name: str, command: list[object], quiet: bool = False) -> bool:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tempfile.gettempdir()
    )  # schemathesis leaves a folder where it runs
    output = (await process.communicate())[0].decode()
    if not quiet:
        print(f"{name}: {'passed' if process.returncode == 0 else 'failed'} {output.strip()[-1500:]}", flush=True)
    elif process.returncode not in (0, 1):
        print(output[-3000:], flush=True)
    return process.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True, help="a virtual environment with the three tools")
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    return asyncio.run(run(options.tools.absolute(), options.requests))


if __name__ == "__main__":
    sys.exit(main())
