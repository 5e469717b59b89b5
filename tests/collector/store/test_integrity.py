"""Files of an embedded store damaged in every way a disk knows: it opens, says what is lost, and the rest answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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

folder, (start, step, rows, parts) = sys.argv[1], map(int, sys.argv[2:])
store = Store.open(f"chdb://{folder}", retention_days=3650)
store.offsets.write({("n0", "s"): {2: 7}})
there, ids = np.ones(rows, bool), np.ones(rows, np.uint64)
for part in range(parts):  # each of an entity of its own, and in a partition of its own
    ts = start + part * 4 * 3_600_000 + step * np.arange(rows)
    store.samples.write(SampleBatch(Scope.GPU, part * ids, ts, {"gpu_temp_c": (np.full(rows, 50, np.int16), there)}))
for scope, metric in ((Scope.NODE, "load1"), (Scope.LINK, "link_up"), (Scope.WORKLOAD, "step_time_s")):
    store.samples.write(SampleBatch.of_values(scope, ids, ts, {metric: np.ones(rows)}))
store.close()
"""
READ = """
import json, sys
import numpy as np
from drover_collector.store import SampleBatch, Store
from drover_core.metrics.catalog import Scope

store = Store.open(f"chdb://{sys.argv[1]}", retention_days=3650)
if sys.argv[3:]:
    for row in store.clients.rows("SELECT table, name FROM system.parts WHERE active AND table = 'gpu_samples'"):
        store.integrity._check(row["table"], row["name"])
held = store.offsets.read()
store.samples.write(SampleBatch(Scope.GPU, np.full(1, 99, np.uint64), np.array([int(sys.argv[2])]),
    {"gpu_temp_c": (np.full(1, 50, np.int16), np.ones(1, bool))}))
rows = store.clients.rows(
    "SELECT entity_id, count() AS n, sum(gpu_temp_c) AS s FROM gpu_samples GROUP BY entity_id")
others = ("node_samples", "link_samples", "workload_samples")
print(json.dumps({
    "rows": {row["entity_id"]: row["n"] for row in rows},
    "others": {name: store.clients.rows(f"SELECT count() AS n FROM {name}")[0]["n"] for name in others},
    "damages": [[d.table, str(d.path), d.from_ms, d.to_ms, d.sentence] for d in store.integrity.check_set_aside()],
    "held": [list(lanes.values()) for lanes in held.values()],
}))
store.close()
"""


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of PARTS parts of 60 rows, written by a process that has ended."""
    folder = tmp_path_factory.mktemp("sound") / "store"
    done = run(WRITE, folder, T0, STEP_MS, 60, PARTS)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return copy_of(sound, tmp_path)


def copy_of(sound: Path, to: Path) -> Path:
    return Path(shutil.copytree(sound, to / "store", symlinks=True))


def read(folder: Path, *words: object) -> dict[str, Any]:
    """What a process of its own finds."""
    done = run(READ, folder, T0 + 100 * 3_600_000, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def part_of(folder: Path, number: int) -> Path:
    """The part that was written as the number-th of 0 and following, with the rows of 4 hours from `begin(number)`."""
    tables = definitions._folder(folder, folder / "metadata" / "drover.sql")
    assert tables is not None
    uuid = definitions._UUID.search((tables / "gpu_samples.sql").read_text())
    assert uuid is not None
    [part] = (folder / "store" / uuid[1] / (uuid[1] + uuid[2])).glob(f"*_{number + 1}_{number + 1}_0")
    return part


def begin(number: int) -> int:
    return T0 + number * 4 * 3_600_000


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


PARTS = len(DAMAGE) + 1  # and a sound one
WHOLE = {str(number): 60 for number in range(PARTS)} | {"99": 1}  # rows by entity, with what each read writes
OTHERS = {"node_samples": 60, "link_samples": 60, "workload_samples": 60}


@pytest.fixture(scope="module")
def damaged(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """A part of each kind in one table, and what two processes found one after another."""
    folder = copy_of(sound, tmp_path_factory.mktemp("damaged"))
    parts = {kind: part_of(folder, number) for number, kind in enumerate(DAMAGE)}
    for kind, part in parts.items():
        DAMAGE[kind](part)
    return parts, [read(folder) for _ in range(2)]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_part_is_set_aside_and_reported_and_the_rest_answers(
    damaged: tuple[dict[str, Path], list[dict[str, Any]]], kind: str
) -> None:
    parts, reads = damaged
    number, part = list(DAMAGE).index(kind), parts[kind]
    found, again = ([entry for entry in found["damages"] if part.name in entry[1]] for found in reads)
    [[table, path, from_ms, to_ms, sentence]] = found
    assert table == "gpu_samples"
    assert Path(path).is_dir()  # nothing is deleted
    first_ms, last_ms = begin(number), begin(number) + 59 * STEP_MS
    whole = kind not in ("times", "all files gone")  # else it is the whole partition of four hours
    assert (from_ms, to_ms) == (first_ms, last_ms) if whole else from_ms <= first_ms < last_ms <= to_ms
    assert to_ms - from_ms < 4 * 3_600_000
    assert iso(from_ms) in sentence
    assert path in sentence
    assert again == found  # until someone moves it away


def test_what_is_not_damaged_answers(damaged: tuple[dict[str, Path], list[dict[str, Any]]]) -> None:
    _, (found, again) = damaged
    assert found["rows"] == {str(PARTS - 1): 60, "99": 1}  # the sound part, and what came after
    assert again["rows"].keys() == found["rows"].keys()
    assert len(found["damages"]) == len(again["damages"]) == len(DAMAGE)


@pytest.fixture(scope="module")
def opened(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A sound store that a process has checked, and what this found."""
    folder = copy_of(sound, tmp_path_factory.mktemp("opened"))
    return folder, read(folder, "check")


