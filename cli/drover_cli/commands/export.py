"""`drover export CASE --since T`: the live store as a case, to be replayed under another policy."""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from drover_cli import client
from drover_cli.errors import CliError
from drover_cli.output import print_json, size_text
from drover_core.times import from_iso
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "the live store as a case folder"

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# The names the collector may give: an answer must not choose where we write.
_FILES = frozenset(
    {
        "fleet.json", "gpu.parquet", "node.parquet", "link.parquet", "workload.parquet", "events.jsonl",
        "mig.parquet", "absences.jsonl", "inventory.jsonl", "probes.jsonl", "incidents.jsonl",
    }
)  # fmt: skip
EXPORT_DEADLINE_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("case", type=Path, metavar="CASE", help="folder to make")
    parser.add_argument("--since", required=True, metavar="T", help="ISO 8601 time, or an age such as 30m, 6h, 7d")
    parser.add_argument("--until", metavar="T", help="end of the time, in the same form (default: now)")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")


def moment(text: str, now_ms: int) -> int:
    """Milliseconds of `2026-01-01T00:00:00Z` or of an age such as `6h`.

    Raises:
        CliError: neither of these.
    """
    age = _AGO.fullmatch(text)
    if age:
        return round(now_ms - float(age[1]) * _SECONDS[age[2]] * 1000)
    try:
        return from_iso(text)
    except ValueError:
        raise CliError(f"{text!r} is not a time; write 2026-01-31T06:00:00Z or an age such as 30m, 6h, 7d") from None


def run(args: argparse.Namespace) -> int:
    from drover_cli.case.write import NewFolder

    now = round(time.time() * 1000)
    until = moment(args.until, now) if args.until else now
    request = pb.ExportRequest(from_ms=moment(args.since, now), to_ms=until, inventory=True, instances=True)
    if request.from_ms >= request.to_ms:
        raise CliError(f"--since {args.since} is not before --until {args.until or 'now'}: nothing lies between them")
    got: dict[str, None] = {}
    with client.connect(args) as fleet, NewFolder(args.case) as folder:
        for name in _receive(fleet.stream(methods.EXPORT, request, EXPORT_DEADLINE_S), folder):
            got[name] = None
    sizes = {name: (args.case / name).stat().st_size for name in got}  # less than what was sent: it is packed here
    if not any(name.endswith(".parquet") for name in sizes):
        print("drover: note: the store holds no samples of this time; there is nothing to replay", file=sys.stderr)
    if args.json:
        print_json({"case": str(args.case), "files": sizes})
    else:
        print(f"{args.case}: " + ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items()))
    return 0


def _receive(chunks: Iterator[pb.ExportChunk], folder: Path) -> Iterator[str]:
    import pyarrow as pa

    from drover_cli.case.write import INSTANCE, ParquetWriter
    from drover_core.metrics.catalog import Scope

    writers: dict[str, ParquetWriter] = {}
    try:
        for chunk in chunks:
            if chunk.file not in _FILES:
                raise CliError(f"the collector sent a file named {chunk.file!r}, which no case has; nothing was kept")
            if chunk.file.endswith(".parquet"):
                if chunk.file not in writers:
                    name = chunk.file.removesuffix(".parquet")
                    scope, part = (Scope.GPU, INSTANCE) if name == "mig" else (Scope(name), "")
                    writers[chunk.file] = ParquetWriter(folder / chunk.file, scope, part)
                if chunk.data:
                    with pa.ipc.open_stream(io.BytesIO(chunk.data)) as stream:
                        writers[chunk.file].write_table(stream.read_all())
            else:
                with (folder / chunk.file).open("ab") as file:
                    file.write(chunk.data)
            yield chunk.file
    finally:
        for writer in writers.values():
            writer.close()
