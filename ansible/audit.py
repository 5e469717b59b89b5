#!/usr/bin/env python3
"""`make audit`: asks which locked dependencies have known vulnerabilities (pip-audit, PyPI's advisories).

    python ansible/audit.py [LOCK...]     default: all of locks/
    python ansible/audit.py --ask         exit code 0: somebody can be asked; within seconds, for `make lint`

Exit code 1: some have. 0: none has, or nobody could be asked: that is said for each, for what was not asked is not
known to be sound. A network that is missing makes nothing red.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

LOCKS = Path(__file__).resolve().parent / "locks"
AUDIT_S, ANSWER_S = 120, 10  # a file as a whole, and each answer
PYPI = "https://pypi.org"


def ask(lock: Path, command: tuple[str, ...] = (sys.executable, "-m", "pip_audit")) -> dict[str, Any] | str:
    """What pip-audit reports of a file, or why it could not."""
    options = ["--requirement", str(lock), "--require-hashes", "--disable-pip", "--format", "json"]
    options += ["--progress-spinner", "off", "--timeout", str(ANSWER_S)]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=AUDIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {AUDIT_S} s"
    except OSError as error:
        return str(error)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return (done.stderr.strip().splitlines() or ["it gave no answer"])[-1][:200]


def judge(name: str, found: dict[str, Any] | str) -> tuple[int, list[str]]:
    """(how many vulnerable, lines for people)"""
    if isinstance(found, str):
        return 0, [f"{name}: NOT audited: {found}"]
    rows = found.get("dependencies", [])
    unasked = [row["name"] for row in rows if "skip_reason" in row]
    bad = [row for row in rows if row.get("vulns")]
    lines = [
        f"{name}: {row['name']} {row['version']}: {vuln['id']}, mended in {', '.join(vuln['fix_versions']) or '?'}"
        for row in bad
        for vuln in row["vulns"]
    ]
    if unasked:
        lines.append(f"{name}: {len(unasked)} of {len(rows)} NOT audited: no registry reports on {_some(unasked)}")
    if len(unasked) < len(rows):
        lines.append(f"{name}: {len(rows) - len(unasked)} audited, {len(bad)} with known vulnerabilities")
    return len(bad), lines


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


def why_not(registry: str = PYPI) -> str | None:
    """Why no registry reports vulnerabilities here, asked of one package; None: one does."""
    named = re.search(r"^(\S+)==(\S+) ", next(iter(sorted(LOCKS.glob("*.txt")))).read_text(), re.MULTILINE)
    assert named is not None
    try:
        with urllib.request.urlopen(f"{registry}/pypi/{named[1]}/{named[2]}/json", timeout=ANSWER_S) as answer:  # noqa: S310  # https, above
            found = json.load(answer)
    except (OSError, ValueError) as error:
        return f"{registry}: {error}"
    return None if isinstance(found, dict) and "vulnerabilities" in found else f"{registry} reports none"


def main(argv: list[str]) -> int:
    if argv == ["--ask"]:
        if (reason := why_not()) is not None:
            print(f"dependencies NOT audited: {reason}")
        return int(reason is not None)
    vulnerable = 0
    for lock in [Path(name) for name in argv] or sorted(LOCKS.glob("*.txt")):
        number, lines = judge(lock.name, ask(lock))
        vulnerable += number
        print("\n".join(lines))
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