def test_a_sound_store_is_left_alone(opened: tuple[Path, dict[str, Any]]) -> None:
    _, found = opened
    assert found == {"rows": WHOLE, "others": OTHERS, "damages": [], "held": [[7]]}


def test_damage_to_what_came_last_asks_agents_again(opened: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = copy_of(opened[0], tmp_path)
    flip("data.bin", 30)(part_of(folder, 0))
    found = read(folder)
    assert found["held"] == [[7]]
    assert found["rows"].keys() == WHOLE.keys() - {"0"}  # found by this read, and known at the next start
    assert read(folder)["held"] == []


def test_after_a_start_of_the_machine_agents_are_asked_again(
    opened: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """What it had not brought to its disk may be gone without a trace."""
    folder = copy_of(opened[0], tmp_path)
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


UNREAD = ("minmax_ts.idx", "primary.cidx")


@pytest.fixture(scope="module")
def checked(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Any]]:
    """Parts with an old damage, and with others that only a check finds, and what a process found."""
    folder = copy_of(sound, tmp_path_factory.mktemp("checked"))
    parts = {name: part_of(folder, number) for number, name in enumerate(("old", *UNREAD))}
    os.truncate(parts["old"] / "data.bin", 100)
    for file in parts["old"].iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    for name in UNREAD:
        flip(name, 9)(parts[name])
    return parts, read(folder, "check")


def test_old_damage_asks_nobody(checked: tuple[dict[str, Path], dict[str, Any]]) -> None:
    parts, found = checked
    assert any(parts["old"].name in path for _, path, *_ in found["damages"])
    assert found["held"] == [[7]]  # the others were found later


@pytest.mark.parametrize("name", UNREAD)
def test_what_no_read_sees_a_check_finds(checked: tuple[dict[str, Path], dict[str, Any]], name: str) -> None:
    parts, found = checked
    assert sum(parts[name].name in path for _, path, *_ in found["damages"]) == 1
    assert len(found["damages"]) == 1 + len(UNREAD)


def definition(folder: Path, name: str = "gpu_samples") -> Path:
    [file] = folder.glob(f"store/*/*/{name}.sql")
    return file


def wrong_type(file: Path) -> None:
    file.write_text(file.read_text().replace("DateTime64", "DateTimeXX"))


# Kind -> the table whose definition is broken so, and how.
BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "empty": ("gpu_samples", lambda file: file.write_bytes(b"")),
    "junk": ("node_samples", lambda file: file.write_bytes(os.urandom(300))),
    "missing": ("link_samples", Path.unlink),
    "not a type": ("workload_samples", wrong_type),
}


@pytest.fixture(scope="module")
def broken(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process found of a store with a definition of each kind."""
    folder = copy_of(sound, tmp_path_factory.mktemp("broken"))
    for table, change in BROKEN.values():
        change(definition(folder, table))
    return read(folder)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_definition_is_replaced_by_its_copy(broken: dict[str, Any], kind: str) -> None:
    table, _ = BROKEN[kind]
    assert (broken["others"] | {"gpu_samples": sum(broken["rows"].values())})[table] == (
        sum(WHOLE.values()) if table == "gpu_samples" else OTHERS[table]
    )
    asides = [Path(path) for name, path, *_ in broken["damages"] if name == table]
    assert len(asides) == (kind != "missing")
    assert all(path.is_file() for path in asides)
    assert len(broken["damages"]) == len(BROKEN) - 1


@pytest.mark.parametrize("kind", ["empty", "missing"])
def test_a_broken_definition_of_the_database_is_replaced_by_its_copy(folder: Path, kind: str) -> None:
    _, change = BROKEN[kind]
    change(folder / "metadata" / "drover.sql")
    found = read(folder)
    assert (found["rows"], found["others"]) == (WHOLE, OTHERS)
    asides = [Path(path) for _, path, *_ in found["damages"]]
    assert len(asides) == (kind != "missing")
    assert all(path.is_file() for path in asides)


def test_without_a_copy_the_table_starts_empty_and_says_so(folder: Path) -> None:
    shutil.rmtree(folder / "definitions")
    part = part_of(folder, 0)
    definition(folder).write_bytes(b"")
    found = read(folder)
    assert (found["rows"], found["others"]) == ({"99": 1}, OTHERS)
    assert [table for table, *_ in found["damages"]] == ["gpu_samples"]
    assert (part / "data.bin").exists()  # what it held rests where it was
