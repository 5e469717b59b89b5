"""The rows of the catalog; `catalog.py` makes them `Metric` values.

Columns: id (never reused), name, unit, kind, storage (struct code), step in unit, low, high, label, help, sources.
Sources: source -> (key there, factor to the catalog's unit). The factors are from nvml.h, dcgm_fields.h and the
kernel's documentation: NVML, DCGM and sysfs use different units (mW and W, ns and us, % and ratio).
Ranges are physical bounds, wide on purpose: they reject garbage, not faults.
"""

from __future__ import annotations

from collections.abc import Mapping

Row = tuple[int, str, str, str, str, float, float, float, str, str, Mapping[str, tuple[str, float]]]

MIB = 1048576.0
COUNT = 2.0**63  # real counters stay below a signed 64-bit integer


def _n(key: str, scale: float = 1.0, dcgm: str = "", dcgm_scale: float = 1.0) -> dict[str, tuple[str, float]]:
    """Return the sources of a GPU row: NVML (or GPM, by the key's prefix) and DCGM."""
    found = {"gpm" if key.startswith("GPM_") else "nvml": (key, scale)}
    if dcgm:
        found["dcgm"] = (dcgm, dcgm_scale)
    return found


# fmt: off
GPU_ROWS: tuple[Row, ...] = (
    (1, "sm_clock_mhz", "MHz", "gauge", "H", 1, 0, 6000, "SM clock", "streaming-multiprocessor clock", _n("nvmlDeviceGetClockInfo(SM)", 1, "DCGM_FI_DEV_SM_CLOCK")),
    (2, "memory_clock_mhz", "MHz", "gauge", "H", 1, 0, 12000, "memory clock", "memory clock", _n("nvmlDeviceGetClockInfo(MEM)", 1, "DCGM_FI_DEV_MEM_CLOCK")),
    (3, "clock_event_reasons", "bitmask", "state", "I", 1, 0, 2**32 - 1, "clock event reasons", "why the clocks are below their maximum", _n("nvmlDeviceGetCurrentClocksEventReasons", 1, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS")),
    (4, "throttle_power_us", "us", "counter", "Q", 1, 0, COUNT, "held by power cap", "time held down by the power cap", _n("FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP", 1e-3, "DCGM_FI_DEV_POWER_VIOLATION", 1e-3)),
    (5, "throttle_thermal_sw_us", "us", "counter", "Q", 1, 0, COUNT, "held by software thermal slowdown", "time held down by software thermal slowdown", _n("FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN", 1e-3, "DCGM_FI_DEV_THERMAL_VIOLATION", 1e-3)),
    (6, "throttle_thermal_hw_us", "us", "counter", "Q", 1, 0, COUNT, "held by hardware thermal slowdown", "time held down by hardware thermal slowdown", _n("FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", 1e-3)),
    (7, "throttle_brake_us", "us", "counter", "Q", 1, 0, COUNT, "held by power brake", "time held down by the external power brake", _n("FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN", 1e-3)),
    (8, "throttle_sync_us", "us", "counter", "Q", 1, 0, COUNT, "held by sync boost", "time held down by sync boost", _n("FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST", 1e-3, "DCGM_FI_DEV_SYNC_BOOST_VIOLATION", 1e-3)),
    (9, "power_w", "W", "gauge", "H", 0.1, 0, 6000, "power", "board power now", _n("FI_DEV_POWER_INSTANT", 1e-3, "DCGM_FI_DEV_POWER_USAGE")),
    (10, "power_limit_w", "W", "gauge", "H", 0.1, 0, 6000, "power limit", "enforced power limit", _n("nvmlDeviceGetEnforcedPowerLimit", 1e-3, "DCGM_FI_DEV_ENFORCED_POWER_LIMIT")),
    (11, "energy_j", "J", "counter", "Q", 0.001, 0, 1e15, "energy", "energy since the driver was loaded", _n("nvmlDeviceGetTotalEnergyConsumption", 1e-3, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3)),
    (12, "gpu_temp_c", "degC", "gauge", "h", 1, -60, 250, "core temperature", "core temperature", _n("nvmlDeviceGetTemperatureV(GPU)", 1, "DCGM_FI_DEV_GPU_TEMP")),
    (13, "memory_temp_c", "degC", "gauge", "h", 1, -60, 250, "HBM temperature", "HBM temperature", _n("FI_DEV_MEMORY_TEMP", 1, "DCGM_FI_DEV_MEMORY_TEMP")),
    (14, "thermal_margin_c", "degC", "gauge", "h", 1, -200, 200, "margin to slowdown", "degrees left before slowdown (T.Limit)", _n("nvmlDeviceGetMarginTemperature", 1, "DCGM_FI_DEV_GPU_TEMP_LIMIT")),
    (15, "gpu_util_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "GPU utilisation", "share of time with any kernel running", _n("nvmlDeviceGetUtilizationRates.gpu", 1e-2, "DCGM_FI_DEV_GPU_UTIL", 1e-2) | {"gpm": ("GPM_METRIC_GRAPHICS_UTIL", 1e-2)}),
    (16, "memory_util_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "memory utilisation", "share of time the memory was read or written", _n("nvmlDeviceGetUtilizationRates.memory", 1e-2, "DCGM_FI_DEV_MEM_COPY_UTIL", 1e-2)),
    (17, "framebuffer_used_bytes", "B", "gauge", "Q", 1, 0, 1e14, "device memory used", "device memory in use", _n("nvmlDeviceGetMemoryInfo_v2.used", 1, "DCGM_FI_DEV_FB_USED", MIB)),
    (18, "framebuffer_total_bytes", "B", "gauge", "Q", 1, 0, 1e14, "device memory", "device memory in all", _n("nvmlDeviceGetMemoryInfo_v2.total", 1, "DCGM_FI_DEV_FB_TOTAL", MIB)),
    (19, "sm_active_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "SM active", "share of SMs busy", _n("GPM_METRIC_SM_UTIL", 1e-2, "DCGM_FI_PROF_SM_ACTIVE")),
    (20, "sm_occupancy_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "SM occupancy", "resident warps over the maximum", _n("GPM_METRIC_SM_OCCUPANCY", 1e-2, "DCGM_FI_PROF_SM_OCCUPANCY")),
    (21, "tensor_active_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "tensor active", "tensor pipes busy", _n("GPM_METRIC_ANY_TENSOR_UTIL", 1e-2, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")),
    (22, "dram_active_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "HBM active", "device memory bandwidth in use over the maximum", _n("GPM_METRIC_DRAM_BW_UTIL", 1e-2, "DCGM_FI_PROF_DRAM_ACTIVE")),
    (23, "fp64_active_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "FP64 active", "FP64 pipes busy", _n("GPM_METRIC_FP64_UTIL", 1e-2, "DCGM_FI_PROF_PIPE_FP64_ACTIVE")),
    (24, "fp32_active_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "FP32 active", "FP32 pipes busy", _n("GPM_METRIC_FP32_UTIL", 1e-2, "DCGM_FI_PROF_PIPE_FP32_ACTIVE")),
    (25, "fp16_active_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "FP16 active", "FP16 pipes busy", _n("GPM_METRIC_FP16_UTIL", 1e-2, "DCGM_FI_PROF_PIPE_FP16_ACTIVE")),
    (26, "pcie_tx_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e13, "PCIe sent", "PCIe traffic from the GPU", _n("GPM_METRIC_PCIE_TX_PER_SEC", MIB, "DCGM_FI_PROF_PCIE_TX_BYTES") | {"nvml": ("nvmlDeviceGetPcieThroughput(TX)", 1e3)}),
    (27, "pcie_rx_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e13, "PCIe received", "PCIe traffic to the GPU", _n("GPM_METRIC_PCIE_RX_PER_SEC", MIB, "DCGM_FI_PROF_PCIE_RX_BYTES") | {"nvml": ("nvmlDeviceGetPcieThroughput(RX)", 1e3)}),
    (28, "nvlink_tx_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e14, "NVLink sent", "NVLink traffic from the GPU", _n("GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB, "DCGM_FI_PROF_NVLINK_TX_BYTES")),
    (29, "nvlink_rx_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e14, "NVLink received", "NVLink traffic to the GPU", _n("GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB, "DCGM_FI_PROF_NVLINK_RX_BYTES")),
    (30, "pcie_generation", "count", "state", "B", 1, 0, 16, "PCIe generation", "PCIe generation now (drops when idle on some boards)", _n("nvmlDeviceGetCurrPcieLinkGeneration", 1, "DCGM_FI_DEV_PCIE_LINK_GEN")),
    (31, "pcie_width", "lanes", "state", "B", 1, 0, 64, "PCIe width", "PCIe lanes now", _n("nvmlDeviceGetCurrPcieLinkWidth", 1, "DCGM_FI_DEV_PCIE_LINK_WIDTH")),
    (32, "pcie_replays", "count", "counter", "Q", 1, 0, COUNT, "PCIe replays", "PCIe packets sent again", _n("nvmlDeviceGetPcieReplayCounter", 1, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER")),
    (33, "nvlink_active_links", "count", "state", "B", 1, 0, 64, "NVLinks up", "NVLinks up", _n("nvmlDeviceGetNvLinkState")),
    (34, "nvlink_crc_errors", "count", "counter", "Q", 1, 0, COUNT, "NVLink CRC errors", "NVLink flits with a bad checksum", _n("FI_DEV_NVLINK_ERROR_DL_CRC", 1, "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL")),
    (35, "nvlink_replays", "count", "counter", "Q", 1, 0, COUNT, "NVLink replays", "NVLink packets sent again", _n("FI_DEV_NVLINK_ERROR_DL_REPLAY", 1, "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL")),
    (36, "nvlink_recoveries", "count", "counter", "Q", 1, 0, COUNT, "NVLink recoveries", "NVLink link recoveries", _n("FI_DEV_NVLINK_ERROR_DL_RECOVERY", 1, "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL")),
    (37, "nvlink_effective_ber", "ratio", "gauge", "d", 0, 0, 1, "NVLink effective BER", "worst effective bit error rate over links (Blackwell on)", _n("FI_DEV_NVLINK_COUNT_EFFECTIVE_BER")),
    (38, "ecc_sram_corrected", "count", "counter", "Q", 1, 0, COUNT, "SRAM errors corrected", "SRAM errors corrected since driver load", _n("nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,CORRECTED)", 1, "DCGM_FI_DEV_ECC_SBE_VOL_SRM")),
    (39, "ecc_sram_uncorrected", "count", "counter", "Q", 1, 0, COUNT, "SRAM errors uncorrected", "SRAM errors not corrected since driver load", _n("nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,UNCORRECTED)", 1, "DCGM_FI_DEV_ECC_DBE_VOL_SRM")),
    (40, "ecc_dram_corrected", "count", "counter", "Q", 1, 0, COUNT, "HBM errors corrected", "HBM errors corrected since driver load", _n("nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,CORRECTED)", 1, "DCGM_FI_DEV_ECC_SBE_VOL_DEV")),
    (41, "ecc_dram_uncorrected", "count", "counter", "Q", 1, 0, COUNT, "HBM errors uncorrected", "HBM errors not corrected since driver load", _n("nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,UNCORRECTED)", 1, "DCGM_FI_DEV_ECC_DBE_VOL_DEV")),
    (42, "sram_threshold_exceeded", "bool", "state", "B", 1, 0, 1, "SRAM threshold exceeded", "the driver's own verdict on SRAM errors", _n("nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded", 1, "DCGM_FI_DEV_THRESHOLD_SRM")),
    (43, "remapped_rows_corrected", "count", "counter", "Q", 1, 0, COUNT, "rows remapped (corrected)", "HBM rows remapped after correctable errors", _n("nvmlDeviceGetRemappedRows[0]", 1, "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS")),
    (44, "remapped_rows_uncorrected", "count", "counter", "Q", 1, 0, COUNT, "rows remapped (uncorrected)", "HBM rows remapped after uncorrectable errors", _n("nvmlDeviceGetRemappedRows[1]", 1, "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS")),
    (45, "row_remap_pending", "bool", "state", "B", 1, 0, 1, "row remap pending", "a remap waits for a GPU reset", _n("nvmlDeviceGetRemappedRows[2]", 1, "DCGM_FI_DEV_ROW_REMAP_PENDING")),
    (46, "row_remap_failed", "bool", "state", "B", 1, 0, 1, "row remap failed", "a remap failed", _n("nvmlDeviceGetRemappedRows[3]", 1, "DCGM_FI_DEV_ROW_REMAP_FAILURE")),
    (47, "remap_banks_max", "count", "gauge", "I", 1, 0, 2**32 - 1, "banks with all spares", "memory banks with all spare rows left", _n("nvmlDeviceGetRowRemapperHistogram.max", 1, "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_MAX")),
    (48, "remap_banks_none", "count", "gauge", "I", 1, 0, 2**32 - 1, "banks with no spare", "memory banks with no spare row left", _n("nvmlDeviceGetRowRemapperHistogram.none", 1, "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_NONE")),
    (49, "recovery_action", "enum", "state", "B", 1, 0, 255, "recovery action", "what the driver asks for: none; reset; reboot; drain p2p; drain and reset", _n("FI_DEV_GET_GPU_RECOVERY_ACTION")),
    (50, "fabric_state", "enum", "state", "B", 1, 0, 255, "fabric state", "NVSwitch fabric registration", _n("nvmlDeviceGetGpuFabricInfoV", 1, "DCGM_FI_DEV_FABRIC_MANAGER_STATUS")),
    (51, "compute_processes", "count", "gauge", "H", 1, 0, 65535, "compute processes", "processes holding a CUDA context", _n("nvmlDeviceGetComputeRunningProcesses")),
    (60, "xgmi_corrected", "count", "counter", "Q", 1, 0, COUNT, "XGMI errors corrected", "errors of the XGMI links that were corrected (AMD)", {"amd": ("gpu_ecc_correct_xgmi_wafl", 1.0)}),
    (61, "xgmi_uncorrected", "count", "counter", "Q", 1, 0, COUNT, "XGMI errors uncorrected", "errors of the XGMI links that were not corrected (AMD)", {"amd": ("gpu_ecc_uncorrect_xgmi_wafl", 1.0)}),
    (62, "exporter_unhealthy", "bool", "state", "B", 1, 0, 1, "exporter says unhealthy", "the exporter's own verdict on the GPU, where it gives one (AMD)", {"amd": ("gpu_health == 0", 1.0)}),
)

NODE_ROWS: tuple[Row, ...] = (
    (101, "cpu_util_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "CPU utilisation", "share of CPU time not idle, over all cores", {"host": ("/proc/stat cpu", 1.0)}),
    (102, "load1", "count", "gauge", "I", 0.01, 0, 1e6, "load", "runnable and blocked tasks, 1 minute average", {"host": ("/proc/loadavg", 1.0)}),
    (103, "memory_available_bytes", "B", "gauge", "Q", 1, 0, 1e15, "memory available", "memory that can be given without swapping", {"host": ("/proc/meminfo MemAvailable, kB", 1024.0)}),
    (104, "memory_total_bytes", "B", "gauge", "Q", 1, 0, 1e15, "memory", "memory in all", {"host": ("/proc/meminfo MemTotal, kB", 1024.0)}),
    (105, "disk_read_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e13, "disk read", "read from local disks", {"host": ("/proc/diskstats sectors read, whole disks", 512.0)}),
    (106, "disk_write_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e13, "disk write", "written to local disks", {"host": ("/proc/diskstats sectors written, whole disks", 512.0)}),
    (107, "root_used_ratio", "ratio", "gauge", "H", 1e-4, 0, 1, "root disk used", "share of the root file system in use", {"host": ("statvfs(/)", 1.0)}),
    (108, "net_rx_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e13, "network received", "received on all network cards", {"host": ("/sys/class/net/*/statistics/rx_bytes", 1.0)}),
    (109, "net_tx_bytes_per_s", "B/s", "gauge", "Q", 1, 0, 1e13, "network sent", "sent on all network cards", {"host": ("/sys/class/net/*/statistics/tx_bytes", 1.0)}),
    (110, "inlet_temp_c", "degC", "gauge", "h", 0.1, -60, 150, "inlet temperature", "air or coolant entering the node", {"sensors": ("hwmon inlet sensor, millidegrees; IPMI inlet or ambient, degC (1.0)", 1e-3)}),
    (111, "clock_offset_s", "s", "gauge", "q", 1e-6, -4e9, 4e9, "clock offset", "node clock minus the collector's, at the last exchange", {"uplink": ("Welcome/Ack collector_ts_ms", 1e-3)}),
    (112, "pcie_aer_correctable", "count", "counter", "Q", 1, 0, COUNT, "PCIe AER corrected", "PCIe errors corrected, all devices", {"sysfs": ("aer_dev_correctable TOTAL_ERR_COR", 1.0)}),
    (113, "pcie_aer_fatal", "count", "counter", "Q", 1, 0, COUNT, "PCIe AER fatal", "fatal PCIe errors, all devices", {"sysfs": ("aer_dev_fatal TOTAL_ERR_FATAL", 1.0)}),
    (114, "edac_corrected", "count", "counter", "Q", 1, 0, COUNT, "host memory errors corrected", "host memory errors corrected (EDAC)", {"sysfs": ("edac/mc/mc*/ce_count", 1.0)}),
    (115, "edac_uncorrected", "count", "counter", "Q", 1, 0, COUNT, "host memory errors uncorrected", "host memory errors not corrected (EDAC)", {"sysfs": ("edac/mc/mc*/ue_count", 1.0)}),
    (116, "oom_kills", "count", "counter", "Q", 1, 0, COUNT, "OOM kills", "processes killed for want of memory", {"host": ("/proc/vmstat oom_kill", 1.0)}),
    (117, "agent_cpu_ratio", "ratio", "gauge", "I", 1e-4, 0, 1024, "agent CPU", "CPU time of the agent, in cores", {"host": ("getrusage(2) ru_utime + ru_stime", 1.0)}),
    (118, "agent_rss_bytes", "B", "gauge", "Q", 1, 0, 1e13, "agent memory", "resident memory of the agent", {"host": ("/proc/self/statm resident, pages", 1.0)}),
    (119, "spool_bytes", "B", "gauge", "Q", 1, 0, 1e15, "spool", "bytes in the agent's spool not yet acknowledged", {"spool": ("size of unacknowledged records", 1.0)}),
    (120, "fan_min_rpm", "rpm", "gauge", "H", 1, 0, 65535, "slowest fan", "speed of the node's slowest fan", {"sensors": ("hwmon fan*_input; IPMI fans in RPM", 1.0)}),
    (121, "fans_failed", "count", "gauge", "B", 1, 0, 255, "fans failed", "fans that the board says have failed", {"sensors": ("hwmon fan*_fault, fan*_alarm; IPMI status cr or nr", 1.0)}),
    (122, "agent_tick_s", "s", "gauge", "I", 1e-4, 0, 1e5, "agent tick", "longest time in 10 s from a tick to the last source's answer, or its limit", {"sampler": ("time of a tick", 1.0)}),
    (123, "agent_slowest_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "agent slowest read", "longest reading of one source in 10 s", {"sampler": ("time of a reading", 1.0)}),
    (124, "agent_sources_failing", "count", "gauge", "H", 1, 0, 65535, "sources that fail", "sources of the agent whose last reading failed", {"sampler": ("sources whose last read raised", 1.0)}),
    (125, "agent_sources_hung", "count", "gauge", "H", 1, 0, 65535, "sources that hang", "sources of the agent whose reading has not returned", {"sampler": ("sources past their limit", 1.0)}),
    (126, "agent_read_failures", "count", "counter", "Q", 1, 0, COUNT, "failed readings", "readings that failed or overran their limit since the agent started, all sources", {"sampler": ("reads that raised or overran", 1.0)}),
    (127, "agent_missed_ticks", "count", "counter", "Q", 1, 0, COUNT, "missed ticks", "ticks that the agent did not make: it got no CPU, or the machine slept", {"sampler": ("ticks left out", 1.0)}),
    (128, "source_nvml_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of GPUs", "longest reading of one GPU in 10 s by source nvml; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (129, "source_nvml_outcome", "enum", "state", "B", 1, 0, 255, "outcome of GPUs", "worst outcome in 10 s of readings by source nvml: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (130, "source_host_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of the host", "longest reading in 10 s by source host; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (131, "source_host_outcome", "enum", "state", "B", 1, 0, 255, "outcome of the host", "worst outcome in 10 s of readings by source host: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (132, "source_sensors_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of sensors", "longest reading in 10 s by source sensors; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (133, "source_sensors_outcome", "enum", "state", "B", 1, 0, 255, "outcome of sensors", "worst outcome in 10 s of readings by source sensors: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (134, "source_infiniband_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of InfiniBand ports", "longest reading in 10 s by source infiniband; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (135, "source_infiniband_outcome", "enum", "state", "B", 1, 0, 255, "outcome of InfiniBand ports", "worst outcome in 10 s of readings by source infiniband: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (136, "source_ethernet_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of Ethernet ports", "longest reading in 10 s by source ethernet; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (137, "source_ethernet_outcome", "enum", "state", "B", 1, 0, 255, "outcome of Ethernet ports", "worst outcome in 10 s of readings by source ethernet: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (138, "source_dcgm_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of dcgm-exporter's page", "longest reading in 10 s by source dcgm; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (139, "source_dcgm_outcome", "enum", "state", "B", 1, 0, 255, "outcome of dcgm-exporter's page", "worst outcome in 10 s of readings by source dcgm: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (140, "source_inference_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of inference servers' pages", "longest reading in 10 s by source inference; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (141, "source_inference_outcome", "enum", "state", "B", 1, 0, 255, "outcome of inference servers' pages", "worst outcome in 10 s of readings by source inference: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (142, "source_steps_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of training loops' reports", "longest reading in 10 s by source steps; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (143, "source_steps_outcome", "enum", "state", "B", 1, 0, 255, "outcome of training loops' reports", "worst outcome in 10 s of readings by source steps: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (144, "source_jobs_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of jobs that hold GPUs", "longest reading in 10 s by source jobs; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (145, "source_jobs_outcome", "enum", "state", "B", 1, 0, 255, "outcome of jobs that hold GPUs", "worst outcome in 10 s of readings by source jobs: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (146, "source_kmsg_outcome", "enum", "state", "B", 1, 0, 255, "outcome of the kernel log", "whether the kernel log is read now: answered; failed", {"sampler": ("state of its reader", 1.0)}),
    (147, "source_rank_dumps_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of ranks' dumps", "longest reading in 10 s by source rank_dumps; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (148, "source_rank_dumps_outcome", "enum", "state", "B", 1, 0, 255, "outcome of ranks' dumps", "worst outcome in 10 s of readings by source rank_dumps: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (149, "source_owners_read_s", "s", "gauge", "I", 1e-4, 0, 1e5, "read of owners of jobs", "longest reading in 10 s by source owners; one that has not returned: since it began", {"sampler": ("time of a reading", 1.0)}),
    (150, "source_owners_outcome", "enum", "state", "B", 1, 0, 255, "outcome of owners of jobs", "worst outcome in 10 s of readings by source owners: answered; failed; overran its limit", {"sampler": ("outcome of a reading", 1.0)}),
    (160, "exporters_up", "count", "state", "B", 1, 0, 255, "exporters that answer", "exporters of a node without an agent whose pages were read", {"scrape": ("pages read", 1.0)}),
    (161, "exporters_down", "count", "state", "B", 1, 0, 255, "exporters that do not answer", "exporters of a node without an agent whose pages could not be read", {"scrape": ("pages not read", 1.0)}),
)

LINK_ROWS: tuple[Row, ...] = (
    (201, "link_up", "bool", "state", "B", 1, 0, 1, "link up", "the port is active", {"sysfs": ("state == 4 (ACTIVE)", 1.0), "ethernet": ("operstate == up, else carrier", 1.0)}),
    (202, "rate_gbps", "Gb/s", "state", "I", 0.1, 0, 1e7, "link rate", "signalling rate of the port now", {"sysfs": ("rate", 1.0), "ethernet": ("speed (Mb/s)", 1e-3)}),
    (203, "rx_bytes", "B", "counter", "Q", 1, 0, COUNT, "received", "bytes received", {"sysfs": ("port_rcv_data (4-byte words)", 4.0), "ethernet": ("statistics/rx_bytes", 1.0)}),
    (204, "tx_bytes", "B", "counter", "Q", 1, 0, COUNT, "sent", "bytes sent", {"sysfs": ("port_xmit_data (4-byte words)", 4.0), "ethernet": ("statistics/tx_bytes", 1.0)}),
    (205, "symbol_errors", "count", "counter", "Q", 1, 0, COUNT, "symbol errors", "minor link errors", {"sysfs": ("symbol_error", 1.0)}),
    (206, "link_downed", "count", "counter", "Q", 1, 0, COUNT, "link downs", "times the link failed to recover and went down", {"sysfs": ("link_downed", 1.0), "ethernet": ("carrier_down_count", 1.0)}),
    (207, "link_error_recoveries", "count", "counter", "Q", 1, 0, COUNT, "link recoveries", "times the link retrained", {"sysfs": ("link_error_recovery", 1.0)}),
    (208, "rx_errors", "count", "counter", "Q", 1, 0, COUNT, "receive errors", "packets received with an error", {"sysfs": ("port_rcv_errors", 1.0), "ethernet": ("statistics/rx_errors", 1.0)}),
    (209, "tx_discards", "count", "counter", "Q", 1, 0, COUNT, "send discards", "packets dropped before sending", {"sysfs": ("port_xmit_discards", 1.0), "ethernet": ("statistics/tx_dropped", 1.0)}),
    (210, "tx_wait", "count", "counter", "Q", 1, 0, COUNT, "send waits", "ticks with data to send and no credit", {"sysfs": ("port_xmit_wait", 1.0)}),
    (211, "local_integrity_errors", "count", "counter", "Q", 1, 0, COUNT, "local integrity errors", "local link integrity errors", {"sysfs": ("local_link_integrity_errors", 1.0)}),
    (212, "buffer_overruns", "count", "counter", "Q", 1, 0, COUNT, "buffer overruns", "excessive buffer overruns", {"sysfs": ("excessive_buffer_overrun_errors", 1.0)}),
    (213, "out_of_sequence", "count", "counter", "Q", 1, 0, COUNT, "out of sequence", "packets out of sequence", {"sysfs": ("hw_counters/out_of_sequence", 1.0)}),
    (214, "packet_sequence_errors", "count", "counter", "Q", 1, 0, COUNT, "packet sequence errors", "NAKs for a sequence error received", {"sysfs": ("hw_counters/packet_seq_err", 1.0)}),
    (215, "rnr_nak_retries", "count", "counter", "Q", 1, 0, COUNT, "receiver-not-ready retries", "retries because the receiver was not ready", {"sysfs": ("hw_counters/rnr_nak_retry_err", 1.0)}),
    (216, "ack_timeouts", "count", "counter", "Q", 1, 0, COUNT, "ACK timeouts", "local acknowledge timeouts", {"sysfs": ("hw_counters/local_ack_timeout_err", 1.0)}),
    (217, "cnp_sent", "count", "counter", "Q", 1, 0, COUNT, "congestion notices sent", "congestion notification packets sent", {"sysfs": ("hw_counters/np_cnp_sent", 1.0)}),
    (218, "cnp_handled", "count", "counter", "Q", 1, 0, COUNT, "congestion notices handled", "congestion notification packets acted on", {"sysfs": ("hw_counters/rp_cnp_handled", 1.0)}),
)

WORKLOAD_ROWS: tuple[Row, ...] = (
    (301, "ttft_p50_s", "s", "gauge", "d", 0, 0, 1e6, "time to first token p50", "median time to the first token", {"inference": ("time_to_first_token_seconds", 1.0)}),
    (302, "ttft_p95_s", "s", "gauge", "d", 0, 0, 1e6, "time to first token p95", "95th percentile of the time to the first token", {"inference": ("time_to_first_token_seconds", 1.0)}),
    (303, "tokens_per_s", "1/s", "gauge", "d", 0, 0, 1e12, "tokens per second", "tokens made per second", {"inference": ("generation_tokens_total", 1.0)}),
    (304, "requests_running", "count", "gauge", "I", 1, 0, 2**32 - 1, "requests running", "requests being served", {"inference": ("num_requests_running", 1.0)}),
    (305, "requests_waiting", "count", "gauge", "I", 1, 0, 2**32 - 1, "requests waiting", "requests in the queue", {"inference": ("num_requests_waiting", 1.0)}),
    (306, "step_time_s", "s", "gauge", "d", 0, 0, 1e6, "step time", "time of one training step", {"steps": ("step_time_s", 1.0)}),
    (307, "tokens_per_step", "count", "gauge", "Q", 1, 0, 1e15, "tokens per step", "tokens trained on in one step", {"steps": ("tokens", 1.0)}),
    (308, "flops_per_step", "FLOP", "gauge", "d", 0, 0, 1e30, "operations per step", "floating-point operations of the model in one step", {"steps": ("flops", 1.0)}),
    (309, "mfu_ratio", "ratio", "gauge", "d", 0, 0, 1.5, "MFU", "model operations per second over the hardware's peak", {"derived": ("flops_per_step / step_time_s / peak", 1.0)}),
)
# fmt: on
