"""Paths in what others send: an export's file names, a bundle's manifest, a tar. Nothing is written where they say."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_cli.main import main
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

RELEASE = Path(__file__).resolve().parents[2] / "ansible/release.py"
OUTSIDE = ("../evil", "/tmp/drover-evil", "sub/../../evil", "fleet.json/../../evil", "evil", "", "..")


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_collector_does_not_choose_where_an_export_is_written(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stub(FleetStandIn):
        def Export(self, request: pb.ExportRequest) -> Iterator[pb.ExportChunk]:  # gRPC's name
            yield pb.ExportChunk(file="fleet.json", data=b"{}")
            yield pb.ExportChunk(file=name, data=b"evil")

    Stub().install(monkeypatch)
    assert main(["export", str(tmp_path / "at" / "case"), "--since", "1h"]) == 2
    assert f"the collector sent a file named {name!r}, which no case has" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not Path("/tmp/drover-evil").exists()


@pytest.mark.parametrize("version", ["../../evil", "/evil", "..", "a/b", "", ".hidden"])
def test_a_bundle_with_paths_out_of_it_is_refused(tmp_path: Path, version: str) -> None:
    bundle, prefix = tmp_path / "bundle", tmp_path / "a" / "b" / "opt"
    bundle.mkdir()
    kept = tmp_path / "a" / "evil"
    kept.mkdir(parents=True)
    (bundle / "MANIFEST.json").write_text(json.dumps({"version": version, "python": [], "machine": ""}))
    (bundle / "release.py").write_bytes(RELEASE.read_bytes())
    done = subprocess.run(
        [sys.executable, str(bundle / "release.py"), "install", "--prefix", str(prefix)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "has no version that could name a folder" in done.stderr
    assert kept.is_dir()
    assert not prefix.exists()


def test_a_tar_with_paths_out_of_it_is_not_unpacked_there(tmp_path: Path) -> None:
    """As Ansible's unarchive does: by the system's tar, into a folder."""
    archive, into = tmp_path / "bundle.tar.gz", tmp_path / "in" / "to"
    into.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("../evil", f"{tmp_path}/absolute", "good"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
    done = subprocess.run(["tar", "-xzf", str(archive), "-C", str(into)], capture_output=True, text=True, check=False)
    assert done.returncode != 0, "tar says that it left something out"
    assert not (tmp_path / "in" / "evil").exists()
    assert not (tmp_path / "absolute").exists()
    assert (into / "good").is_file()
