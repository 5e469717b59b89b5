# ruff: noqa: E501  # logs as they are written
"""Which rank did not come, or came with something else: flight recorder, NCCL RAS, NCCL Inspector, watchdog."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from drover_core.jobs.collectives import find_faults, find_last
from drover_core.jobs.flight import Dump, DumpError, Operation, looks_like_dump, read_dump
from drover_core.jobs.lines import read_log
from drover_core.jobs.texts import functions_of, read_inspector, read_named, read_ras, read_watchdog


def entry(
    sequence: int, kind: str = "all_reduce", size: int = 10, state: str = "scheduled", **more: Any
) -> dict[str, Any]:
    """One entry in the form of version 2.10, without what is not read."""
    return {
        "record_id": sequence, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": sequence,
        "p2p_seq_id": 0, "op_id": sequence, "profiling_name": f"nccl:{kind}", "time_created_ns": sequence * 10**8,
        "input_sizes": [[size]], "input_dtypes": ["Float"], "output_sizes": [[size]], "output_dtypes": ["Float"],
        "state": state, "retired": state == "completed", "is_p2p": False,
        "frames": [{"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1},
                   {"name": "step", "filename": "/home/u/train.py", "line": 42}], **more,
    }  # fmt: skip


def dump(rank: int, entries: list[dict[str, Any]], form: str = "pickle", ranks: str = "[0, 1, 2, 3]") -> Dump:
    value = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "entries": entries,
    }
    data = pickle.dumps(value, 2) if form == "pickle" else json.dumps(value).encode()
    name = f"comm_lib_trace_rank_{rank}" + (".json" if form == "json" else "")
    assert looks_like_dump(data[:4096])
    return read_dump(name, data)


def done(upto: int) -> list[dict[str, Any]]:
    return [entry(n, state="completed") for n in range(1, upto + 1)]


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_rank_that_never_came(form: str) -> None:
    dumps = {r: dump(r, done(5) + ([entry(6, state="started")] if r != 2 else []), form) for r in range(4)}
    (fault,) = find_faults(dumps)
    assert (fault.what, fault.ranks, fault.collective, fault.sequence) == ("missing", (2,), "all_reduce", 6)
    assert fault.detail == "rank 2 never came to all_reduce 6; 3 others wait there (train.py:42)"
    assert fault.waiting == (0, 1, 3)


@pytest.mark.parametrize(
    "theirs, what, words",
    [
        (entry(6, "broadcast"), "type", "rank 3 called broadcast where the others called all_reduce at collective 6"),
        (entry(6, size=20), "size", "rank 3 came with size [20] where the others came with size [10] in all_reduce 6"),
        (entry(6, input_dtypes=["Half"]), "dtype", "rank 3 came with type Half where the others came with type Float"),
    ],
)
def test_a_rank_that_came_with_something_else(theirs: dict[str, Any], what: str, words: str) -> None:
    dumps = {r: dump(r, [*done(5), theirs if r == 3 else entry(6)]) for r in range(4)}
    (fault,) = find_faults(dumps)
    assert (fault.what, fault.ranks) == (what, (3,)) and fault.detail.startswith(words)


def test_sizes_may_differ_in_an_all_to_all() -> None:
    dumps = {r: dump(r, [entry(1, "all_to_allv", size=10 + r, state="completed")]) for r in range(4)}
    assert find_faults(dumps) == []


def test_an_older_dump_accuses_nobody() -> None:
    """The others have finished what it lacks: it was written before, and its rank did come."""
    dumps = {r: dump(r, done(9 if r else 6)) for r in range(4)}
    assert find_faults(dumps) == []


def test_a_rank_without_a_dump_is_named_when_all_others_wait_at_one_place() -> None:
    dumps = {r: dump(r, [*done(5), entry(6, state="started")]) for r in (0, 1, 3)}
    (fault,) = find_faults(dumps)
    assert (fault.what, fault.ranks) == ("silent", (2,)) and 0.5 < fault.confidence < 0.9
    assert find_faults(dumps, (), frozenset({2})) == []  # it left one, which was too large to read
    healthy = {r: dump(r, done(6)) for r in (0, 1, 3)}
    assert find_faults(healthy) == []


def test_a_ring_that_begins_later_is_compared_from_where_all_have_entries() -> None:
    dumps = {r: dump(r, done(8)[r:]) for r in range(4)}
    assert find_faults(dumps) == []


def test_two_halves_that_disagree_are_both_named() -> None:
    dumps = {r: dump(r, [entry(1, "all_reduce" if r < 2 else "barrier")]) for r in range(4)}
    (fault,) = find_faults(dumps)
    assert fault.ranks == (0, 1, 2, 3) and fault.confidence == 0.5


def test_of_two_dumps_the_rank_that_changed_its_size_is_named() -> None:
    dumps = {r: dump(r, [*done(5), entry(6, size=17 if r == 3 else 10)]) for r in (1, 3)}
    (fault,) = find_faults(dumps)
    assert (fault.what, fault.ranks, fault.waiting) == ("size", (3,), (1,))


def test_the_rank_that_is_always_last() -> None:
    def of(rank: int) -> Dump:
        late = 50_000_000 if rank == 1 else rank * 1000
        return Dump(rank, [Operation("0", n, "all_reduce", created_ns=n * 10**9 + late) for n in range(1, 21)])

    fault = find_last({r: of(r) for r in range(4)})
    assert fault is not None and fault.ranks == (1,) and "20 of 20 collectives, 50 ms" in fault.detail
    assert find_last({r: of(0) for r in range(4)}) is None


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("trace", b"\x80\x04}.", "does not end with a rank"),
        ("trace_3", b"", "empty"),
        ("trace_3", b"\x80\x04cos\nsystem\n.", "not plain data"),
        ("trace_3.json", b'{"entries": [', "no JSON"),
        ("trace_3.json", b"[" * 100_000, "no JSON"),
        ("trace_3.json", b'{"entries": 3}', "no entries"),
    ],
)
def test_dumps_that_cannot_be_used(name: str, data: bytes, words: str) -> None:
    with pytest.raises(DumpError, match=words):
        read_dump(name, data)


def test_entries_of_any_shape_are_left_out_or_harmless() -> None:
    odd: list[Any] = [None, 3, {}, {"profiling_name": 3}, {"profiling_name": "nccl:x", "process_group": []},
           entry(1, input_sizes="x", frames=3, time_created_ns="y"), entry(2, input_sizes=[["a"], None, 3])]  # fmt: skip
    value = {"entries": odd, "pg_config": {"0": 3, "1": {"ranks": None}, "2": {"ranks": "[" * 100}}}
    found = read_dump("t_0.json", json.dumps(value).encode())
    assert [each.sequence for each in found.operations] == [1, 2]
    assert find_faults({0: found}) == []


def json_dump(rank: int, ranks: Any = "[0, 1]", entries: list[Any] | None = None) -> Dump:
    value = {"pg_config": {"0": {"name": "0", "ranks": ranks}}, "entries": entries or [entry(1)]}
    return read_dump(f"t_{rank}.json", json.dumps(value).encode())


def test_sequences_far_apart_cost_no_time() -> None:
    """A range over all numbers between them would never end."""
    dumps = {rank: json_dump(rank, entries=[entry(0), entry(2**62)]) for rank in range(2)}
    assert find_faults(dumps) == []


def test_a_small_pickle_that_shares_its_parts_does_not_expand_without_bound() -> None:
    sizes = [[1] * 16] * 4096
    data = pickle.dumps({"pg_config": {}, "entries": [{**entry(1), "input_sizes": sizes}] * 200_000}, 4)
    assert len(data) < 1_000_000
    with pytest.raises(DumpError, match="expands to more than"):
        read_dump("t_0", data)
    with pytest.raises(DumpError, match="lists and objects"):
        read_dump("t_0.json", b'{"entries": [' + b"{}," * 4_000_001)


def test_ranks_that_no_job_has_are_skipped() -> None:
    assert json_dump(0, ["abc", "\u00b2", 10**12, -1, "1000000", True, 0, "1"]).groups["0"] == (0, 1)
    assert json_dump(0, entries=[entry(1, collective_seq_id="\u00b2")]).operations[0].sequence == 0
    with pytest.raises(DumpError, match="does not end with a rank"):
        read_dump("t_1000000000000", b"{}")


def test_odd_lines_of_inspector_are_left_out() -> None:
    metadata: list[Any] = [{"hostname": "a"}, [], {}]
    perf = {"coll": "x", "coll_sn": 1, "coll_msg_size_bytes": 1, "coll_exec_time_us": 1}
    rows = [{"header": {"rank": rank}, "metadata": m, "coll_perf": perf} for rank in (0, 10**12) for m in metadata]
    data = "\n".join(map(json.dumps, rows)).replace("1000000000000", "1e999").encode()
    _, places = read_inspector([data])
    assert set(places) == {0}


# After the forms in NCCL's src/ras/client_support.cc.
RAS = b"""NCCL version 2.28.3 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3213 on node 10.0.0.8 managing GPU 2

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 6 -- GPU 2 managed by process 3213 on node 10.0.0.8

