"""Lines of JSON in a case folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drover_cli.errors import CliError


class CaseError(CliError):
    """A case folder that cannot be used."""


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file; blank lines are skipped.

    Raises:
        CaseError: a line that is not a JSON object.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise CaseError(f"{path}: line {number}: not valid JSON ({error})") from None
        if not isinstance(found, dict):
            raise CaseError(f"{path}: line {number}: expected a JSON object")
        yield number, found
