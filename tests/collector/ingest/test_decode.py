"""Blocks of many agents into columns, and what is refused on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.ingest import decode as decode_module
from drover_collector.ingest.decode import FUTURE_MS, decode
from drover_collector.ingest.schema_registry import Refusal, read_hello
from drover_collector.store import entity_id
from drover_core.metrics.catalog import (
    BY_NAME,
    METRICS,
    Scope,
    of_scope,
)
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import schema_message
from testbed.fleets import GPUS, T0, batch, block, gpu_key, hello

OLDEST = T0 - 86_400_000


def run(*batches, now_ms: int = T0 + 10_000):
    return decode(batches, OLDEST, now_ms)


def refused(dictionary, *batches: pb.Batch) -> dict[int, Refusal]:
    return run(*((dictionary, b) for b in batches)).refused


def values(samples) -> dict[tuple[int, int, str], float]:
    return {
        (int(e), int(t), name): BY_NAME[name].decode(stored[row].item())
        for name, (stored, present) in samples.columns.items()
        for row, (e, t) in enumerate(zip(samples.entity_id, samples.ts_ms, strict=True))
        if present[row]
    }


def test_rows_of_many_agents_become_one_batch() -> None:
    sent = []
    expected = {}
    for n in range(5):
        dictionary = read_hello(hello(f"n{n}"))
        rows = [
            (T0 + t, slot + 1, (100.0 + n + slot / 10, None if slot == 2 else float(t)))
            for t in range(3)
            for slot in range(GPUS)
        ]
        sent.append((dictionary, batch(1, block(rows))))
        for ts, index, (power, temp) in rows:
            key = entity_id(Scope.GPU, gpu_key(n, index - 1))
            expected[key, ts, "power_w"] = pytest.approx(power)
            if temp is not None:
                expected[key, ts, "gpu_temp_c"] = temp
    found = run(*sent)
    assert found.refused == {}
    (samples,) = found.samples
    assert samples.rows == 5 * 3 * GPUS
    assert values(samples) == expected
    assert samples.samples == len(expected)


GPU_METRICS = len(of_scope(Scope.GPU))
ROW = st.tuples(
    st.integers(0, 9_999),
    st.integers(1, GPUS),
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=GPU_METRICS, max_size=GPU_METRICS),
)


@given(st.lists(ROW, min_size=1, max_size=20))
def test_what_the_agent_packs_is_what_comes_out(rows) -> None:
    """All GPU metrics: every storage type, presence bits over seven bytes."""
    metrics = of_scope(Scope.GPU)
    names = [m.name for m in metrics]
    scaled = [
        (
            T0 + ts,
            index,
            [None if v is None else m.low + v * (min(m.high, 1e12) - m.low) for v, m in zip(row, metrics, strict=True)],
        )
        for ts, index, row in rows
    ]
    found = run((read_hello(hello(metrics=names)), batch(1, block(scaled, names))))
    expected = [
        (entity_id(Scope.GPU, gpu_key(0, index - 1)), ts, name, BY_NAME[name].encode(v))
        for ts, index, row in scaled
        for name, v in zip(names, row, strict=True)
        if v is not None
    ]
    got = [
        (int(s.entity_id[r]), int(s.ts_ms[r]), name, stored[r].item())
        for s in found.samples
        for name, (stored, present) in s.columns.items()
        for r in np.flatnonzero(present)
    ]
    assert sorted(got) == sorted(expected)
    assert found.out_of_range == {}


def test_agents_of_different_schemas_share_a_batch() -> None:
    wide, narrow = read_hello(hello("n0")), read_hello(hello("n1", metrics=["sm_clock_mhz"]))
    found = run(
        (wide, batch(1, block([(T0, 1, (300.0, 50.0))]))),
        (narrow, batch(1, block([(T0, 1, (1410.0,))], ["sm_clock_mhz"]))),
    )
    (samples,) = found.samples
    n0, n1 = (entity_id(Scope.GPU, gpu_key(n, 0)) for n in (0, 1))
    assert values(samples) == {
        (n0, T0, "power_w"): 300.0,
        (n0, T0, "gpu_temp_c"): 50.0,
        (n1, T0, "sm_clock_mhz"): 1410.0,
    }


def test_unknown_metrics_are_left_out_and_reported() -> None:
    message = hello()
    message.schemas[0].columns.insert(1, pb.Column(metric=60_001, type="q", name="from_the_future"))
    dictionary = read_hello(message)
    assert dictionary.ignored == ["from_the_future"]
    row = np.zeros(1, np.dtype([("ts", "<i8"), ("e", "<u2"), ("p", "<u2"), ("x", "<i8"), ("t", "<i2")]))
    row[0] = (T0, 1, 3000, -7, 55)
    made = pb.Block(schema=1, rows=1, presence=b"\x07", body=row.tobytes())
    (samples,) = run((dictionary, batch(1, made))).samples
    key = entity_id(Scope.GPU, gpu_key(0, 0))
    assert values(samples) == {(key, T0, "power_w"): 300.0, (key, T0, "gpu_temp_c"): 55}


def schema_of(*columns: tuple[int, str], scope=pb.GPU) -> pb.Hello:
    message = hello()
    del message.schemas[:]
    message.schemas.add(id=1, scope=scope, columns=[pb.Column(metric=m, type=t, name="x") for m, t in columns])
    return message


POWER = BY_NAME["power_w"].id


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (schema_of((POWER, "I")), "wrong type", "metric 9 (power_w) is sent as gpu 'I', but is gpu 'H' here"),
        (schema_of((BY_NAME["load1"].id, "I")), "wrong type", "is node 'I' here"),
        (schema_of((POWER, "H"), (POWER, "H")), "bad schema", "power_w twice"),
        (schema_of((60_001, "x")), "bad schema", "the invalid type 'x'"),
        (schema_of(), "bad schema", "has 0 columns"),
        (schema_of((POWER, "H"), scope=99), "bad schema", "a scope that is unknown to this collector"),
    ],
)
def test_schemas_that_cannot_be(message: pb.Hello, code: str, words: str) -> None:
    refusal = refused(read_hello(message), batch(1, block([(T0, 1, (1.0,))], ["power_w"])))[0]
    assert refusal.code == code
    assert words in refusal.text


def broken(**fields) -> pb.Block:
    made = block([(T0, 1, (300.0, 50.0)), (T0 + 1, 2, (300.0, 50.0))])
    made.MergeFrom(pb.Block(**fields))
    return made


@pytest.mark.parametrize(
    ("made", "code", "words"),
    [
        (broken(schema=7), "unknown schema", "schema 7 is not in the Hello"),
        (broken(rows=3), "bad size", "3 rows of schema 1 take 14 + 1 bytes each, but the block has 28 + 2"),
        (broken(rows=2**32 - 1), "bad size", "the block has 28 + 2"),
        (broken(body=b"junk"), "bad size", "the block has 4 + 2"),
        (broken(presence=b""), "bad size", "block has 28"),
        (block([(T0, 0, (1.0, 1.0))]), "bad entity", "entity 0 is a node, not a gpu"),
        (block([(T0, 9, (1.0, 1.0))]), "bad entity", "entity 9 is not in the Hello"),
        (block([(T0, 65_535, (1.0, 1.0))]), "bad entity", "entity 65535 is not in the Hello"),
        (block([(T0 + 10_000 + FUTURE_MS + 1, 1, (1.0, 1.0))]), "bad time", "check the node's clock"),
        (block([(OLDEST - 1, 1, (1.0, 1.0))]), "bad time", "older than the retention"),
        (block([(-(2**62), 1, (1.0, 1.0))]), "bad time", "ms is older"),
    ],
)
def test_one_bad_batch_costs_itself_only(made: pb.Block, code: str, words: str) -> None:
    if made.presence == block([(T0, 1, (1.0, 1.0))]).presence * 2 and words == "block has 28":
        made = pb.Block(schema=1, rows=2, body=made.body, presence=b"")
    dictionary, other = read_hello(hello("n0")), read_hello(hello("n1"))
    good = block([(T0, 2, (200.0, 40.0))])
    found = run(
        (other, batch(1, good)),
        (dictionary, batch(2, good, made)),
        (dictionary, batch(3, good)),
        (other, batch(4, good)),
    )
    assert set(found.refused) == {1}
    assert found.refused[1].code == code
    assert words in found.refused[1].text
    assert sum(samples.rows for samples in found.samples) == 3


def test_data_of_another_node_is_refused() -> None:
    message = hello("n0")
    message.entities.add(index=20, scope=pb.NODE, key="n1")
    message.entities.add(index=21, scope=pb.LINK, key="n1/mlx5_0", link="mlx5_0")
    message.entities.add(index=22, scope=pb.LINK, key="n0/mlx5_0", link="mlx5_0")
    message.schemas.append(schema_message(2, pb.NODE, [BY_NAME["load1"]]))
    message.schemas.append(schema_message(3, pb.LINK, [BY_NAME["link_up"]]))
    dictionary = read_hello(message)
    refusals = refused(
        dictionary,
        batch(1, block([(T0, 20, (1.0,))], ["load1"], 2)),
        batch(2, block([(T0, 21, (1.0,))], ["link_up"], 3)),
        batch(3, block([(T0, 22, (1.0,))], ["link_up"], 3), block([(T0, 0, (1.0,))], ["load1"], 2)),
    )
    assert set(refusals) == {0, 1}
    assert {r.code for r in refusals.values()} == {"another node"}
    assert "'n1' belongs to another node than 'n0'" in refusals[0].text


def test_a_value_that_cannot_be_true_becomes_absent() -> None:
    row = np.zeros(2, np.dtype([("ts", "<i8"), ("e", "<u2"), ("u", "<u2"), ("ber", "<f8"), ("t", "<i2")]))
    row[0] = (T0, 1, 10_001, np.nan, 50)  # utilisation 1.0001; a bit error rate that is none
    row[1] = (T0, 2, 10_000, 1e-12, 251)  # 251 degrees
    names = ["gpu_util_ratio", "nvlink_effective_ber", "gpu_temp_c"]
    made = pb.Block(schema=1, rows=2, presence=b"\x07\x07", body=row.tobytes())
    found = run((read_hello(hello(metrics=names)), batch(1, made)))
    assert found.refused == {}
    first, second = (entity_id(Scope.GPU, gpu_key(0, slot)) for slot in (0, 1))
    assert values(found.samples[0]) == {
        (first, T0, "gpu_temp_c"): 50,
        (second, T0, "gpu_util_ratio"): 1.0,
        (second, T0, "nvlink_effective_ber"): 1e-12,
    }
    assert found.out_of_range == {("n0", name): 1 for name in names}


def test_absent_fields_mean_nothing() -> None:
    """Whatever an absent column's field holds is neither stored nor counted as impossible."""
    row = np.zeros(1, np.dtype([("ts", "<i8"), ("e", "<u2"), ("p", "<u2"), ("t", "<i2")]))
    row[0] = (T0, 1, 65_535, 50)
    found = run((read_hello(hello()), batch(1, pb.Block(schema=1, rows=1, presence=b"\x02", body=row.tobytes()))))
    assert values(found.samples[0]) == {(entity_id(Scope.GPU, gpu_key(0, 0)), T0, "gpu_temp_c"): 50}
    assert found.out_of_range == {}


