"""One row for each XID code: the NVIDIA XID catalog in our own words, with Drover's default severity.

Source of code, mnemonic, GPU families and actions: NVIDIA XID catalog,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (codes 1 to 172).

Severity follows the immediate action that NVIDIA asks for. A reset or reboot is critical. Without one, it is info if
the follow-up points at the application, else a warning. Codes without an action are rated by their meaning. A policy
may rate any code differently.

The catalog does not describe the codes that no data-centre GPU uses; their sentence is from the mnemonic.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from drover_core.model.kinds import Severity
from drover_core.xid.actions import XidAction


class XidCategory(StrEnum):
    """The part of the system that an XID is about."""

    APPLICATION = "application"
    ENGINE = "engine"
    MEMORY = "memory"
    NVLINK = "nvlink"
    PCIE = "pcie"
    GSP = "gsp"
    FIRMWARE = "firmware"
    POWER_THERMAL = "power_thermal"
    DRIVER = "driver"
    SECURITY = "security"
    DISPLAY = "display"
    INFORMATIONAL = "informational"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Xid:
    """What one XID code means and what NVIDIA says to do about it.

    `hardware` is True if the code points at hardware, False if it points at software or its user, None if it does not
    decide. `used_on` names GPU families: "h100" includes H200, "b100" includes B200 and B300.
    """

    code: int
    severity: Severity
    hardware: bool | None
    category: XidCategory
    used_on: frozenset[str]
    action: XidAction
    followup: XidAction
    mnemonic: str
    meaning: str

    @property
    def in_use(self) -> bool:
        """Whether a data-centre GPU since A100 can raise this code."""
        return bool(self.used_on)


_x = Xid
_C = XidCategory
_A = XidAction

INFO = Severity.INFO
WARN = Severity.WARNING
CRIT = Severity.CRITICAL

HARD: Final = True
SOFT: Final = False
OPEN: Final = None

ALL = frozenset({"a100", "h100", "b100", "gb200"})
NONE: frozenset[str] = frozenset()
A100 = frozenset({"a100"})
H100 = frozenset({"h100"})
GB200 = frozenset({"gb200"})
TO_H100 = A100 | H100
TO_B100 = ALL - GB200
H100_UP = ALL - A100
B100_UP = H100_UP - H100

# Two lines a row, in columns that a formatter would spread over nine.
# fmt: off
ROWS: tuple[Xid, ...] = (
    _x(1, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_FIFO_METHOD",
       "Not used on data-centre GPUs: a command reached the GPU's queue in a form it did not accept."),
    _x(2, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_SW_METHOD",
       "Not used on data-centre GPUs: the driver did not know a software command in the GPU's queue."),
    _x(3, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_UNK_METHOD",
       "Not used on data-centre GPUs: the GPU's queue held a command that nobody knows."),
    _x(4, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_CHANNEL_BUSY",
       "Not used on data-centre GPUs: a GPU channel stayed busy when it should have been free."),
    _x(5, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_RUNOUT_OVERFLOW",
       "Not used on data-centre GPUs: the GPU's command queue ran over."),
    _x(6, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_PARSE_ERR",
       "Not used on data-centre GPUs: the GPU could not parse its command queue."),
    _x(7, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_PTE_ERR",
       "Not used on data-centre GPUs: the command queue pointed at memory that was not mapped."),
    _x(8, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT",
       "A GPU channel stood still for too long and was stopped."),
    _x(9, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_GR_ERROR_INSTANCE",
       "Not used on data-centre GPUs: a graphics object on the GPU was not valid."),
    _x(10, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_GR_ERROR_SINGLE_STEP",
       "Not used on data-centre GPUs: the graphics engine stopped for single-stepping."),
    _x(11, INFO, SOFT, _C.APPLICATION, ALL, _A.RESTART_APP, _A.CHECK_APP, "ROBUST_CHANNEL_GR_ERROR_MISSING_HW",
       "A program asked for a unit that this GPU does not have; its command stream was wrong."),
    _x(12, INFO, OPEN, _C.DRIVER, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_GR_ERROR_SW_METHOD",
       "Not used on data-centre GPUs: the driver did not know a software command for the graphics engine."),
    _x(13, INFO, SOFT, _C.APPLICATION, ALL, _A.RESTART_APP, _A.WORKFLOW_XID_13,
       "ROBUST_CHANNEL_GR_EXCEPTION / ROBUST_CHANNEL_GR_ERROR_SW_NOTIFY",
       "A program did something illegal on the GPU, mostly an out-of-bounds access."),
    _x(14, INFO, SOFT, _C.INFORMATIONAL, ALL, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_FAKE_ERROR",
       "A made-up error, injected from user space for a test."),
    _x(15, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_SCANLINE_TIMEOUT",
       "Not used on data-centre GPUs: the display waited too long for a scan line."),
    _x(16, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.CONTACT_SUPPORT,
       "ROBUST_CHANNEL_VBLANK_CALLBACK_TIMEOUT",
       "Not used on data-centre GPUs: the display's refresh signal did not come in time."),
    _x(17, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_PARAMETER_ERROR",
       "Not used on data-centre GPUs: a command carried a bad parameter."),
    _x(18, INFO, OPEN, _C.PCIE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_BUS_MASTER_TIMEOUT_ERROR",
       "Not used on data-centre GPUs: the GPU was not allowed to start transfers on the PCIe bus."),
    _x(19, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_DISP_MISSED_NOTIFIER",
       "Not used on data-centre GPUs: the display missed a notification."),
    _x(20, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_MPEG_ERROR_SW_METHOD",
       "Not used on data-centre GPUs: the driver did not know a command for the MPEG decoder."),
    _x(21, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_ME_ERROR_SW_METHOD",
       "Not used on data-centre GPUs: the driver did not know a command for the motion estimation unit."),
    _x(22, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_VP_ERROR_SW_METHOD",
       "Not used on data-centre GPUs: the driver did not know a command for the video processor."),
    _x(23, INFO, OPEN, _C.INFORMATIONAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_RC_LOGGING_ENABLED",
       "Not used on data-centre GPUs: logging of channel errors was switched on."),
    _x(24, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_GR_SEMAPHORE_TIMEOUT",
       "Not used on data-centre GPUs: a program waited too long for a semaphore on the graphics engine."),
    _x(25, INFO, SOFT, _C.APPLICATION, ALL, _A.RESTART_APP, _A.CHECK_APP, "ROBUST_CHANNEL_GR_ILLEGAL_NOTIFY",
       "A program's command stream held an illegal notification."),
    _x(26, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_FIFO_ERROR_FBISTATE_TIMEOUT",
       "Not used on data-centre GPUs: the GPU's memory interface did not settle in time."),
    _x(27, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_VP_ERROR",
       "Not used on data-centre GPUs: the video processor failed."),
    _x(28, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_VP2_ERROR",
       "Not used on data-centre GPUs: the second video processor failed."),
    _x(29, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_BSP_ERROR",
       "Not used on data-centre GPUs: the bitstream processor failed."),
    _x(30, INFO, OPEN, _C.APPLICATION, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_BAD_ADDR_ACCESS",
       "Not used on data-centre GPUs: the GPU accessed a bad address."),
    _x(31, INFO, SOFT, _C.APPLICATION, ALL, _A.RESTART_APP, _A.WORKFLOW_XID_31, "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT",
       "A program touched GPU memory that it does not own (page fault)."),
    _x(32, WARN, OPEN, _C.PCIE, ALL, _A.RESTART_APP, _A.CHECK_APP, "ROBUST_CHANNEL_PBDMA_ERROR",
       "The commands fetched by the GPU were corrupt, often a PCIe signal problem rather than the program."),
    _x(33, INFO, OPEN, _C.SECURITY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_SEC_ERROR",
       "Not used on data-centre GPUs: the security engine failed."),
    _x(34, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_MSVLD_ERROR",
       "Not used on data-centre GPUs: the video stream decoder failed."),
    _x(35, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_MSPDEC_ERROR",
       "Not used on data-centre GPUs: the video picture decoder failed."),
    _x(36, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_MSPPP_ERROR",
       "Not used on data-centre GPUs: the video post-processor failed."),
    _x(37, INFO, SOFT, _C.DRIVER, ALL, _A.IGNORE, _A.CHECK_APP, "ROBUST_CHANNEL_FECS_ERR_UNIMP_FIRMWARE_METHOD",
       "The graphics firmware got a command that it does not know."),
    _x(38, WARN, OPEN, _C.FIRMWARE, ALL, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_FECS_ERR_WATCHDOG_TIMEOUT",
       "The graphics firmware did not answer in time."),
    _x(39, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE0_ERROR",
       "Copy engine 0 failed during a memory transfer; the program that used it was stopped."),
    _x(40, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE1_ERROR",
       "Copy engine 1 failed during a memory transfer; the program that used it was stopped."),
    _x(41, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE2_ERROR",
       "Copy engine 2 failed during a memory transfer; the program that used it was stopped."),
    _x(42, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_VIC_ERROR",
       "Not used on data-centre GPUs: the video image compositor failed."),
    _x(43, INFO, SOFT, _C.APPLICATION, ALL, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR",
       "A program hit a fault of its own and was ended; the GPU is healthy."),
    _x(44, WARN, OPEN, _C.ENGINE, ALL, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW",
       "The graphics engine faulted while it switched between programs."),
    _x(45, INFO, SOFT, _C.APPLICATION, ALL, _A.WORKFLOW_XID_45, _A.WORKFLOW_XID_45, "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL",
       "A program was cleaned off the GPU, because it was killed or because another error came first."),
    _x(46, CRIT, OPEN, _C.ENGINE, ALL, _A.RESET_GPU, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_GPU_TIMEOUT_ERROR",
       "The GPU stopped answering and needs a reset."),
    _x(47, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_NVENC0_ERROR",
       "Not used on data-centre GPUs: video encoder 0 failed."),
    _x(48, CRIT, HARD, _C.MEMORY, ALL, _A.WORKFLOW_XID_48, _A.WORKFLOW_XID_48, "ROBUST_CHANNEL_GPU_ECC_DBE",
       "The GPU's memory or caches returned data with an error that ECC could not correct."),
    _x(49, INFO, OPEN, _C.POWER_THERMAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN,
       "SILENT_RUNNING_CONSTANT_LEVEL_SET_BY_REGISTRY",
       "Not used on data-centre GPUs: the quiet mode of the GPU was fixed by a setting."),
    _x(50, INFO, OPEN, _C.POWER_THERMAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN,
       "SILENT_RUNNING_LEVEL_TRANSITION_DUE_TO_RC_ERROR",
       "Not used on data-centre GPUs: the quiet mode of the GPU changed after a channel error."),
    _x(51, INFO, OPEN, _C.POWER_THERMAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "SILENT_RUNNING_STRESS_TEST_FAILURE",
       "Not used on data-centre GPUs: a stress test of the quiet mode failed."),
    _x(52, INFO, OPEN, _C.POWER_THERMAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN,
       "SILENT_RUNNING_LEVEL_TRANS_DUE_TO_TEMP_RISE",
       "Not used on data-centre GPUs: the quiet mode of the GPU changed because it got warmer."),
    _x(53, INFO, OPEN, _C.POWER_THERMAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "SILENT_RUNNING_TEMP_REDUCED_CLOCKING",
       "Not used on data-centre GPUs: the GPU lowered its clocks because it was hot."),
    _x(54, WARN, HARD, _C.POWER_THERMAL, TO_B100, _A.CHECK_MECHANICALS, _A.CONTACT_SUPPORT,
       "SILENT_RUNNING_PWR_REDUCED_CLOCKING",
       "The GPU board lacks its extra power supply and runs at reduced clocks."),
    _x(55, INFO, OPEN, _C.POWER_THERMAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "SILENT_RUNNING_TEMPERATURE_READ_ERROR",
       "Not used on data-centre GPUs: the GPU could not read its temperature."),
    _x(56, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "DISPLAY_CHANNEL_EXCEPTION",
       "Not used on data-centre GPUs: the display engine failed."),
    _x(57, WARN, HARD, _C.MEMORY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "FB_LINK_TRAINING_FAILURE_ERROR",
       "Not used on data-centre GPUs: the connection to the GPU's memory could not be set up."),
    _x(58, WARN, HARD, _C.MEMORY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "FB_MEMORY_ERROR",
       "Not used on data-centre GPUs: the GPU's memory had an error."),
    _x(59, WARN, OPEN, _C.FIRMWARE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "PMU_ERROR",
       "Not used on data-centre GPUs: the GPU's power controller had an error."),
    _x(60, WARN, OPEN, _C.FIRMWARE, ALL, _A.RESTART_APP, _A.INVESTIGATE_SOFTWARE, "ROBUST_CHANNEL_SEC2_ERROR",
       "The GPU's security processor failed in a video or protected workload."),
    _x(61, WARN, OPEN, _C.FIRMWARE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "PMU_BREAKPOINT",
       "Not used on data-centre GPUs: the GPU's power controller stopped at a breakpoint, an internal firmware fault."),
    _x(62, CRIT, OPEN, _C.FIRMWARE, ALL, _A.RESET_GPU, _A.CONTACT_SUPPORT, "PMU_HALT_ERROR",
       "The GPU's power controller halted; the GPU needs a reset."),
    _x(63, INFO, HARD, _C.MEMORY, ALL, _A.IGNORE, _A.IGNORE, "INFOROM_DRAM_RETIREMENT_EVENT",
       "The GPU replaced a bad memory row or page; it takes effect at the next reset."),
    _x(64, CRIT, HARD, _C.MEMORY, ALL, _A.RESET_GPU, _A.CONTACT_SUPPORT, "INFOROM_DRAM_RETIREMENT_FAILURE",
       "The GPU could not replace a bad memory row or page; the bad memory is still in use."),
    _x(65, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_NVENC1_ERROR",
       "Not used on data-centre GPUs: video encoder 1 failed."),
    _x(66, INFO, SOFT, _C.DRIVER, ALL, _A.IGNORE, _A.INVESTIGATE_SOFTWARE,
       "ROBUST_CHANNEL_FECS_ERR_REG_ACCESS_VIOLATION",
       "The graphics firmware refused a register access by the driver or a program."),
    _x(67, WARN, OPEN, _C.DRIVER, ALL, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_FECS_ERR_VERIF_VIOLATION",
       "The graphics firmware found an illegal request by the driver."),
    _x(68, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC0_ERROR",
       "Video decoder 0 failed; the program that used it was stopped."),
    _x(69, INFO, SOFT, _C.APPLICATION, ALL, _A.RESTART_APP, _A.CHECK_APP, "ROBUST_CHANNEL_GR_CLASS_ERROR",
       "A program sent the graphics engine a command that its class does not allow."),
    _x(70, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE3_ERROR",
       "Copy engine 3 failed during a memory transfer; the program that used it was stopped."),
    _x(71, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE4_ERROR",
       "Copy engine 4 failed during a memory transfer; the program that used it was stopped."),
    _x(72, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE5_ERROR",
       "Copy engine 5 failed during a memory transfer; the program that used it was stopped."),
    _x(73, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_NVENC2_ERROR",
       "Not used on data-centre GPUs: video encoder 2 failed."),
    _x(74, CRIT, HARD, _C.NVLINK, TO_H100, _A.WORKFLOW_NVLINK, _A.CONTACT_SUPPORT, "NVLINK_ERROR",
       "An NVLink of this GPU failed; the fault may be here, in the link or at the far end."),
    _x(75, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE6_ERROR",
       "Copy engine 6 failed during a memory transfer; the program that used it was stopped."),
    _x(76, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE7_ERROR",
       "Copy engine 7 failed during a memory transfer; the program that used it was stopped."),
    _x(77, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE8_ERROR",
       "Copy engine 8 failed during a memory transfer; the program that used it was stopped."),
    _x(78, WARN, SOFT, _C.DRIVER, ALL, _A.UPDATE_SOFTWARE, _A.UPDATE_SOFTWARE, "VGPU_START_ERROR",
       "A virtual GPU could not start because guest and host software do not fit."),
    _x(79, CRIT, HARD, _C.PCIE, ALL, _A.RESTART_NODE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS",
       "The GPU no longer answers on PCIe (fallen off the bus); only a reboot can bring it back."),
    _x(80, WARN, OPEN, _C.PCIE, TO_H100, _A.RESTART_APP, _A.CHECK_APP, "PBDMA_PUSHBUFFER_CRC_MISMATCH",
       "Commands reached the GPU corrupted."),
    _x(81, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_VGA_SUBSYSTEM_ERROR",
       "Not used on data-centre GPUs: the VGA part of the GPU failed."),
    _x(82, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG0_ERROR",
       "JPEG decoder 0 failed; the program that used it was stopped."),
    _x(83, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC1_ERROR",
       "Video decoder 1 failed; the program that used it was stopped."),
    _x(84, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC2_ERROR",
       "Video decoder 2 failed; the program that used it was stopped."),
    _x(85, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE9_ERROR",
       "Copy engine 9 failed during a memory transfer; the program that used it was stopped."),
    _x(86, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_OFA0_ERROR",
       "Optical flow engine 0 failed; the program that used it was stopped."),
    _x(87, INFO, OPEN, _C.INFORMATIONAL, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "NVTELEMETRY_DRIVER_REPORT",
       "Not used on data-centre GPUs: the driver wrote a telemetry report."),
    _x(88, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC3_ERROR",
       "Video decoder 3 failed; the program that used it was stopped."),
    _x(89, WARN, OPEN, _C.ENGINE, ALL, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC4_ERROR",
       "Video decoder 4 failed; the program that used it was stopped."),
    _x(90, WARN, HARD, _C.MEMORY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "LTC_ERROR",
       "Not used on data-centre GPUs: the GPU's level 2 cache had an error."),
    _x(91, INFO, OPEN, _C.UNUSED, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "RESERVED_XID",
       "Not used on data-centre GPUs: reserved, without a meaning."),
    _x(92, WARN, HARD, _C.MEMORY, ALL, _A.IGNORE, _A.CONTACT_SUPPORT, "EXCESSIVE_SBE_INTERRUPTS",
       "Corrected memory errors come unusually often; nothing was lost yet."),
    _x(93, WARN, SOFT, _C.FIRMWARE, A100, _A.IGNORE, _A.CONTACT_SUPPORT, "INFOROM_ERASE_LIMIT_EXCEEDED",
       "The GPU's settings memory may not be written any more: its wear limit is reached or was set on purpose."),
    _x(94, WARN, HARD, _C.MEMORY, ALL, _A.RESTART_APP, _A.SYMPATHETIC, "ROBUST_CHANNEL_CONTAINED_ERROR",
       "An uncorrectable memory error was contained: only the program that read it was stopped."),
    _x(95, CRIT, HARD, _C.MEMORY, ALL, _A.RESET_GPU, _A.SYMPATHETIC, "ROBUST_CHANNEL_UNCONTAINED_ERROR",
       "An uncorrectable memory error could not be contained: every program on the GPU is affected."),
    _x(96, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC5_ERROR",
       "Video decoder 5 failed; the program that used it was stopped."),
    _x(97, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC6_ERROR",
       "Video decoder 6 failed; the program that used it was stopped."),
    _x(98, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVDEC7_ERROR",
       "Video decoder 7 failed; the program that used it was stopped."),
    _x(99, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG1_ERROR",
       "JPEG decoder 1 failed; the program that used it was stopped."),
    _x(100, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG2_ERROR",
       "JPEG decoder 2 failed; the program that used it was stopped."),
    _x(101, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG3_ERROR",
       "JPEG decoder 3 failed; the program that used it was stopped."),
    _x(102, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG4_ERROR",
       "JPEG decoder 4 failed; the program that used it was stopped."),
    _x(103, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG5_ERROR",
       "JPEG decoder 5 failed; the program that used it was stopped."),
    _x(104, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG6_ERROR",
       "JPEG decoder 6 failed; the program that used it was stopped."),
    _x(105, WARN, OPEN, _C.ENGINE, H100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_NVJPG7_ERROR",
       "JPEG decoder 7 failed; the program that used it was stopped."),
    _x(106, INFO, SOFT, _C.INFORMATIONAL, ALL, _A.IGNORE, _A.IGNORE, "SMBPBI_TEST_MESSAGE",
       "A test message of the management interface."),
    _x(107, INFO, SOFT, _C.INFORMATIONAL, ALL, _A.IGNORE, _A.IGNORE, "SMBPBI_TEST_MESSAGE_SILENT",
       "A silent test message of the management interface."),
    _x(108, INFO, SOFT, _C.APPLICATION, ALL, _A.IGNORE, _A.WORKFLOW_XID_137, "NVLINK_REMOTE_TRANSLATION_ERROR",
       "A peer's access over NVLink could not be translated; hardly used, read it like 137."),
    _x(109, CRIT, OPEN, _C.ENGINE, ALL, _A.RESET_GPU, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR",
       "The GPU could not switch between programs in time and needs a reset."),
    _x(110, CRIT, HARD, _C.SECURITY, H100_UP, _A.RESET_GPU, _A.INVESTIGATE_SOFTWARE, "SEC_FAULT_ERROR",
       "The GPU reported a security fault, rare without failing hardware."),
    _x(111, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "BUNDLE_ERROR_EVENT",
       "Not used on data-centre GPUs: a bundle of graphics state had an error."),
    _x(112, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "DISP_SUPERVISOR_ERROR",
       "Not used on data-centre GPUs: the display supervisor failed."),
    _x(113, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "DP_LT_FAILURE",
       "Not used on data-centre GPUs: a DisplayPort link could not be set up."),
    _x(114, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "HEAD_RG_UNDERFLOW",
       "Not used on data-centre GPUs: a display ran out of picture data."),
    _x(115, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "CORE_CHANNEL_REGS",
       "Not used on data-centre GPUs: the display's core channel had a bad register."),
    _x(116, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "WINDOW_CHANNEL_REGS",
       "Not used on data-centre GPUs: a display window had a bad register."),
    _x(117, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "CURSOR_CHANNEL_REGS",
       "Not used on data-centre GPUs: the display cursor had a bad register."),
    _x(118, INFO, OPEN, _C.DISPLAY, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "HEAD_REGS",
       "Not used on data-centre GPUs: a display head had a bad register."),
    _x(119, CRIT, OPEN, _C.GSP, ALL, _A.RESET_GPU, _A.INVESTIGATE_SOFTWARE, "GSP_RPC_TIMEOUT",
       "The GPU's system processor (GSP) did not answer the driver in time; the GPU needs a reset."),
    _x(120, CRIT, OPEN, _C.GSP, ALL, _A.RESET_GPU, _A.INVESTIGATE_SOFTWARE, "GSP_ERROR",
       "The firmware on the GPU's system processor (GSP) failed; the GPU needs a reset."),
    _x(121, INFO, HARD, _C.NVLINK, GB200, _A.IGNORE, _A.CONTACT_SUPPORT, "C2C_ERROR",
       "The link between GPU and Grace CPU corrected errors; a reset at a quiet time retrains it."),
    _x(122, WARN, HARD, _C.FIRMWARE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "SPI_PMU_RPC_READ_FAIL",
       "Not used on data-centre GPUs: the GPU's power controller could not read its flash memory."),
    _x(123, WARN, HARD, _C.FIRMWARE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "SPI_PMU_RPC_WRITE_FAIL",
       "Not used on data-centre GPUs: the GPU's power controller could not write its flash memory."),
    _x(124, WARN, HARD, _C.FIRMWARE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "SPI_PMU_RPC_ERASE_FAIL",
       "Not used on data-centre GPUs: the GPU's power controller could not erase its flash memory."),
    _x(125, WARN, HARD, _C.FIRMWARE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "INFOROM_FS_ERROR",
       "Not used on data-centre GPUs: the file system of the GPU's settings memory is damaged."),
    _x(126, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE10_ERROR",
       "Copy engine 10 failed during a memory transfer; the program that used it was stopped."),
    _x(127, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE11_ERROR",
       "Copy engine 11 failed during a memory transfer; the program that used it was stopped."),
    _x(128, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE12_ERROR",
       "Copy engine 12 failed during a memory transfer; the program that used it was stopped."),
    _x(129, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE13_ERROR",
       "Copy engine 13 failed during a memory transfer; the program that used it was stopped."),
    _x(130, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE14_ERROR",
       "Copy engine 14 failed during a memory transfer; the program that used it was stopped."),
    _x(131, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE15_ERROR",
       "Copy engine 15 failed during a memory transfer; the program that used it was stopped."),
    _x(132, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE16_ERROR",
       "Copy engine 16 failed during a memory transfer; the program that used it was stopped."),
    _x(133, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE17_ERROR",
       "Copy engine 17 failed during a memory transfer; the program that used it was stopped."),
    _x(134, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE18_ERROR",
       "Copy engine 18 failed during a memory transfer; the program that used it was stopped."),
    _x(135, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_CE19_ERROR",
       "Copy engine 19 failed during a memory transfer; the program that used it was stopped."),
    _x(136, CRIT, HARD, _C.NVLINK, H100, _A.RESET_GPU, _A.INVESTIGATE_SIGNAL, "ALI_TRAINING_FAIL",
       "An NVLink could not be brought up (training failed)."),
    _x(137, INFO, SOFT, _C.APPLICATION, ALL, _A.IGNORE, _A.WORKFLOW_XID_137, "NVLINK_PRIV_ERR",
       "A program made an illegal access to another GPU over NVLink."),
    _x(138, INFO, OPEN, _C.ENGINE, NONE, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_DLA_ERROR",
       "Not used on data-centre GPUs: the deep-learning accelerator failed."),
    _x(139, WARN, OPEN, _C.ENGINE, B100_UP, _A.RESTART_APP, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_OFA1_ERROR",
       "Optical flow engine 1 failed; the program that used it was stopped."),
    _x(140, CRIT, HARD, _C.MEMORY, ALL, _A.RESET_GPU, _A.CONTACT_SUPPORT, "UNRECOVERABLE_ECC_ERROR_ESCAPE",
       "An uncorrectable memory error came before the driver could put the bad memory aside."),
    _x(141, WARN, OPEN, _C.DRIVER, H100_UP, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_FAST_PATH_ERROR",
       "The fast path by which CUDA hands work to the GPU failed."),
    _x(142, WARN, OPEN, _C.ENGINE, GB200, _A.CONTACT_SUPPORT, _A.UNKNOWN, "ROBUST_CHANNEL_NVENC3_ERROR",
       "Video encoder 3 failed."),
    _x(143, CRIT, OPEN, _C.FIRMWARE, H100_UP, _A.RESET_GPU, _A.CONTACT_SUPPORT, "GPU_INIT_ERROR",
       "The GPU could not be initialised."),
    _x(144, WARN, OPEN, _C.NVLINK, B100_UP, _A.WORKFLOW_NVLINK5, _A.WORKFLOW_NVLINK5, "NVLINK_SAW_ERROR",
       "NVLink 5: the SAW unit of the GPU's links had an error; decode the line."),
    _x(145, WARN, OPEN, _C.NVLINK, B100_UP, _A.WORKFLOW_NVLINK5, _A.WORKFLOW_NVLINK5, "NVLINK_RLW_ERROR",
       "NVLink 5: the RLW unit of a link (remapping and tracking of requests) had an error; decode the line."),
    _x(146, WARN, OPEN, _C.NVLINK, B100_UP, _A.WORKFLOW_NVLINK5, _A.WORKFLOW_NVLINK5, "NVLINK_TLW_ERROR",
       "NVLink 5: the TLW unit of a link (receive and transmit pipes) had an error; decode the line."),
    _x(147, WARN, OPEN, _C.NVLINK, B100_UP, _A.WORKFLOW_NVLINK5, _A.WORKFLOW_NVLINK5, "NVLINK_TREX_ERROR",
       "NVLink 5: the TREX unit of a link had an error; decode the line."),
    _x(148, WARN, OPEN, _C.NVLINK, B100_UP, _A.WORKFLOW_NVLINK5, _A.WORKFLOW_NVLINK5, "NVLINK_NVLPW_CTRL_ERROR",
       "NVLink 5: the NVLPW unit of a link had an error; decode the line."),
    _x(149, WARN, OPEN, _C.NVLINK, B100_UP, _A.WORKFLOW_NVLINK5, _A.WORKFLOW_NVLINK5, "NVLINK_NETIR_ERROR",
       "NVLink 5: a link went down or loses quality (reported by its NETIR unit); decode the line."),
    _x(150, WARN, OPEN, _C.NVLINK, B100_UP, _A.WORKFLOW_NVLINK5, _A.WORKFLOW_NVLINK5, "NVLINK_MSE_ERROR",
       "NVLink 5: the firmware of the links' management unit (MSE) failed; decode the line."),
    _x(151, CRIT, SOFT, _C.SECURITY, H100_UP, _A.RESTART_VM, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_KEY_ROTATION_ERROR",
       "Confidential computing could not change its encryption key; the virtual machine must restart."),
    _x(152, INFO, SOFT, _C.DRIVER, NONE, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_DLA_SMMU_ERROR",
       "The memory unit of the deep-learning accelerator faulted; not on data-centre GPUs."),
    _x(153, INFO, SOFT, _C.ENGINE, NONE, _A.IGNORE, _A.CONTACT_SUPPORT, "ROBUST_CHANNEL_DLA_TIMEOUT",
       "The deep-learning accelerator timed out; not on data-centre GPUs."),
    _x(154, WARN, OPEN, _C.INFORMATIONAL, ALL, _A.FOLLOW_XID_154, _A.INFORMATIONAL, "GPU_RECOVERY_ACTION_CHANGED",
       "The driver's advice for this GPU changed; the text names it (none, drain, GPU reset, node reboot)."),
    _x(155, CRIT, SOFT, _C.NVLINK, B100_UP, _A.RESET_GPU, _A.INVESTIGATE_USER, "NVLINK_SW_DEFINED_ERROR",
       "Software took an NVLink down, on purpose or by mistake; the GPU needs a reset to use it again."),
    _x(156, CRIT, HARD, _C.MEMORY, H100_UP, _A.RESET_GPU, _A.IGNORE, "RESOURCE_RETIREMENT_EVENT",
       "The GPU put a faulty part of itself aside; the repair takes effect at the reset."),
    _x(157, WARN, HARD, _C.MEMORY, H100_UP, _A.IGNORE, _A.CONTACT_SUPPORT, "RESOURCE_RETIREMENT_FAILURE",
       "The GPU has no spares left to repair itself; it works, but the same error may return."),
    _x(158, CRIT, OPEN, _C.ENGINE, ALL, _A.RESET_GPU, _A.CONTACT_SUPPORT, "GPU_FATAL_TIMEOUT",
       "A fatal time-out inside the GPU; it needs a reset."),
    _x(159, WARN, OPEN, _C.NVLINK, B100_UP, _A.CHECK_UVM, _A.REPORT_IF_ALONE, "ROBUST_CHANNEL_CHI_NON_DATA_ERROR",
       "An error on the coherent link between GPU and CPU; it matters when unified memory or vGPU is used."),
    _x(160, WARN, OPEN, _C.MEMORY, B100_UP, _A.IGNORE, _A.INVESTIGATE_SOFTWARE, "CHANNEL_RETIREMENT_EVENT",
       "The GPU put a faulty channel aside and works on."),
    _x(161, WARN, OPEN, _C.MEMORY, B100_UP, _A.IGNORE, _A.INVESTIGATE_SOFTWARE, "CHANNEL_RETIREMENT_FAILURE",
       "The GPU could not put a faulty channel aside."),
    _x(162, INFO, OPEN, _C.POWER_THERMAL, B100_UP, _A.UNKNOWN, _A.UNKNOWN, "PSHC_REENGAGED",
       "The GPU's power smoothing works again."),
    _x(163, WARN, OPEN, _C.POWER_THERMAL, B100_UP, _A.UNKNOWN, _A.UNKNOWN, "PSHC_DISENGAGED",
       "The GPU's power smoothing switched itself off, because of heat or a time-out; no reset is needed."),
    _x(164, WARN, HARD, _C.POWER_THERMAL, B100_UP, _A.UNKNOWN, _A.UNKNOWN, "PSHC_LOW_LIFETIME",
       "The GPU's power smoothing circuit is nearly worn out; plan a replacement if it is needed."),
    _x(165, WARN, HARD, _C.POWER_THERMAL, B100_UP, _A.UNKNOWN, _A.UNKNOWN, "PSHC_ZERO_LIFETIME",
       "The GPU's power smoothing circuit is worn out; power swings reach the data centre now."),
    _x(166, WARN, OPEN, _C.SECURITY, B100_UP, _A.UNKNOWN, _A.UNKNOWN, "NVLINK_SECURE_CRYPTO_ERR",
       "Confidential computing: encrypted traffic came over an NVLink before it was set up for it."),
    _x(167, CRIT, HARD, _C.PCIE, H100_UP, _A.UNKNOWN, _A.UNKNOWN, "PCIE_FATAL_TIMEOUT",
       "A fatal time-out on the GPU's PCIe connection."),
    _x(168, WARN, HARD, _C.MEMORY, ALL, _A.UNKNOWN, _A.UNKNOWN, "REDUCED_GPU_MEMORY_CAPACITY",
       "Errors in the GPU's protected memory region reduce its capacity; switch ECC on or boot again."),
    _x(169, CRIT, OPEN, _C.FIRMWARE, H100_UP, _A.UNKNOWN, _A.UNKNOWN, "SEC2_HALT_ERROR",
       "The GPU's security processor (SEC2) halted."),
    _x(170, WARN, OPEN, _C.SECURITY, B100_UP, _A.UNKNOWN, _A.UNKNOWN, "NVLINK_SECURE_OTHER",
       "Confidential computing: an NVLink raised an interrupt."),
    _x(171, CRIT, HARD, _C.MEMORY, ALL, _A.UNKNOWN, _A.UNKNOWN, "UNCORRECTABLE_DRAM_ERROR",
       "Goes with 48: the uncorrectable error was in the GPU's main memory (DRAM)."),
    _x(172, CRIT, HARD, _C.MEMORY, ALL, _A.UNKNOWN, _A.UNKNOWN, "UNCORRECTABLE_SRAM_ERROR",
       "Goes with 48: the uncorrectable error was in a cache or register file (SRAM)."),
)
# fmt: on
