"""What a source gives on the tree of a case, as JSON, against the case's expected.json.

To make a new case: write its tree.txt, run the test with DROVER_EXPECT=1, read the expected.json that it wrote.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from drover_agent.sources.base import Reading

CASES = Path(__file__).resolve().parents[1] / "cases/agent"


def cases_of(source: str) -> list[Path]:
    found = sorted(path for path in (CASES / source).iterdir() if path.is_dir())
    assert found, f"{CASES / source} holds no case"
    return found


def reported(reading: Reading) -> dict[str, Any]:
    """By entity; what it says of entities besides their keys is for other tests."""
    absent: dict[str, dict[str, str]] = {}
    for entity, metric, why in reading.absent:
        absent.setdefault(entity.key, {})[metric] = why
    return {
        "rows": {entity.key: dict(values) for entity, values in reading.rows},
        "absent": absent,
        "inventory": reading.inventory,
        "holdings": {str(gpu): job for gpu, job in reading.holdings},
    }


def check(case: Path, found: dict[str, Any]) -> None:
    file = case / "expected.json"
    if os.environ.get("DROVER_EXPECT"):
        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(file.read_text("utf-8"))
