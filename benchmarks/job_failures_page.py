"""Write docs/evidence/job-failures.md: `bench_job_failures.py --write` calls it."""

from __future__ import annotations

from collections import Counter

import bench_job_failures as bench

HEAD = """# Why jobs died

`drover why` against jobs that really ran and really failed, and against logs of frameworks that it
was not written with. `benchmarks/bench_job_failures.py --write` writes this page.

- **The corpus**: `benchmarks/job_corpus.py` ran torch 2.13 over gloo on CPU, four ranks a job, one
  fault each: {kinds}. Rank, step, message, launcher (torchrun, torchrun with `--tee`, one file a
  rank, `srun --label`, merged), dumps (pickle, JSON, at the end, on errors only, none) and noise are
  drawn from the run's number. Even numbers tuned the rules, odd numbers score: a rule made before
  the first run. The runs are kept in `benchmarks/data/jobs`.
- **What stands in**: Slurm's own lines and the names of nodes. Processes, signals, tracebacks, the
  kernel's kill, full file systems and flight recorder dumps are real. No GPU took part, so classes
  of GPU and network hardware are not in it.
- **What the scorer gives**: the logs and dumps, and the job's exit code where it is 0 and in half of
  the other runs. A job that ended normally is known by nothing else.
- **Strangers' logs**: {strangers} tails in the form that other frameworks failed with in public
  issues; each has its source in `benchmarks/data/jobs/strangers.jsonl`. Rules were frozen (commit
  99d94422) before the first was looked for, and nothing was tuned on them since.

"""


def cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(headers: list[str], rows: list[list[object]]) -> str:
    lines = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows]) + "\n"


def classes(results: list[bench.Result]) -> str:
    _, each = bench.macro_f1(results)
    rows: list[list[object]] = [[f"`{n}`", count, p, r, f] for n, (p, r, f, count) in each.items()]
    return table(["class", "jobs", "precision", "recall", "F1"], rows)


def confusion(results: list[bench.Result]) -> str:
    """Rows: the truth; columns: what was said."""
    pairs = Counter((r.truth["class"], r.verdict.failure.value) for r in results)
    said = sorted({name for _, name in pairs})
    rows: list[list[object]] = [
        [f"`{name}`", *(pairs[name, other] or "" for other in said)] for name in sorted({t for t, _ in pairs})
    ]
    return table(["truth, down", *(f"`{name}`" for name in said)], rows)


def listed(lines: list[str]) -> str:
    return "\n".join(lines) + "\n" if lines else "None.\n"


def page() -> str:
    tune, score = (bench.score(bench.runs_of(half)) for half in ("tune", "score"))
    strange = bench.strangers()
    kinds = sorted({r.truth["kind"].replace("_", " ") for r in score + tune})
    parts = [HEAD.format(kinds=", ".join(kinds), strangers=len(strange))]
    rows: list[list[object]] = []
    for name, results in (("scoring half", score), ("tuning half", tune)):
        s = bench.summary(results)
        rows.append([name, s["runs"], f"{s['macro_f1']:.3f}", s["right"], s["hang_rank"], s["first_failed_rank"]])
    f1, _ = bench.macro_f1(strange)
    rows.append(["strangers' logs", len(strange), f"{f1:.3f}", sum(r.right for r in strange), "-", "-"])
    heads = ["set", "jobs", "macro F1 over classes", "class right", "hang's rank right", "rank that failed first right"]
    parts.append("## Results\n\n" + table(heads, rows))
    parts.append(f"Goals: macro F1 0.95 and the hang's rank right in 0.95, on the scoring half: {verdict(score)}.\n")
    parts.append("## Classes, scoring half\n\n" + classes(score) + "\n" + confusion(score))
    parts.append("Misses of class or rank:\n\n" + listed(bench.misses(score)))
    parts.append("Misses of the tuning half:\n\n" + listed(bench.misses(tune)))
    parts.append("## Classes, strangers' logs\n\n" + classes(strange))
    wrong = [r for r in strange if not r.right]
    lines = [f"- [{r.name}]({r.truth['source']}), {r.truth['framework']}: {called(r)}" for r in wrong]
    parts.append("Misses:\n\n" + listed(lines))
    return "\n".join(parts)


def called(r: bench.Result) -> str:
    return f"{r.truth['class']}, called {r.verdict.failure.value}"


def verdict(score: list[bench.Result]) -> str:
    f1, _ = bench.macro_f1(score)
    right, of = bench.share(score, bench.HANGS)
    words = [f"{'reached' if f1 >= 0.95 else 'missed'} ({f1:.3f})"]
    words.append(f"{'reached' if right >= 0.95 * of else 'missed'} ({right / of:.3f})")
    return " and ".join(words)
