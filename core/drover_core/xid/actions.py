"""The actions of the XID tables.

They follow the resolution buckets of the NVIDIA XID catalog
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), one member per bucket, in our own names.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class XidAction(StrEnum):
    """What to do about an XID, at once or to find its cause. `ADVICE` has a sentence for each."""

    UNKNOWN = "unknown"
    IGNORE = "ignore"
    INFORMATIONAL = "informational"
    SYMPATHETIC = "sympathetic"
    REPORT_IF_ALONE = "report_if_alone"
    REPORT_IF_REPEATED = "report_if_repeated"
    RESTART_APP = "restart_app"
    RESTART_VM = "restart_vm"
    RESET_GPU = "reset_gpu"
    RESTART_NODE = "restart_node"
    UPDATE_SOFTWARE = "update_software"
    CONTACT_SUPPORT = "contact_support"
    CHECK_APP = "check_app"
    CHECK_UVM = "check_uvm"
    CHECK_MECHANICALS = "check_mechanicals"
    CHECK_LINK_DOWN = "check_link_down"
    INVESTIGATE_SOFTWARE = "investigate_software"
    INVESTIGATE_USER = "investigate_user"
    INVESTIGATE_USER_AND_SIGNAL = "investigate_user_and_signal"
    INVESTIGATE_SIGNAL = "investigate_signal"
    INVESTIGATE_SIGNAL_AND_CABLES = "investigate_signal_and_cables"
    INVESTIGATE_PEER = "investigate_peer"
    INVESTIGATE_HOST = "investigate_host"
    FOLLOW_XID_154 = "follow_xid_154"
    XID_154_OR_RESTART_APP = "xid_154_or_restart_app"
    WORKFLOW_XID_13 = "workflow_xid_13"
    WORKFLOW_XID_31 = "workflow_xid_31"
    WORKFLOW_XID_45 = "workflow_xid_45"
    WORKFLOW_XID_48 = "workflow_xid_48"
    WORKFLOW_XID_137 = "workflow_xid_137"
    WORKFLOW_NVLINK = "workflow_nvlink"
    WORKFLOW_NVLINK5 = "workflow_nvlink5"


_A = XidAction
ADVICE: Mapping[XidAction, str] = MappingProxyType(
    {
        _A.UNKNOWN: "NVIDIA names no action for this code.",
        _A.IGNORE: "Nothing to do.",
        _A.INFORMATIONAL: "Nothing to do for this line: it comments on another XID.",
        _A.SYMPATHETIC: "Deal with the XIDs seen with it first; report it only if it stays.",
        _A.REPORT_IF_ALONE: "Deal with the XIDs seen with it first; report it if it is alone.",
        _A.REPORT_IF_REPEATED: "Report it if it is seen more than once a day.",
        _A.RESTART_APP: "Restart the application; neither the GPU nor the node needs a reset.",
        _A.RESTART_VM: "Restart the virtual machine that holds the GPU.",
        _A.RESET_GPU: "Reset the GPU before anything else runs on it.",
        _A.RESTART_NODE: "Reboot the node.",
        _A.UPDATE_SOFTWARE: "Bring driver and firmware (host and guest) to matching current versions.",
        _A.CONTACT_SUPPORT: "Open a case with the hardware vendor.",
        _A.CHECK_APP: "Check the application and its CUDA use; it probably sent bad data or commands.",
        _A.CHECK_UVM: "Reset the GPU if unified memory or vGPU is in use; otherwise nothing to do.",
        _A.CHECK_MECHANICALS: "Check the seating of the GPU and its power and data connections.",
        _A.CHECK_LINK_DOWN: "If an NVLink of the partition went down 30 s before, that is the cause; else report it.",
        _A.INVESTIGATE_SOFTWARE: "Find the fault in the user's or NVIDIA's software; the line may name a process.",
        _A.INVESTIGATE_USER: "Unless someone did it on purpose, find which software or person took the link down.",
        _A.INVESTIGATE_USER_AND_SIGNAL: "Find out who took the link down, and check its signal quality.",
        _A.INVESTIGATE_SIGNAL: "Check the signal quality of the NVLink from its telemetry.",
        _A.INVESTIGATE_SIGNAL_AND_CABLES: "Check the link's signal quality, cables, transceivers, seating, heat.",
        _A.INVESTIGATE_PEER: "The far end of the link took it down: check that device, its software and cooling.",
        _A.INVESTIGATE_HOST: "Read the logs of the host and the BMC: something else acted on the GPU.",
        _A.FOLLOW_XID_154: "Do what the text of the XID 154 says.",
        _A.XID_154_OR_RESTART_APP: "Do what an XID 154 seen with it says; without one, restart the application.",
        _A.WORKFLOW_XID_13: "Alone: check the application. Again on one GPU: run diagnostics on it.",
        _A.WORKFLOW_XID_31: "Alone or on many GPUs: check the application. Again on one GPU: run diagnostics on it.",
        _A.WORKFLOW_XID_45: "With another XID: follow that one. Alone: restart the fabric manager.",
        _A.WORKFLOW_XID_48: "Alone: reset the GPU. With 63 or 64: drain, then reset. Diagnose past the SRAM limit.",
        _A.WORKFLOW_XID_137: "Run the application under a memory checker; report it if that finds nothing.",
        _A.WORKFLOW_NVLINK: "Reset the GPU; the line's registers distinguish a bad seat from a bad link.",
        _A.WORKFLOW_NVLINK5: "Decode the registers in the line to learn the action.",
    }
)
