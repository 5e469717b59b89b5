"""Score `drover why`: the class of each failed job, the rank to blame, the hang's rank. Misses are listed one by one.

    python benchmarks/bench_job_failures.py --half tune          # while rules are written
    python benchmarks/bench_job_failures.py --write              # both halves and the strangers' logs, into the docs
    python benchmarks/bench_job_failures.py --outside FOLDER     # a labelled set of others

An outside set is a folder with `labels.jsonl`, one object a line: {"id", "mode" or "class", "log_path", optional
"true_exit_code"}; GPUAlert's evaluation (github.com/Parv-01/gpualert-eval) has this form, and its 15 modes are mapped
to our classes by GPUALERT below. `log_path` is relative to the folder or its parents.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "core")]

from drover_core.jobs.files import File, gather
from drover_core.jobs.judge import judge
from drover_core.jobs.model import Verdict

DATA = HERE / "data" / "jobs"
PAGE = HERE.parent / "docs/evidence/job-failures.md"
HANGS = ("skip", "order", "size", "stopped")
DEATHS = ("dead", "oom", "exception", "loader", "storage")
GPUALERT = {
    "cuda_oom": "gpu_oom", "nccl": "collective_timeout", "cuda_runtime": "program", "ram_oom": "host_oom",
    "segfault": "program", "file_not_found": "program", "permission": "program", "missing_module": "program",
    "div_zero": "program", "device_mismatch": "program", "nan_loss": "program", "oom_killer": "host_oom",
    "traceback": "program", "assertion": "program", "runtime_error": "program",
}  # fmt: skip


@dataclass
class Result:
    name: str
    truth: dict[str, Any]
    verdict: Verdict

    @property
    def right(self) -> bool:
        return bool(self.truth["class"] == self.verdict.failure.value)

    @property
    def rank_right(self) -> bool:
        return bool(self.truth["rank"] == self.verdict.rank)


def runs_of(half: str) -> Iterator[tuple[str, dict[str, Any], list[File]]]:
    """(name, truth, files) of each run of a packed half."""
    packed = lzma.decompress((DATA / f"{half}.tar.xz").read_bytes())
    folders: dict[str, dict[str, bytes]] = defaultdict(dict)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            folder, _, name = member.name.partition("/")
            folders[folder][name] = file.read()
    yield from (unpacked(folder, files) for folder, files in sorted(folders.items()))


def runs_in(out: Path) -> Iterator[tuple[str, dict[str, Any], list[File]]]:
    for folder in sorted(out.glob("run-*")):
        if (folder / "truth.json").is_file() and json.loads((folder / "truth.json").read_text()).get("happened", True):
            yield unpacked(folder.name, {path.name: path.read_bytes() for path in folder.iterdir()})


def unpacked(folder: str, files: dict[str, bytes]) -> tuple[str, dict[str, Any], list[File]]:
    truth = json.loads(files["truth.json"])
    return folder, truth, [File(name, data) for name, data in sorted(files.items()) if name != "truth.json"]


def exit_given(truth: dict[str, Any]) -> int | None:
    """The job's exit code is an input where it is 0 (a scheduler always has it) and in half of the other runs."""
    return truth["exit"] if truth["exit"] == 0 or truth["give_exit"] else None


def score(runs: Iterable[tuple[str, dict[str, Any], list[File]]]) -> list[Result]:
    return [Result(name, truth, judge(gather(files, exit_code=exit_given(truth)))) for name, truth, files in runs]


def macro_f1(results: list[Result]) -> tuple[float, dict[str, tuple[float, float, float, int]]]:
    """The mean of F1 over the classes that occur as truth, and (precision, recall, F1, number) of each."""
    each = {}
    for name in sorted({result.truth["class"] for result in results}):
        hit = sum(r.right for r in results if r.truth["class"] == name)
        said = sum(r.verdict.failure.value == name for r in results)
        real = sum(r.truth["class"] == name for r in results)
        precision, recall = hit / said if said else 0.0, hit / real
        each[name] = precision, recall, 2 * precision * recall / (precision + recall) if hit else 0.0, real
    return sum(value[2] for value in each.values()) / len(each), each


