"""Files of an embedded store damaged in every way a disk knows: it opens, says what is lost, and the rest answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drover_collector.store import Store
from drover_collector.store.schema import ddl_copies as definitions
from drover_core.times import iso
from testbed.fleets import T0

STEP_MS = 60_000
WRITE = """
import json, sys
import numpy as np
from drover_collector.store import SampleBatch, Store
from drover_core.metrics.catalog import Scope

folder, names, (start, step, rows) = sys.argv[1], sys.argv[2].split(), map(int, sys.argv[3:])
stores = [Store.open(f"chdb://{folder}?database={name}", retention_days=3650) for name in names]
for store in stores:
    store.offsets.write({("n0", "s"): {2: 7}})
    for begin in (start, start + 5 * 3_600_000):  # so that the rows rest in two partitions
        ts = begin + step * np.arange(rows)
        there = np.ones(rows, bool)
        ids = np.full(rows, 5, np.uint64)
        store.samples.write(SampleBatch(Scope.GPU, ids, ts, {"gpu_temp_c": (np.full(rows, 50, np.int16), there)}))
for store in stores:
    store.close()
"""
READ = """
import json, sys
import numpy as np
from drover_collector.store import SampleBatch, Store
from drover_core.metrics.catalog import Scope

def read(store):
    if sys.argv[4:]:
        table, name = store.clients.rows(
            "SELECT table, name FROM system.parts WHERE active AND table = 'gpu_samples' ORDER BY name")[0].values()
        store.integrity._check(table, name)
    held = store.offsets.read()
    store.samples.write(SampleBatch(Scope.GPU, np.full(1, 9, np.uint64), np.array([int(sys.argv[3])]),
        {"gpu_temp_c": (np.full(1, 50, np.int16), np.ones(1, bool))}))
    rows = store.clients.rows(
        "SELECT entity_id, count() AS n, sum(gpu_temp_c) AS s FROM gpu_samples GROUP BY entity_id")
    return {
        "rows": {row["entity_id"]: row["n"] for row in rows},
        "damages": [[d.table, str(d.path), d.from_ms, d.to_ms, d.sentence] for d in store.integrity.check_set_aside()],
        "held": [list(lanes.values()) for lanes in held.values()],
    }

names = sys.argv[2].split()
stores = [Store.open(f"chdb://{sys.argv[1]}?database={name}", retention_days=3650) for name in names]
print(json.dumps([read(store) for store in stores]))
for store in stores:
    store.close()
"""


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two parts of 60 rows, written by a process that has ended."""
    return write(tmp_path_factory.mktemp("sound") / "store", "drover")


def write(folder: Path, *databases: str) -> Path:
    done = run(WRITE, folder, " ".join(databases), T0, STEP_MS, 60)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(sound, tmp_path / "store", symlinks=True)


