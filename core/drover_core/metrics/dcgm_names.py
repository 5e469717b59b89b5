"""Names under which dcgm-exporter has GPU metrics, so that boards and rules made for it work on Drover's series.

Names, types and units: etc/default-counters.csv and etc/dcp-metrics-included.csv of NVIDIA/dcgm-exporter, and
dcgm_fields.h of NVIDIA/DCGM. Labels: internal/pkg/rendermetrics/render_metrics.go of NVIDIA/dcgm-exporter. The factor
from a field's unit to the catalog's stands in the catalog's own rows, as `sources["dcgm"]`: what is read of such a page
and what is written on one are the same numbers.

Columns: name, type, unit there, metric of the catalog, digits after the point, doubt ("": none).
"""

from __future__ import annotations

LAST_XID = "last_xid"  # no metric of the catalog: the code of the newest XID event, 0 before the first

Row = tuple[str, str, str, str, int, str]

# Fields that dcgm-exporter gives by default and Drover cannot: no source in the catalog means the same.
NOT_GIVEN: dict[str, str] = {
    "DCGM_FI_DEV_PCIE_TX_THROUGHPUT": "a counter of KB there; NVML and GPM give a rate, see DCGM_FI_PROF_PCIE_TX_BYTES",
    "DCGM_FI_DEV_PCIE_RX_THROUGHPUT": "a counter of KB there; NVML and GPM give a rate, see DCGM_FI_PROF_PCIE_RX_BYTES",
    "DCGM_FI_DEV_ENC_UTIL": "not in the catalog",
    "DCGM_FI_DEV_DEC_UTIL": "not in the catalog",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "a counter there; GPM gives a rate, see DCGM_FI_PROF_NVLINK_TX_BYTES",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": "not in the catalog",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "not in the catalog; gpu_util_ratio is another measure",
}

_NS = "Its CSV says us or ns, by version; dcgm_fields.h says ns since DCGM 3.3"
_FREE = "Total less used: what the driver reserves counts as free, which DCGM leaves out"
_XID = "Since the collector started, of events that reached this collector; without err_code and err_msg"
_VOLATILE = "The field is not in the default set; SRAM and HBM apart"

# fmt: off
ROWS: tuple[Row, ...] = (
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", "MHz", "sm_clock_mhz", 0, ""),
    ("DCGM_FI_DEV_MEM_CLOCK", "gauge", "MHz", "memory_clock_mhz", 0, ""),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "gauge", "bitmask", "clock_event_reasons", 0, "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS before DCGM 3.3"),
    ("DCGM_FI_DEV_POWER_VIOLATION", "counter", "ns", "throttle_power_us", 0, _NS),
    ("DCGM_FI_DEV_THERMAL_VIOLATION", "counter", "ns", "throttle_thermal_sw_us", 0, _NS),
    ("DCGM_FI_DEV_SYNC_BOOST_VIOLATION", "counter", "ns", "throttle_sync_us", 0, _NS),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "W", "power_w", 6, "Instantaneous; DCGM's is an average on some boards"),
    ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "gauge", "W", "power_limit_w", 6, ""),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "mJ", "energy_j", 0, ""),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "degC", "gpu_temp_c", 0, ""),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "degC", "memory_temp_c", 0, ""),
    ("DCGM_FI_DEV_GPU_TEMP_LIMIT", "gauge", "degC", "thermal_margin_c", 0, ""),
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", "percent", "gpu_util_ratio", 0, ""),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "percent", "memory_util_ratio", 0, ""),
    ("DCGM_FI_DEV_FB_USED", "gauge", "MiB", "framebuffer_used_bytes", 0, ""),
    ("DCGM_FI_DEV_FB_FREE", "gauge", "MiB", "framebuffer_total_bytes", 0, _FREE),
    ("DCGM_FI_DEV_FB_TOTAL", "gauge", "MiB", "framebuffer_total_bytes", 0, ""),
    ("DCGM_FI_PROF_SM_ACTIVE", "gauge", "ratio", "sm_active_ratio", 6, ""),
    ("DCGM_FI_PROF_SM_OCCUPANCY", "gauge", "ratio", "sm_occupancy_ratio", 6, ""),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "ratio", "tensor_active_ratio", 6, ""),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "ratio", "dram_active_ratio", 6, ""),
    ("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "gauge", "ratio", "fp64_active_ratio", 6, ""),
    ("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "gauge", "ratio", "fp32_active_ratio", 6, ""),
    ("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "gauge", "ratio", "fp16_active_ratio", 6, ""),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "gauge", "B/s", "pcie_tx_bytes_per_s", 0, ""),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "gauge", "B/s", "pcie_rx_bytes_per_s", 0, ""),
    ("DCGM_FI_PROF_NVLINK_TX_BYTES", "gauge", "B/s", "nvlink_tx_bytes_per_s", 0, ""),
    ("DCGM_FI_PROF_NVLINK_RX_BYTES", "gauge", "B/s", "nvlink_rx_bytes_per_s", 0, ""),
    ("DCGM_FI_DEV_PCIE_LINK_GEN", "gauge", "generation", "pcie_generation", 0, ""),
    ("DCGM_FI_DEV_PCIE_LINK_WIDTH", "gauge", "lanes", "pcie_width", 0, ""),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "count", "pcie_replays", 0, ""),
    ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "counter", "count", "nvlink_crc_errors", 0, ""),
    ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "counter", "count", "nvlink_replays", 0, ""),
    ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "counter", "count", "nvlink_recoveries", 0, ""),
    ("DCGM_FI_DEV_ECC_SBE_VOL_SRM", "counter", "count", "ecc_sram_corrected", 0, _VOLATILE),
    ("DCGM_FI_DEV_ECC_DBE_VOL_SRM", "counter", "count", "ecc_sram_uncorrected", 0, _VOLATILE),
    ("DCGM_FI_DEV_ECC_SBE_VOL_DEV", "counter", "count", "ecc_dram_corrected", 0, _VOLATILE),
    ("DCGM_FI_DEV_ECC_DBE_VOL_DEV", "counter", "count", "ecc_dram_uncorrected", 0, _VOLATILE),
    ("DCGM_FI_DEV_THRESHOLD_SRM", "gauge", "bool", "sram_threshold_exceeded", 0, ""),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter", "count", "remapped_rows_corrected", 0, ""),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", "count", "remapped_rows_uncorrected", 0, ""),
    ("DCGM_FI_DEV_ROW_REMAP_PENDING", "gauge", "bool", "row_remap_pending", 0, ""),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "bool", "row_remap_failed", 0, ""),
    ("DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_MAX", "gauge", "count", "remap_banks_max", 0, ""),
    ("DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_NONE", "gauge", "count", "remap_banks_none", 0, ""),
    ("DCGM_FI_DEV_FABRIC_MANAGER_STATUS", "gauge", "code", "fabric_state", 0, "NVML's numbers, the same up to 4"),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "code", LAST_XID, 0, _XID),
)
# fmt: on

LESS = {"DCGM_FI_DEV_FB_FREE": "framebuffer_used_bytes"}  # name -> the metric that is taken off
