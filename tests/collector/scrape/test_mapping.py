"""Pages of exporters become values of the catalog, and what a page cannot say is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from drover_collector.scrape.mapping import Found, GpuId, PageMapper
from drover_collector.scrape.tables import ALL_NAMES, TableError, parse_table, table
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.metrics.prometheus_text import ExpositionError

PAGES = Path(__file__).parent / "pages"
NOW_MS = 1_780_000_000_000


def _page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text("utf-8")


def _read(name: str, *pages: str) -> Found:
    mapper = PageMapper(table(name))
    found = [mapper.read(page, NOW_MS + 10_000 * number) for number, page in enumerate(pages or [_page(name)])]
    return found[-1]


def _of(found: Found, slot: int) -> dict[str, float]:
    return next(values for gpu, values in found.gpus.items() if gpu.slot == slot)


def test_a_page_of_dcgm_exporter_in_the_catalogs_units() -> None:
    found = _read("dcgm")
    assert list(found.gpus)[1] == GpuId(
        1, "GPU-5fd4f087-86f3-7a43-b711-4771313afc51", "GPU-5fd4f087-86f3-7a43-b711-4771313afc51", "",
        "00000000:43:00.0", "NVIDIA H100 80GB HBM3",
    )  # fmt: skip
    busy = _of(found, 1)
    assert (busy["sm_clock_mhz"], busy["gpu_temp_c"], busy["power_w"]) == (1965, 61, 688.121)
    assert busy["energy_j"] == pytest.approx(2129413847.234)  # mJ there
    assert (busy["gpu_util_ratio"], busy["sm_active_ratio"]) == (1.0, 0.912345)
    assert busy["framebuffer_used_bytes"] == 68996 * 2**20
    assert (busy["remapped_rows_corrected"], busy["row_remap_failed"], busy["pcie_replays"]) == (2, 0, 3)
    assert "ecc_dram_uncorrected" not in busy  # not in the exporter's default set: absent, not 0
    assert not found.xids and not found.problems


def test_an_xid_is_reported_when_the_code_changes_and_not_when_it_stays() -> None:
    page = _page("dcgm")
    fresh = page.replace("} 31\n", "} 79\n")
    mapper = PageMapper(table("dcgm"))
    assert [mapper.read(text, NOW_MS + n).xids for n, text in enumerate((page, fresh, fresh))] == [[], [(1, 79)], []]


def _xid_page(*samples: tuple[int, str, int]) -> str:
    lines = [f'DCGM_FI_DEV_XID_ERRORS{{gpu="{slot}",UUID="{uuid}"}} {code}' for slot, uuid, code in samples]
    lines += [f'DCGM_FI_DEV_GPU_TEMP{{gpu="{slot}",UUID="{uuid}"}} 40' for slot, uuid, _ in samples]
    return "\n".join(lines)


def test_a_code_stays_with_its_gpu_when_slots_change() -> None:
    """A GPU is gone after a reboot and the others move up: an old code is no new one of its neighbour."""
    mapper = PageMapper(table("dcgm"))
    assert mapper.read(_xid_page((0, "a", 0), (1, "b", 0), (2, "c", 79)), NOW_MS).xids == []
    assert mapper.read(_xid_page((0, "a", 0), (1, "c", 79)), NOW_MS + 1).xids == []
    assert mapper.read(_xid_page((0, "a", 31), (1, "c", 79)), NOW_MS + 2).xids == [(0, 31)]
    assert mapper.read(_xid_page((0, "new", 48), (1, "c", 79)), NOW_MS + 3).xids == []  # not seen to come


def test_two_codes_of_one_gpu_on_a_page_are_new_once() -> None:
    page = _one("300") + "".join(
        f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-a",err_code="{code}"}} {code}\n' for code in (31, 79)
    )
    mapper = PageMapper(table("dcgm"))
    first = _one("300") + 'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a"} 0\n'
    assert [mapper.read(text, NOW_MS + n).xids for n, text in enumerate((first, page, page))] == [
        [], [(0, 31), (0, 79)], []
    ]  # fmt: skip


def test_a_gpu_in_mig_mode_is_there_by_what_its_instances_share() -> None:
    page = _one("300") + "".join(
        f'{name}{{gpu="1",UUID="GPU-b",GPU_I_PROFILE="3g.40gb",GPU_I_ID="{part}"}} {value}\n'
        for part in (1, 2)
        for name, value in (("DCGM_FI_DEV_GPU_TEMP", 41), ("DCGM_FI_DEV_POWER_USAGE", 200), ("DCGM_FI_DEV_FB_USED", 9))
    )
    assert _of(_read("dcgm", page), 1) == {"gpu_temp_c": 41, "power_w": 200}  # memory is the instance's own


def test_memory_of_amds_page_is_in_mib() -> None:
    assert _of(_read("amd"), 0)["framebuffer_total_bytes"] == 196592 * 2**20


def test_a_page_of_amds_exporter_has_nothing_that_means_another_thing_here() -> None:
    again = _page("amd").replace("3539423344\n", "3539424344\n")
    found = _read("amd", _page("amd"), again)
    sick = _of(found, 1)
    assert (sick["exporter_unhealthy"], _of(found, 0)["exporter_unhealthy"]) == (1, 0)
    assert (sick["gpu_temp_c"], sick["power_w"], sick["gpu_util_ratio"]) == (71, 702, 0.99)
    assert (sick["sm_clock_mhz"], sick["memory_clock_mhz"]) == (2100, 1300)
    assert (sick["ecc_dram_uncorrected"], sick["xgmi_corrected"]) == (1, 4)
    assert sick["energy_j"] == pytest.approx(6276130)  # uJ there
    assert sick["nvlink_tx_bytes_per_s"] == pytest.approx(1000 * 1000 / 10)  # 1,000 KB in 10 s, one link of two
    # A detector of NVIDIA's own conditions gets no column of these.
    own = ("clock_event_reasons", "throttle_thermal_sw_us", "thermal_margin_c", "row_remap_pending", "row_remap_failed",
           "nvlink_crc_errors", "nvlink_active_links", "fabric_state", "recovery_action")  # fmt: skip
    assert not {m.name for m in table("amd").metrics()} & set(own)


def test_a_page_of_node_exporter_with_counters_and_shares() -> None:
    later = (
        _page("node")
        .replace("444.9", "446.9")
        .replace("10870.69", "10876.69")
        .replace("6.8210035552e+10", "6.8210045552e+10")
    )
    found = _read("node", _page("node"), later)
    assert found.node["cpu_util_ratio"] == pytest.approx(2 / 8)
    assert found.node["net_rx_bytes_per_s"] == pytest.approx(1_000)  # of eth0; docker0 is no card
    assert found.node["root_used_ratio"] == pytest.approx(0.75)
    assert (found.node["edac_corrected"], found.node["edac_uncorrected"]) == (3, 5)
    assert found.links["mlx5_0"] == {"link_up": 1, "rate_gbps": pytest.approx(400), "link_downed": 0}
    assert found.links["mlx4_0/2"] == {"link_up": 0, "link_downed": 3}
    assert not found.gpus


def test_a_first_page_has_no_rates_and_a_counter_that_fell_has_none() -> None:
    assert "net_rx_bytes_per_s" not in _read("node").node
    fell = _page("node").replace("6.8210035552e+10", "5")
    assert "net_rx_bytes_per_s" not in _read("node", _page("node"), fell).node


def _one(value: str, label: str = "") -> str:
    gpu = 'gpu="0",UUID="GPU-a"'
    return f"DCGM_FI_DEV_POWER_USAGE{{{gpu}{label}}} {value}\nDCGM_FI_DEV_GPU_TEMP{{{gpu}}} 40\n"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-3", "1e9", "140737488355328", "9223372036854775792"])
def test_what_cannot_be_true_is_absent(value: str) -> None:
    assert _of(_read("dcgm", _one(value)), 0) == {"gpu_temp_c": 40}


def test_a_sample_of_another_time_is_left_out_and_said() -> None:
    found = _read("dcgm", _one(f"300 {NOW_MS - 3_600_000}"))
    assert _of(found, 0) == {"gpu_temp_c": 40}
    assert any("off the collector's clock" in problem for problem in found.problems)
    assert _of(_read("dcgm", _one(f"300 {NOW_MS - 1000}")), 0)["power_w"] == 300


def test_a_series_that_stands_there_twice_counts_once() -> None:
    found = _read("node", _page("node") + 'node_edac_correctable_errors_total{controller="0"} 900\n')
    assert found.node["edac_corrected"] == 3
    assert found.problems == {"series that stand there twice"}


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("<html>", "HTML"),
        ("up 1\n", "none of dcgm-exporter's values"),
        (_one("300", f',a="{"x" * 5000}"'), "label"),
        (_one("300", "".join(f',l{n}="v"' for n in range(70))), "labels"),
        (_one("300" + " " * 20_000), "characters"),
        (_one("three"), "no number"),
        (_one("1") * 11_000, "more than 20000 samples"),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="900",UUID="GPU-a"} 40\n', "none of"),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="a\\nb"} 40\n', "none of"),
    ],
)
def test_a_hostile_page_is_refused_as_a_whole(page: str, why: str) -> None:
    with pytest.raises(ExpositionError, match=why):
        _read("dcgm", page)


def test_a_page_cannot_make_gpus_without_limit() -> None:
    page = "".join(f'DCGM_FI_DEV_GPU_TEMP{{gpu="{n}",UUID="GPU-{n}"}} 40\n' for n in range(200))
    page += 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="another"} 40\n'
    found = _read("dcgm", page)
    assert len(found.gpus) == 64
    assert found.problems == {"more than 64 GPUs"}


def test_two_pages_of_a_node_are_one_row_for_each_gpu() -> None:
    found = _read("dcgm")
    found.add(_read("node"))
    assert len(found.gpus) == 2 and found.node["load1"] == 0.21


@pytest.mark.parametrize("name", ALL_NAMES)
def test_each_row_of_a_table_cites_its_source_and_fits_the_catalog(name: str) -> None:
    rows = table(name).rows
    assert rows and all(row.source for row in rows)
    assert all(row.metric is None or BY_NAME[row.metric.name].scope is not Scope.WORKLOAD for row in rows)


def test_a_row_without_a_source_is_refused() -> None:
    head = 'name = "x"\ntitle = "x"\nvendor = ""\nneeds = "node"\nprefixes = [""]\nblanks = []\n[[row]]\nseries = "a"\n'
    with pytest.raises(TableError, match="source"):
        parse_table("x", head + 'metric = "load1"\n')
    with pytest.raises(TableError, match="metric"):
        parse_table("x", head + 'metric = "nothing"\nsource = "b"\n')
