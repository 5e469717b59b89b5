"""Generate `drover_proto/*_pb2*` from the .proto files. `tests/proto/test_generated.py` checks the result."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
PROTOS = ("telemetry.proto", "fleet.proto", "podresources.proto")


def generate(out: Path) -> int:
    """Write the generated modules under `out`/drover_proto, and return protoc's exit code."""
    scripts = Path(sys.executable).parent
    return int(
        protoc.main(
            [
                "protoc",
                f"-I{HERE}",
                f"--python_out={out}",
                f"--grpc_python_out={out}",
                f"--mypy_out=quiet:{out}",
                f"--mypy_grpc_out=quiet:{out}",
                f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
                f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
                *(str(HERE / "drover_proto" / name) for name in PROTOS),
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(generate(HERE))