def read(folder: Path, *words: object, databases: Iterable[str] = ("drover",)) -> dict[str, Any]:
    """What a process of its own finds; of several databases, by name."""
    names = list(databases)
    done = run(READ, folder, " ".join(names), T0 + 10 * 3_600_000, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found[0] if len(names) == 1 else dict(zip(names, found, strict=True))


def first_part(folder: Path, database: str = "drover") -> Path:
    """The part with the rows from T0 on."""
    tables = definitions._folder(folder, folder / "metadata" / f"{database}.sql")
    assert tables is not None
    uuid = definitions._UUID.search((tables / "gpu_samples.sql").read_text())
    assert uuid is not None
    [part] = (folder / "store" / uuid[1] / (uuid[1] + uuid[2])).glob("*_1_1_0")
    return part


def flip(name: str, at: int) -> Callable[[Path], None]:
    def change(part: Path) -> None:
        with (part / name).open("r+b") as file:
            file.seek(at)
            held = file.read(2)
            file.seek(at)
            file.write(bytes(255 - byte for byte in held))

    return change


def junk(name: str) -> Callable[[Path], None]:
    return lambda part: (part / name).write_bytes(b"junk\n") and None


def everything(part: Path) -> None:
    for file in part.iterdir():
        file.unlink()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "bits flipped": flip("data.bin", 30),
    "cut off": lambda part: os.truncate(part / "data.bin", 100),
    "empty": lambda part: (part / "data.bin").write_bytes(b"") and None,
    "missing": lambda part: (part / "data.bin").unlink(),
    "checksums": junk("checksums.txt"),
    "count": junk("count.txt"),
    "columns": junk("columns.txt"),
    "index": junk("primary.cidx"),
    "marks": junk("data.cmrk4"),
    "times": junk("minmax_ts.idx"),
    "all files gone": everything,
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Of each kind, in a database of its own of one store: the part, and what two processes found one after another."""
    databases = {kind: f"d{number}" for number, kind in enumerate(DAMAGE)}
    folder = write(tmp_path_factory.mktemp("damaged") / "store", *databases.values())
    parts = {kind: first_part(folder, database) for kind, database in databases.items()}
    for kind, part in parts.items():
        DAMAGE[kind](part)
    once, again = (read(folder, databases=databases.values()) for _ in range(2))
    return {kind: (parts[kind], once[database], again[database]) for kind, database in databases.items()}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_part_is_set_aside_and_reported_and_the_rest_answers(
    damaged: dict[str, tuple[Path, dict[str, Any], dict[str, Any]]], kind: str
) -> None:
    part, found, again = damaged[kind]
    assert found["rows"] == {"5": 60, "9": 1}  # the other part, and what came after
    [[table, path, from_ms, to_ms, sentence]] = found["damages"]
    assert (table, part.name in path) == ("gpu_samples", True)
    assert Path(path).is_dir()  # nothing is deleted
    whole = kind not in ("times", "all files gone")  # else it is the whole partition of four hours
    assert (from_ms, to_ms) == (T0, T0 + 59 * STEP_MS) if whole else from_ms <= T0 < T0 + 59 * STEP_MS <= to_ms
    assert iso(from_ms) in sentence
    assert path in sentence
    assert again["damages"] == found["damages"]  # until someone moves it away


def test_damage_to_what_came_last_asks_agents_again(folder: Path) -> None:
    assert read(folder)["held"] == [[7]]
    flip("data.bin", 30)(first_part(folder))
    assert read(folder)["rows"]["5"] == 60  # found by this read, and known at the next start
    assert read(folder)["held"] == []


def test_after_a_start_of_the_machine_agents_are_asked_again(folder: Path) -> None:
    """What it had not brought to its disk may be gone without a trace."""
    assert read(folder)["held"] == [[7]]
    (folder / "boot-drover").write_text("another")
    assert read(folder)["held"] == []


def test_a_command_leaves_it_to_the_collector_to_ask_them(store_url: str, store_root: Path) -> None:
    Store.open(store_url).close()
    (store_root / f"boot-{store_url.rpartition('=')[2]}").write_text("another")
    for visitor, asks in ((True, False), (False, True), (False, False)):
        opened = Store.open(store_url, visitor=visitor)
        opened.close()
        assert opened.offsets.resend is asks


ROLL = """
import json, sys
import numpy as np
from drover_collector.store import EntityRow, SampleBatch, Store, entity_id
from drover_core.metrics.catalog import Scope

def parts(store):
    row = EntityRow(entity_id(Scope.GPU, "s"), Scope.GPU, "s", "n0", 0)
    store.entities.write([row])
    store.samples.write(SampleBatch(Scope.GPU, np.full(600, row.entity_id, np.uint64), start + 1000 * np.arange(600),
        {"gpu_temp_c": (np.full(600, 50, np.int16), np.ones(600, bool))}))
    store.rollups.closing_folds(start + 600_000)
    store.rollups.roll_up()
    while store.rollups.roll_up_late(60):
        pass
    for table in ("gpu_10s", "gpu_5m"):
        store.clients.command(f"OPTIMIZE TABLE {table} FINAL")
        found = store.clients.rows(
            f"SELECT path FROM system.parts WHERE active AND database = currentDatabase() AND table = '{table}'")
        yield [row["path"] for row in found]

start = int(sys.argv[3])
stores = [Store.open(f"chdb://{sys.argv[1]}?database={name}", retention_days=3650) for name in sys.argv[2].split()]
print(json.dumps([list(parts(store)) for store in stores]))
for store in stores:
    store.close()
"""
ASK = """
import json, sys
import numpy as np
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope

def steps(store, seconds):
    ask = (Scope.GPU, [("n0", 0, None)], ["gpu_temp_c"], start, start + 600_000, 600 // seconds + 2)
    return int(np.isfinite(store.series.read(*ask)[2]["n0", 0, None, "gpu_temp_c"]).sum())

def asked(store):
    for seconds in (10, 300):
        steps(store, seconds)  # one that finds the damage may lack it
    yield [steps(store, 10), steps(store, 300)]
    while store.rollups.roll_up_late(60):
        pass
    yield [steps(store, 10), steps(store, 300), len(store.dirty_ranges.all())]
    yield [store.clients.rows(f"SELECT count() AS n FROM {table} FINAL")[0]["n"] for table in ("gpu_10s", "gpu_5m")]
    yield sorted({damage.table for damage in store.integrity.check_set_aside()})

start = int(sys.argv[3])
stores = [Store.open(f"chdb://{sys.argv[1]}?database={name}", retention_days=3650) for name in sys.argv[2].split()]
print(json.dumps([list(asked(store)) for store in stores]))
for store in stores:
    store.close()
"""
ROLLED = [(kind, level) for kind in ("bits flipped", "missing", "times") for level in (0, 1)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[str, int], Any], dict[tuple[str, int], str]]:
    """What a process found of each, in a database of its own of one store, and the line that it wrote of the damage."""
    words = (tmp_path_factory.mktemp("rolled"), " ".join(f"d{n}" for n in range(len(ROLLED))), T0 // 300_000 * 300_000)
    made = run(ROLL, *words)
    assert made.returncode == 0, made.stderr[-2000:]
    parts = {}
    for (kind, level), paths in zip(ROLLED, json.loads(made.stdout.splitlines()[-1]), strict=True):
        [parts[kind, level]] = paths[level]
        DAMAGE[kind](Path(parts[kind, level]))
    done = run(ASK, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    tables = {key: str(Path(part).parent) for key, part in parts.items()}
    lines = {key: next(line for line in done.stderr.splitlines() if table in line) for key, table in tables.items()}
    return dict(zip(ROLLED, json.loads(done.stdout.splitlines()[-1]), strict=True)), lines


@pytest.mark.parametrize(("kind", "level"), ROLLED)
def test_rollups_that_are_damaged_are_made_again(
    asked: tuple[dict[tuple[str, int], Any], dict[tuple[str, int], str]], kind: str, level: int
) -> None:
    found, lines = asked
    assert "is damaged" in lines[kind, level]
    assert found[kind, level] == [[60, 2], [60, 2, 0], [60, 2], [("gpu_10s", "gpu_5m")[level]]]


def test_old_damage_asks_nobody(folder: Path) -> None:
    part = first_part(folder)
    os.truncate(part / "data.bin", 100)
    for file in part.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    assert read(folder)["held"] == [[7]]


@pytest.mark.parametrize("name", ["minmax_ts.idx", "primary.cidx"])
def test_what_no_read_sees_a_check_finds(folder: Path, name: str) -> None:
    flip(name, 9)(first_part(folder))
    assert len(read(folder, "check")["damages"]) == 1


def test_a_sound_store_is_left_alone(folder: Path) -> None:
    found = read(folder, "check")
    assert (found["rows"], found["damages"]) == ({"5": 120, "9": 1}, [])


def definition(folder: Path, name: str = "gpu_samples") -> Path:
    [file] = folder.glob(f"store/*/*/{name}.sql")
    return file


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: definition(folder).write_bytes(b""),
    "junk": lambda folder: definition(folder).write_bytes(os.urandom(300)),
    "missing": lambda folder: definition(folder).unlink(),
    "not a type": lambda folder: definition(folder).write_text(
        definition(folder).read_text().replace("DateTime64", "DateTimeXX")
    ),
    "database empty": lambda folder: (folder / "metadata" / "drover.sql").write_bytes(b""),
    "database missing": lambda folder: (folder / "metadata" / "drover.sql").unlink(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_definition_is_replaced_by_its_copy(folder: Path, kind: str) -> None:
    BROKEN[kind](folder)
    found = read(folder)
    assert found["rows"] == {"5": 120, "9": 1}
    asides = [Path(path) for _, path, *_ in found["damages"]]
    assert len(asides) == ("missing" not in kind)
    assert all(path.is_file() for path in asides)


def test_without_a_copy_the_table_starts_empty_and_says_so(folder: Path) -> None:
    shutil.rmtree(folder / "definitions")
    part = first_part(folder)
    definition(folder).write_bytes(b"")
    found = read(folder)
    assert found["rows"] == {"9": 1}
    assert [table for table, *_ in found["damages"]] == ["gpu_samples"]
    assert (part / "data.bin").exists()  # what it held rests where it was
