"""A disk that takes nothing while the embedded engine says that all went well."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drover_collector.store import Store
from drover_collector.store.durability.verify_insert import listed, whole
from drover_core.metrics.catalog import Scope
from testbed.fleets import T0, everything, gpu_row, samples

# A process of its own: its limit on the size of files is 0 for moments.
UNWRITTEN = """
import contextlib, resource, sys
sys.path.insert(0, sys.argv[2])
from drover_collector.store import Store, StoreError
from drover_collector.store.durability.verify_insert import InsertVerifier
from drover_core.metrics.catalog import Scope
from testbed.fleets import T0, everything, gpu_row, samples

def may_write(bytes_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))

def write(second):
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0 + second * 1000, {"power_w": 300.0})]))

def held():
    return store.clients.rows("SELECT count() AS n, sum(isNotNull(power_w)) AS p FROM gpu_samples FINAL")[0]

def refused(sql):
    raise StoreError("the disk takes nothing")

def unwritten(second):
    before = InsertVerifier.before

    def none(self, *words):
        InsertVerifier.before = before
        found = before(self, *words)
        may_write(0)
        return found

    InsertVerifier.before = none
    try:
        write(second)
    except StoreError as error:
        assert "is not on the disk" in str(error), error
    else:
        raise AssertionError("stored, it says")
    finally:
        may_write(resource.RLIM_INFINITY)

store = Store.open(f"chdb://{sys.argv[1]}/store", retention_days=3650)
store.entities.write(everything())
store.clients.command("SYSTEM STOP MERGES")  # till something was written again
for second in range(5):
    write(second)
unwritten(5)
write(5)
assert held() == {"n": 6, "p": 6}, held()
assert store.integrity.check_set_aside() == ()

may_write(0)  # a merge: what was acknowledged long ago goes into a part that is not on the disk
with contextlib.suppress(StoreError):  # the engine's own merge may have come before it
    store.clients.command("OPTIMIZE TABLE gpu_samples FINAL")
may_write(resource.RLIM_INFINITY)
if sys.argv[3] == "insert":  # the first to drop a part, with which the engine forgets what was merged
    unwritten(6)
    write(6)
else:
    write(6)
    command, store.integrity._clients.command = store.integrity._clients.command, refused
    for _ in range(2):  # the disk is not well yet: nothing may be given up
        with contextlib.suppress(StoreError):
            store.integrity._check_merged()
    store.integrity._clients.command = command
    store.integrity._check_merged()
assert held() == {"n": 7, "p": 7}, held()
assert [damage.table for damage in store.integrity.check_set_aside()] == ["gpu_samples"]
store.close()
store = Store.open(f"chdb://{sys.argv[1]}/store", retention_days=3650)
assert held() == {"n": 7, "p": 7}, held()
store.close()
"""


@pytest.mark.parametrize("who", ["insert", "watch"])
def test_what_was_not_written_is_not_stored_and_a_merge_that_was_not_costs_nothing(tmp_path: Path, who: str) -> None:
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", UNWRITTEN, str(tmp_path), tests, who],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_part_is_whole_when_every_file_has_the_listed_size(store: Store, tmp_path: Path) -> None:
    store.entities.write(everything())
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    row = store.clients.rows("SELECT path FROM system.parts WHERE active AND table = 'gpu_samples'")[0]
    part = Path(shutil.copytree(row["path"], tmp_path / "part"))
    assert whole(part)
    assert whole(tmp_path / "merged and gone")
    sizes = listed((part / "checksums.txt").read_bytes())
    assert sizes["data.bin"] == (part / "data.bin").stat().st_size
    for name in (*sizes, "checksums.txt", "columns.txt"):
        data = (part / name).read_bytes()
        (part / name).write_bytes(b"" if name == "columns.txt" else data[:-1])
        assert not whole(part), name
        (part / name).write_bytes(data)
    (part / "count.txt").unlink()
    assert not whole(part)


def test_a_list_of_another_format_is_empty() -> None:
    assert listed(b"checksums format version: 5\n" + bytes(40)) == {}
    assert listed(b"checksums format version: 4\n" + bytes(16) + b"\x02" + bytes(40)) == {}
