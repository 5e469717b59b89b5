"""Fuzz REST: requests made from the OpenAPI document by schemathesis, against a collector's parts on a real store.

Schemathesis and the generator of clients are no part of the development install, as they bring 50 packages. They are
installed from PyPI into `build/fuzz`, or where --tools says, unless they are there.

    .venv/bin/python benchmarks/bench_rest_fuzz.py --write                        # 10,000 requests, 20 minutes
    .venv/bin/python benchmarks/bench_rest_fuzz.py --requests 300 --examples 3    # 2 minutes

Schemathesis runs with seed 1, then 2, ... until there were so many requests. It ends with 1 if an answer was a 5xx, if
the document is not valid, or if the generated client lists no incident.
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
from typing import Any

from page_block import EVIDENCE, ROOT, put, when

sys.path.insert(0, str(ROOT / "tests"))

from drover_collector.api.service import FleetApi
from drover_collector.rest import openapi, server
from drover_collector.store import Store
from testbed.fleet_served import served

TOOLS = ("schemathesis", "openapi-spec-validator", "openapi-python-client")
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


async def run(tools: Path, requests: int, examples: int) -> dict[str, Any]:
    """Return what was found."""
    begun_s = time.monotonic()
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
            valid = await _run("openapi-spec-validator", [tools / "bin/python", "-c", VALIDATE, document])
            lists = await _generated(tools, Path(folder), document, url)
            answers.clear()  # those are no fuzzing
            seed = 1
            while answers.total() < requests:
                began_s = time.monotonic()
                await _run("schemathesis", _fuzz(tools, url, document, (seed, examples)), quiet=True)
                print(
                    f"seed {seed}: {answers.total()} requests, {time.monotonic() - began_s:.0f} s, {dict(answers)}",
                    flush=True,
                )
                seed += 1
            rest.close()
            api.close()
        store.close()
    return {
        "benchmark": "rest_fuzz", "valid": valid, "client_lists": lists, "requests": answers.total(),
        "seeds": seed - 1, "seconds": round(time.monotonic() - begun_s),
        "answers": {str(status): count for status, count in sorted(answers.items())},
        "failed": sum(count for status, count in answers.items() if status >= 500),
    }  # fmt: skip


def lines_of(found: dict[str, Any], versions: str) -> list[str]:
    """Return the block of the evidence page."""
    by_status = ", ".join(f"{count:,} of {status}" for status, count in found["answers"].items())
    return [
        f"Run on {when()}, {found['seeds']} seeds, {found['seconds']:,} s on a machine of two cores. Tools:",
        f"{versions}.", "",
        "| what | result |", "| --- | --- |",
        f"| the OpenAPI 3.1 document | {'valid' if found['valid'] else 'NOT valid'} |",
        "| a client generated from it, with `--fail-on-warning` |"
        f" {'compiles, imports, lists the two incidents' if found['client_lists'] else 'FAILED'} |",
        "| requests made by schemathesis (phases examples, coverage and fuzzing; valid and invalid ones) |"
        f" {found['requests']:,} |",
        f"| of them answered with a 5xx | {found['failed'] or 'none'} |", "",
        "The answers by status:", f"{by_status}.",
    ]  # fmt: skip


def _count(answers: Counter[int]) -> None:
    """Count every answer, also those to what is no HTTP, where it is sent."""
    send = server._Handler.send_response

    def counted(self: object, code: int, message: str | None = None) -> None:
        answers[code] += 1
        send(self, code, message)  # type: ignore[arg-type]  # self is a handler

    server._Handler.send_response = counted  # type: ignore[method-assign]  # counts, then sends


def _fuzz(tools: Path, url: str, document: Path, size: tuple[int, int]) -> list[object]:
    seed, examples = size
    # The stream has no end; tests/collector/rest has its own.
    return [
        tools / "bin/schemathesis", "run", document, "--url", url, "--checks", "not_a_server_error",
        "--phases", "examples,coverage,fuzzing", "--mode", "all", "--max-examples", examples, "--seed", seed,
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
    parser.add_argument("--tools", type=Path, default=ROOT / "build/fuzz", help="a virtual environment for the tools")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=115, help="for each operation and seed")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/evidence/rest.md")
    options = parser.parse_args()
    versions = install(options.tools.absolute())
    found = asyncio.run(run(options.tools.absolute(), options.requests, options.examples))
    print(json.dumps(found), flush=True)
    if options.write:
        put(EVIDENCE / "rest.md", "fuzzing", lines_of(found, versions))
    good = found["valid"] and found["client_lists"] and not found["failed"] and found["answers"].get("200")
    return 0 if good else 1


def install(tools: Path) -> str:
    """Install the tools unless they are there. Return their versions."""
    if not (tools / "bin/schemathesis").exists():
        subprocess.run([sys.executable, "-m", "venv", tools], check=True)
        subprocess.run([tools / "bin/pip", "install", "--quiet", *TOOLS], check=True)
    listed = subprocess.run([tools / "bin/pip", "list", "--format", "json"], capture_output=True, check=True).stdout
    versions = {entry["name"]: entry["version"] for entry in json.loads(listed)}
    return ", ".join(f"{name} {versions[name]}" for name in TOOLS)


if __name__ == "__main__":
    sys.exit(main())