def share(results: list[Result], kinds: tuple[str, ...], dumps: bool | None = None) -> tuple[int, int]:
    of = [r for r in results if r.truth["kind"] in kinds and dumps in (None, r.truth["dumps"])]
    return sum(r.rank_right for r in of), len(of)


def misses(results: list[Result], ranks: bool = True) -> list[str]:
    lines = []
    for r in results:
        kind = f"{r.truth.get('kind', '')} {r.truth.get('how', '')}".strip()
        where = f"{r.name} ({kind}, {r.truth.get('launcher', '')}{', dumps' if r.truth.get('dumps') else ''})"
        if not r.right:
            lines.append(f"- {where}: {r.truth['class']}, called {r.verdict.failure.value}")
        elif ranks and r.truth["kind"] in HANGS + DEATHS and not r.rank_right:
            lines.append(f"- {where}: rank {r.truth['rank']}, called {r.verdict.rank}")
    return lines


def summary(results: list[Result]) -> dict[str, Any]:
    f1, _ = macro_f1(results)
    hang, hangs = share(results, HANGS)
    death, deaths = share(results, DEATHS)
    right = sum(r.right for r in results)
    return {"runs": len(results), "right": right, "macro_f1": round(f1, 3), "hang_rank": f"{hang}/{hangs}",
            "first_failed_rank": f"{death}/{deaths}"}  # fmt: skip


def outside(folder: Path) -> list[Result]:
    found = []
    for line in (folder / "labels.jsonl").read_text("utf-8").splitlines():
        label = json.loads(line)
        name = label.get("class") or GPUALERT[label["mode"]]
        path = next(p / label["log_path"] for p in (folder, *folder.parents) if (p / label["log_path"]).is_file())
        code = label.get("true_exit_code")
        made = judge(gather([File(path.name, path.read_bytes())], exit_code=code))
        found.append(Result(label["id"], {"class": name, "rank": None, "kind": label.get("mode", "")}, made))
    return found


def strangers() -> list[Result]:
    """The kept logs of other frameworks, each one log file, with the exit code where its report gives it."""
    found = []
    for line in (DATA / "strangers.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        made = judge(gather([File("job.log", row["log"].encode())], exit_code=row["exit"]))
        found.append(Result(row["id"], {**row, "kind": row["framework"]}, made))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=["tune", "score"], default="tune")
    parser.add_argument("--folder", type=Path, help="runs as job_corpus.py wrote them, instead of the kept ones")
    parser.add_argument("--outside", type=Path, help="a labelled set of others")
    parser.add_argument("--strangers", action="store_true", help="the kept logs of other frameworks")
    parser.add_argument("--explain", action="store_true", help="print the verdict of each miss")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    if args.write:
        import job_failures_page

        PAGE.write_text(job_failures_page.page(), "utf-8")
        return
    if args.outside or args.strangers:
        results = strangers() if args.strangers else outside(args.outside)
    else:
        runs = (r for r in runs_in(args.folder) if r[1]["half"] == args.half) if args.folder else runs_of(args.half)
        results = score(runs)
        print(json.dumps(summary(results)))
    if args.outside or args.strangers:
        print(
            json.dumps({"jobs": len(results), "right": sum(r.right for r in results), "macro_f1": macro_f1(results)[0]})
        )
    if args.explain:
        for name, (precision, recall, f, number) in macro_f1(results)[1].items():
            print(f"{name:22} P {precision:.2f} R {recall:.2f} F1 {f:.2f} n {number}")
        print("\n".join(misses(results, not args.outside and not args.strangers)))
        for r in results:
            if not r.right or (r.truth["kind"] in HANGS + DEATHS and not r.rank_right):
                print(f"\n{r.name} {json.dumps(r.truth)}\n  {r.verdict.sentence}")
                for proof in r.verdict.proofs[:4]:
                    print(f"  proof {proof.source} rank {proof.rank} {proof.rule}: {proof.text[:150]}")
                for fault in r.verdict.faults[:3]:
                    print(f"  fault {fault.confidence} {fault.what} {fault.ranks}: {fault.detail}")


if __name__ == "__main__":
    main()