def test_entities_are_listed_once_with_the_time_of_the_data() -> None:
    dictionary = read_hello(hello("n3"))
    rows = [(T0 + 5, 2, (1.0, 1.0)), (T0 + 1, 2, (1.0, 1.0)), (T0 + 3, 4, (1.0, None))]
    found = run((dictionary, batch(1, block(rows))))
    assert [(e.node, e.gpu, e.serial, e.first_ms, e.last_ms) for e in found.entities] == [
        ("n3", 1, gpu_key(3, 1), T0 + 1, T0 + 5),
        ("n3", 3, gpu_key(3, 3), T0 + 3, T0 + 3),
    ]
    again = run((dictionary, batch(2, block(rows))))
    assert len(again.entities) == 2  # the store may have failed: listed until it is marked
    again.mark_stored()
    assert run((dictionary, batch(3, block([*rows, (T0, 1, (1.0, 1.0))])))).entities[0].gpu == 0


def test_rows_of_a_refused_gpu_alone_are_left_out_of_a_page() -> None:
    """Else who names one GPU of a node elsewhere hides the node."""
    page, agent = read_hello(hello("n1")), read_hello(hello("n1"))
    page.is_lenient = True
    why = Refusal("another node", "an agent has it")
    for registry in (page, agent):
        registry.refuse(1, why)
    both = batch(1, block([(T0, 1, (1.0, 1.0)), (T0, 2, (2.0, None))]))
    alone = batch(2, block([(T0 + 1000, 1, (1.0, 1.0))]))
    found = run((page, both), (page, alone))
    assert found.refused == {}
    assert found.left_out == dict.fromkeys((0, 1), Refusal("another node", "entity 1: an agent has it"))
    (samples,) = found.samples
    assert values(samples) == {(entity_id(Scope.GPU, gpu_key(1, 1)), T0, "power_w"): 2.0}
    assert [entity.gpu for entity in found.entities] == [1]
    assert (run((page, alone)).samples, run((page, alone)).refused) == ([], {})
    assert (run((agent, both)).samples, set(run((agent, both)).refused)) == ([], {0})
    unknown = batch(3, block([(T0, 9, (1.0, 1.0)), (T0, 2, (2.0, 2.0))]))
    assert set(run((page, unknown)).refused) == {0}, "an entity that it did not name"


def test_a_gpu_that_is_taken_from_its_page_meanwhile_fails_no_insert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop gives it to an agent while another thread has its batch half decoded."""
    page, other = read_hello(hello("n1")), read_hello(hello("n2"))
    take = decode_module._Rows.take

    def taken_first(rows: decode_module._Rows, *more: object) -> object:
        page.refuse(1, Refusal("another node", "an agent has it"))
        return take(rows, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_module._Rows, "take", taken_first)
    found = run(*((each, batch(1, block([(T0, 1, (1.0, 1.0))]))) for each in (page, other)))
    assert [e.node for e in found.entities] == ["n2"]
    found.mark_stored()
    assert (page.has_samples[1], other.has_samples[1]) == (False, True)


def test_every_metric_has_a_range_that_its_storage_can_hold() -> None:
    for metric in METRICS:
        for bound in (metric.low, metric.high):
            stored = metric.encode(bound)
            assert np.isfinite(stored)