Warnings
========

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 1042
  Rank 3 has launched up to operation 1041 -- GPU 3 managed by process 3198 on node 10.0.0.7

"""


def test_nccl_ras() -> None:
    faults, places = read_ras(RAS)
    assert (faults[0].what, faults[0].ranks) == ("missing", (3,))
    assert faults[0].detail == "NCCL RAS: rank 3 launched 1041 AllReduce, the others 1042"
    assert faults[1].ranks == (6,) and places[3].node == "10.0.0.7" and places[6].gpu == 2


def inspector(rank: int, number: int, size: int = 1024, us: int = 900) -> dict[str, Any]:
    return {
        "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 4, "nnodes": 2},
        "metadata": {"inspector_output_format_version": "v4.0", "hostname": f"n0{rank // 2}", "pid": 9},
        "coll_perf": {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": size, "coll_exec_time_us": us},
    }


def test_nccl_inspector() -> None:
    rows = [inspector(r, n, us=90 if r == 2 else 900 + r) for n in range(20) for r in range(4)]
    data = "\n".join(map(json.dumps, rows)).encode() + b'\n{"header": {"id"'
    faults, places = read_inspector([data])
    assert [(f.what, f.ranks) for f in faults] == [("last", (2,))] and places[3].node == "n01"
    other = json.dumps(inspector(1, 20, size=4096)), *(json.dumps(inspector(r, 20)) for r in (0, 2, 3))
    faults, _ = read_inspector(["\n".join(other).encode()])
    assert [(f.what, f.ranks, f.sequence) for f in faults] == [("size", (1,), 20)]


def watchdog(rank: int, sequence: int, kind: str = "ALLREDUCE", numel: int = 1259621) -> str:
    """As torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp writes it."""
    return (
        f"[rank{rank}]:[E709 17:05:39.081662161 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation"
        f" timeout: WorkNCCL(SeqNum={sequence}, OpType={kind}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for"
        f" 600000 milliseconds before timing out."
    )


def test_watchdog_messages() -> None:
    lines = read_log(
        "x", "\n".join([watchdog(0, 7), watchdog(1, 7), watchdog(2, 7, "BROADCAST"), watchdog(3, 7)]).encode()
    ).lines
    (fault,) = find_faults(read_watchdog(lines))
    assert (fault.what, fault.ranks) == ("type", (2,)) and "called broadcast" in fault.detail
    lines = read_log("x", "\n".join([watchdog(0, 7), watchdog(1, 7), watchdog(3, 7)]).encode()).lines
    (fault,) = find_faults(read_watchdog(lines), world=range(4))
    assert (fault.what, fault.ranks) == ("silent", (2,))


def test_a_rank_whose_watchdog_waits_for_nothing() -> None:
    idle = (
        "[rank2]:[E703 21:51:54.112142364 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump"
        " signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL"
        " work: 6, last completed NCCL work: 6.This is most likely caused by"
    )
    lines = read_log("x", "\n".join([watchdog(0, 7), watchdog(1, 7), idle]).encode()).lines
    (fault,) = find_faults(read_watchdog(lines))
    assert (fault.what, fault.ranks, fault.sequence) == ("missing", (2,), 7)


def test_ranks_that_pytorch_names_itself() -> None:
    lines = read_log("x", b"RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms").lines
    assert read_named(lines)[0].ranks == (1, 2)
    text = (
        b"RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        b"CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[10]), but Rank 1 is running collective: "
        b"CollectiveFingerPrint(SequenceNumber=3, OpType=BROADCAST, TensorShape=[10])."
    )
    assert read_named(read_log("x", text).lines)[0].what == "type"


def test_functions_of_tracebacks() -> None:
    text = b"""[rank1]:   File "/v/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank2]:   File "/v/torch/distributed/distributed_c10d.py", line 3151, in broadcast
"""
    assert functions_of(read_log("x", text).lines) == {1: "all_reduce", 2: "broadcast"}
