"""Floors import downward only (docs/explanation/architecture.md), and a node needs little."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "drover_proto": ROOT / "proto/drover_proto",
    "drover_agent": ROOT / "agent/drover_agent",
    "drover_collector": ROOT / "collector/drover_collector",
    "drover_dashboard": ROOT / "dashboard/drover_dashboard",
    "drover_cli": ROOT / "cli/drover_cli",
}
ALLOWED = {
    "drover_proto": {"drover_proto"},
    "drover_agent": {"drover_proto", "drover_agent"},
    "drover_collector": {"drover_proto", "drover_collector"},
    "drover_dashboard": {"drover_proto", "drover_dashboard"},
    "drover_cli": set(PACKAGES),
}


def imports(file: Path) -> Iterator[str]:
    """Top-level names of all modules that a file imports, at any depth."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the full name"
            yield node.module or ""


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_downward(package: str) -> None:
    files = list(PACKAGES[package].rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            top = name.partition(".")[0]
            assert not top.startswith("drover_") or top in ALLOWED[package], f"{file} imports {name}"


def test_floor_0_needs_only_stdlib_protobuf_grpc() -> None:
    for file in PACKAGES["drover_proto"].rglob("*.py"):
        for name in imports(file):
            top = name.partition(".")[0]
            assert top in sys.stdlib_module_names | {"drover_proto", "google", "grpc"}, f"{file} imports {name}"


def test_running_agent_needs_only_base_dependencies() -> None:
    """Neither numpy nor anything of the other extras may come in with a real agent."""
    code = (
        "import sys, drover_agent.main, drover_agent.agent, drover_agent.sampler, drover_agent.sources.nvml; "
        "print(' '.join(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    heavy = {"numpy", "pyarrow", "pandas", "streamlit", "torch", "chdb", "clickhouse_connect", "rich", "urllib3"}
    assert not loaded & heavy


def test_help_of_the_command_line_is_light() -> None:
    code = (
        "import sys\nfrom drover_cli.main import build_parser\nbuild_parser()\n"
        "print(' '.join(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    heavy = {"numpy", "pyarrow", "streamlit", "chdb", "drover_agent", "drover_collector", "drover_dashboard"}
    assert not loaded & heavy


def test_a_node_needs_no_more_than_four_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {d.partition("==")[0] for d in project["dependencies"]}
    assert names == {"grpcio", "protobuf", "psutil", "nvidia-ml-py"}
    every = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    assert all("==" in d or d.startswith("drover[") for d in every), "dependencies are pinned"


def test_no_file_outgrows_one_sitting() -> None:
    """About 600 lines a file; tables are exempt because they are looked up, not read."""
    tables = {"xid_table.py", "catalog_rows.py"}
    long = {
        str(file.relative_to(ROOT)): lines
        for package in PACKAGES.values()
        for file in package.rglob("*.py")
        if "_pb2" not in file.name and file.name not in tables
        and (lines := len(file.read_text("utf-8").splitlines())) > 600
    }  # fmt: skip
    assert not long
