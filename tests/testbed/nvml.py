"""Drives the C stand-in for libnvidia-ml.so.1 in `testbed/nvml/`; its script is described at the top of `fake_nvml.c`.

    library = build(folder)                     # once: gcc, under a second
    fake = FakeNvml(folder / "script", library)
    fake.healthy(gpus=8)
    fake.lose(3)                                # takes effect at the next call, in whatever process
    subprocess.run([...], env=os.environ | fake.env())

In the test's own process: `load(library)` once, `monkeypatch.setenv(SCRIPT_VARIABLE, str(fake.script))`, then pynvml.
Without the variable the stand-in says that there is no library, so that other tests see a machine without GPU.

What calls cost, and how many there were (a benchmark's part):

    fake.costs()                                # 140 us asleep for each driver call, 4.5 ms for a process list
    fake.costs(spin=True)                       # the same, busy: counts as CPU time of the caller
    fake.costs_of_h100()                        # busy for as long as measured on a real one
    fake.count_calls(folder / "calls")          # from now on, in whatever process
    before = fake.calls(); ...; after = fake.calls()        # {"nvmlDeviceGetFieldValues": 8, ...}
    fake.driver_calls()                         # what they were to the driver

A batch of field values costs one driver call for each group of fields that NVML serves by one (`served` in fields.h),
and waiting for events, allocating samples and computing GPM metrics out of two samples cost none: they stay in the
library.

What is in `H100_US` was measured: one H100, driver 580.159.04, 26 November 2026, by `benchmarks/bench_gpu.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

SCRIPT_VARIABLE = "DROVER_FAKE_NVML"
SONAME = "libnvidia-ml.so.1"
SOURCES = Path(__file__).parent / "nvml"
LINKS = 18

_CALLS = struct.Struct("56sQQ")
_CALL_FILE = 256  # records of it, as in script.h
IN_THE_LIBRARY = (  # functions that make no driver call
    "nvmlEventSetWait_v2",
    "nvmlEventSetCreate",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlGpmMetricsGet",
)
PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
)

# Microseconds of CPU that a call costs, which is also how long it takes. nvmlDeviceGetFieldValues costs 43 in most
# ticks and 4,100 in that of the slow fields (3,400 of it for the energy): 0.48 ms a second and GPU, spread here over
# the driver calls that the stand-in counts. Process lists were of a GPU with one process.
H100_US: dict[str, int] = {
    "*": 5,
    "nvmlDeviceGetFieldValues": 95,
    "nvmlGpmSampleGet": 222,
    "nvmlGpmMetricsGet": 10,
    "nvmlDeviceGetMarginTemperature": 1000,
    "nvmlDeviceGetMigMode": 540,
    "nvmlDeviceGetCurrPcieLinkWidth": 75,
    "nvmlDeviceGetMemoryInfo_v2": 12,
    "nvmlDeviceGetGpuFabricInfoV": 9,
    **dict.fromkeys(PROCESS_LISTS, 22),
}

# What an 8-GPU H100 node under a steady training job answers, in NVML's units. Slots differ where real ones would.
STEADY: dict[str, str] = {
    "name": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00.89.00.01",
    "links": str(LINKS),
    "gpm": "1",
    "nvmlDeviceGetClockInfo(SM)": "1755",
    "nvmlDeviceGetClockInfo(MEM)": "2619",
    "nvmlDeviceGetCurrentClocksEventReasons": "4",
    "FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP": "5000000000",
    "FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": "0",
    "FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": "0",
    "FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": "0",
    "FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST": "0",
    "FI_DEV_POWER_INSTANT": "642300",
    "nvmlDeviceGetEnforcedPowerLimit": "700000",
    "nvmlDeviceGetTotalEnergyConsumption": "987654321000",
    "nvmlDeviceGetTemperatureV(GPU)": "61",
    "FI_DEV_MEMORY_TEMP": "72",
    "nvmlDeviceGetMarginTemperature": "26",
    "nvmlDeviceGetUtilizationRates.gpu": "99",
    "nvmlDeviceGetUtilizationRates.memory": "55",
    "nvmlDeviceGetMemoryInfo_v2.used": "71000000000",
    "nvmlDeviceGetMemoryInfo_v2.total": "85520809984",
    "GPM_METRIC_GRAPHICS_UTIL": "98.75",
    "GPM_METRIC_SM_UTIL": "91.5",
    "GPM_METRIC_SM_OCCUPANCY": "37.5",
    "GPM_METRIC_ANY_TENSOR_UTIL": "48.25",
    "GPM_METRIC_DRAM_BW_UTIL": "52.5",
    "GPM_METRIC_FP64_UTIL": "0",
    "GPM_METRIC_FP32_UTIL": "9.75",
    "GPM_METRIC_FP16_UTIL": "4.5",
    "GPM_METRIC_PCIE_TX_PER_SEC": "1200",
    "GPM_METRIC_PCIE_RX_PER_SEC": "2400",
    "GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": "120000",
    "GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": "121000",
    "nvmlDeviceGetCurrPcieLinkGeneration": "5",
    "nvmlDeviceGetCurrPcieLinkWidth": "16",
    "nvmlDeviceGetPcieReplayCounter": "0",
    "nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,CORRECTED)": "0",
    "nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,UNCORRECTED)": "0",
    "nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,CORRECTED)": "3",
    "nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,UNCORRECTED)": "0",
    "nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded": "0",
    "nvmlDeviceGetRemappedRows[0]": "1",
    "nvmlDeviceGetRemappedRows[1]": "0",
    "nvmlDeviceGetRemappedRows[2]": "0",
    "nvmlDeviceGetRemappedRows[3]": "0",
    "nvmlDeviceGetRowRemapperHistogram.max": "2559",
    "nvmlDeviceGetRowRemapperHistogram.none": "0",
    "FI_DEV_GET_GPU_RECOVERY_ACTION": "0",
    "nvmlDeviceGetGpuFabricInfoV": "3",
    "nvmlDeviceGetComputeRunningProcesses": "1",
    "nvmlDeviceGetMPSComputeRunningProcesses": "0",
    "mig_mode": "0",
    "inforom_image": "G520.0200.00.05",
    "inforom_oem": "2.1",
    "inforom_ecc": "7.16",
    "part_number": "692-2G520-0200-000",
    "gsp_firmware": "580.95.05",
    "ecc_mode": "1",
    "ecc_mode_pending": "1",
    "sm_clock_max": "1980",
    "memory_clock_max": "2619",
    "memory_temp_max": "95",
    "fabric_clique": "0",
    "FI_DEV_POWER_MIN_LIMIT": "200000",
    "FI_DEV_POWER_MAX_LIMIT": "700000",
    "nvmlDeviceGetPowerManagementLimit": "700000",
    "nvmlDeviceGetPowerManagementDefaultLimit": "700000",
    "nvmlDeviceGetPersistenceMode": "1",
    "nvmlDeviceGetComputeMode": "0",
    "nvmlDeviceGetMaxPcieLinkGeneration": "5",
    "nvmlDeviceGetMaxPcieLinkWidth": "16",
}
# The same while it trains: LOW~HIGH/SECONDS/STEP and FIRST+PER_SECOND as `fake_nvml.c` reads them. How far and how fast
# they move is an assumption, after what DCGM shows of such jobs; errors and what is set stand still.
TRAINING: dict[str, str] = {
    "nvmlDeviceGetClockInfo(SM)": "1605~1905/1/15",
    "FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP": "5000000000+400000000",
    "FI_DEV_POWER_INSTANT": "560000~700000/0.5",
    "nvmlDeviceGetTotalEnergyConsumption": "987654321000+642300",
    "nvmlDeviceGetTemperatureV(GPU)": "57~66/20",
    "FI_DEV_MEMORY_TEMP": "68~77/30",
    "nvmlDeviceGetMarginTemperature": "21~30/20",
    "nvmlDeviceGetUtilizationRates.gpu": "95~101/1",
    "nvmlDeviceGetUtilizationRates.memory": "45~65/1",
    "nvmlDeviceGetMemoryInfo_v2.used": "71000000000~71400000000/30/2097152",
    "GPM_METRIC_GRAPHICS_UTIL": "95~100",
    "GPM_METRIC_SM_UTIL": "86~97",
    "GPM_METRIC_SM_OCCUPANCY": "32~42",
    "GPM_METRIC_ANY_TENSOR_UTIL": "40~56",
    "GPM_METRIC_DRAM_BW_UTIL": "45~60",
    "GPM_METRIC_FP32_UTIL": "7~12",
    "GPM_METRIC_FP16_UTIL": "3~6",
    "GPM_METRIC_PCIE_TX_PER_SEC": "600~1800",
    "GPM_METRIC_PCIE_RX_PER_SEC": "1500~3300",
    "GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": "90000~150000",
    "GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": "90000~150000",
}
PROFILE = "MIG 1g.10gb"  # of an instance, with an eighth of the memory
PER_LINK: dict[str, str] = {
    "nvmlDeviceGetNvLinkState": "1",
    "FI_DEV_NVLINK_ERROR_DL_CRC": "0",
    "FI_DEV_NVLINK_ERROR_DL_REPLAY": "0",
    "FI_DEV_NVLINK_ERROR_DL_RECOVERY": "0",
}


def build(folder: Path) -> Path:
    """Compile the stand-in; the library's path. The soname lets the loader take it for the real one."""
    library = folder / SONAME
    command = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared", f"-Wl,-soname,{SONAME}"]
    subprocess.run([*command, "-o", str(library), str(SOURCES / "fake_nvml.c"), "-lpthread"], check=True, timeout=120)
    return library


