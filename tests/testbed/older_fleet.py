"""What the Fleet service was one version ago, by its own `.proto` (tests/cases/older/)."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

OLDER = Path(__file__).resolve().parents[1] / "cases" / "older"
SERVICE = "drover.fleet.v1.Fleet"


@functools.cache
def older() -> dict[str, Any]:
    """Class of the answer of each question that the older service knew."""
    from grpc_tools import protoc

    with TemporaryDirectory() as folder:
        described = Path(folder) / "older.bin"
        assert protoc.main(["protoc", f"-I{OLDER}", f"--descriptor_set_out={described}", "fleet.proto"]) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes())
    pool = descriptor_pool.DescriptorPool()  # type: ignore[no-untyped-call]  # protobuf's own
    for file in files.file:
        pool.Add(file)  # type: ignore[no-untyped-call]  # the same
    service = pool.FindServiceByName(SERVICE)
    return {method.name: message_factory.GetMessageClass(method.output_type) for method in service.methods}
