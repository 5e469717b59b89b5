"""The generated protobuf code is what the .proto files say (`make proto`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PROTO = Path(__file__).resolve().parents[2] / "proto"


def test_generated_code_is_current(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", PROTO / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.generate(tmp_path) == 0
    made = sorted((tmp_path / "drover_proto").iterdir())
    assert len(made) == 12
    for file in made:
        committed = PROTO / "drover_proto" / file.name
        assert committed.read_text("utf-8") == file.read_text("utf-8"), f"{file.name} is old: run `make proto`"