def load(library: Path) -> None:
    """Put the stand-in into this process, where pynvml's `CDLL("libnvidia-ml.so.1")` then finds it by its soname."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def forget(library: Path) -> None:
    """Who has it open in this process, in vain: the next start of NVML reads the script again."""
    ctypes.CDLL(str(library)).fakeNvmlForget()


def pci_of(gpu: int) -> str:
    """The address of a healthy GPU."""
    return f"0000:{0x1B + 0x10 * gpu:02x}:00.0"


class FakeNvml:
    """The script of one stand-in. Each method rewrites the file, atomically; within `batch()` once, at its end."""

    def __init__(self, script: Path, library: Path) -> None:
        self.script = script
        self.library = library
        self._lines: dict[tuple[str, ...], str] = {}
        self._xids: list[str] = []
        self._batched = False
        self._calls = script.with_name(script.name + ".calls")

    def env(self) -> dict[str, str]:
        """Environment of a process (a real `drover-agent`, say) that shall find this stand-in as its NVML."""
        inherited = os.environ.get("LD_LIBRARY_PATH")
        folders = [str(self.library.parent), *([inherited] if inherited else [])]
        return {"LD_LIBRARY_PATH": ":".join(folders), SCRIPT_VARIABLE: str(self.script)}

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Several changes that take effect together."""
        outer, self._batched = self._batched, True
        try:
            yield
        finally:
            self._batched = outer
            self._write()

    def healthy(self, gpus: int = 8, driver: str = "580.95.05") -> None:
        """`gpus` H100s at work, each with its own serial, UUID and PCI address."""
        with self.batch():
            self.system("devices", str(gpus))
            self.system("driver", driver)
            for gpu in range(gpus):
                self.set(gpu, "serial", f"16540230{gpu:05d}")
                self.set(gpu, "uuid", f"GPU-{gpu:08x}-0000-4000-8000-000000000000")
                self.set(gpu, "pci", pci_of(gpu))
                for key, value in STEADY.items():
                    self.set(gpu, key, value)
                for key, value in PER_LINK.items():
                    for link in range(LINKS):
                        self.set(gpu, f"{key}.{link}", value)

    def trains(self, gpus: int = 8) -> None:
        """Values of healthy GPUs that stand still otherwise move from now on."""
        with self.batch():
            for gpu in range(gpus):
                for key, value in TRAINING.items():
                    self.set(gpu, key, value)

    def system(self, key: str, value: str) -> None:
        """`devices`, `driver`, `nvml`, `cuda`, `fields`, `library`, `down` or `calls`."""
        self._put(key, value=value)

    def set(self, gpu: int, key: str, value: str | float) -> None:
        self._put("set", str(gpu), key, value=str(value))

    def unset(self, gpu: int, key: str) -> None:
        """The device does not have it any more: NOT_SUPPORTED."""
        self._take("set", str(gpu), key)

    def error(self, gpu: int, what: str, code: str) -> None:
        """`what`: a function or a key; `code`: say "NO_PERMISSION". Functions about no GPU are GPU 0's."""
        self._put("error", str(gpu), what, value=code)

    def no_error(self, gpu: int, what: str) -> None:
        self._take("error", str(gpu), what)

    def block(self, gpu: int, function: str) -> None:
        """The function does not return until `unblock`."""
        self._put("block", str(gpu), function)

    def unblock(self, gpu: int, function: str) -> None:
        self._take("block", str(gpu), function)

    def cost(self, gpu: int, function: str, sleep_us: int, spin_us: int = 0) -> None:
        self._put("cost", str(gpu), function, value=f"{sleep_us} {spin_us}")

    def costs(self, call_us: int = 140, list_us: int = 4500, *, spin: bool = False) -> None:
        """What each driver call costs on every GPU: time asleep, or busy with `spin`."""

        def put(function: str, us: int) -> None:
            self._put("cost", "*", function, value=f"0 {us}" if spin else f"{us} 0")

        with self.batch():
            self._forget_costs()
            put("*", call_us)
            for function in PROCESS_LISTS:
                put(function, list_us)
            for function in IN_THE_LIBRARY:
                put(function, 0)

    def costs_of_h100(self) -> None:
        """What each call costs on a real H100 (`H100_US`), as CPU time of the caller."""
        with self.batch():
            self._forget_costs()
            for function in {*H100_US, *IN_THE_LIBRARY}:
                self._put("cost", "*", function, value=f"0 {H100_US.get(function, 0)}")

    def _forget_costs(self) -> None:
        for statement in [statement for statement in self._lines if statement[:2] == ("cost", "*")]:
            self._take(*statement)

    def count_calls(self, path: Path) -> None:
        """Count from now on. The path is at most 91 characters long."""
        path.write_bytes(bytes(_CALLS.size * _CALL_FILE))
        self._calls = path
        self.system("calls", str(path))

    def calls(self) -> dict[str, int]:
        """Calls of each function since `count_calls`, of all processes."""
        found = _CALLS.iter_unpack(self._calls.read_bytes())
        return {name.rstrip(b"\0").decode(): count for name, count, _ in found if name[0]}

    def driver_calls(self) -> int:
        """How many calls into the driver those were: see the module's docstring."""
        found = _CALLS.iter_unpack(self._calls.read_bytes())
        return sum(count for name, _, count in found if name.rstrip(b"\0").decode() not in IN_THE_LIBRARY)

    def down(self, code: str = "DRIVER_NOT_LOADED") -> None:
        """No call works any more, nor does nvmlInit."""
        self.system("down", code)

    def up(self) -> None:
        self._take("down")

    def mig(self, gpu: int, places: Iterable[int], *, fresh: str = "0") -> None:
        """MIG mode with an instance at each of these places (0 to 6); `fresh` makes other UUIDs, as recreating does."""
        with self.batch():
            self.no_mig(gpu)
            self.set(gpu, "mig_mode", 1)
            for place in places:
                self.set(gpu, f"mig.{place}.uuid", f"MIG-{gpu:04x}{place:02x}{fresh:0>2}-0000-5000-8000-000000000000")
                self.set(gpu, f"mig.{place}.gi", place + 7)
                self.set(gpu, f"mig.{place}.name", f"{STEADY['name']} {PROFILE}")
                self.set(gpu, f"mig.{place}.nvmlDeviceGetMemoryInfo_v2.total", 10_468_982_784)
                self.set(gpu, f"mig.{place}.nvmlDeviceGetMemoryInfo_v2.used", 1_000_000_000 * (place + 1))
                self.set(gpu, f"mig.{place}.nvmlDeviceGetComputeRunningProcesses", place)
                self.set(gpu, f"mig.{place}.GPM_METRIC_GRAPHICS_UTIL", 10 * (place + 1) + 5)
                self.set(gpu, f"mig.{place}.GPM_METRIC_SM_UTIL", 10 * (place + 1))

    def no_mig(self, gpu: int) -> None:
        """MIG mode off."""
        with self.batch():
            for statement in [s for s in self._lines if s[:2] == ("set", str(gpu)) and s[2].startswith("mig.")]:
                self._take(*statement)
            self.set(gpu, "mig_mode", 0)

    def hold(self, gpu: int, pid: int | None = None) -> None:
        """This process of the machine has a compute context on the GPU; without one, none has, nor memory on it."""
        with self.batch():
            self.set(gpu, "nvmlDeviceGetComputeRunningProcesses", int(pid is not None))
            self.set(gpu, "nvmlDeviceGetMPSComputeRunningProcesses", 0)
            if pid is None:
                self.set(gpu, "nvmlDeviceGetMemoryInfo_v2.used", 1 << 20)
            else:
                self.set(gpu, "first_pid", pid)

    def lose(self, gpu: int) -> None:
        self._put("lost", str(gpu))

    def recover(self, gpu: int) -> None:
        self._take("lost", str(gpu))

    def vanish(self, gpu: int) -> None:
        """Lost, and not found by the next nvmlInit: the slots behind it move up by one."""
        self._put("gone", str(gpu))

    def xid(self, gpu: int, code: int) -> None:
        self._xids.append(f"xid {len(self._xids) + 1} {gpu} {code}")
        self._write()

    def _put(self, *statement: str, value: str = "") -> None:
        self._lines.pop(statement, None)  # later lines win, so it goes to the end
        self._lines[statement] = " ".join([*statement, value]).strip()
        self._write()

    def _take(self, *statement: str) -> None:
        del self._lines[statement]
        self._write()

    def _write(self) -> None:
        if self._batched:
            return
        fresh = self.script.with_name(self.script.name + ".new")
        fresh.write_text("\n".join([*self._lines.values(), *self._xids]) + "\n")
        fresh.replace(self.script)
