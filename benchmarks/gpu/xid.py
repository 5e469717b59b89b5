"""An XID that a user's own program causes, as NVML delivers it to the agent.

The program writes to an address that it does not own. The driver ends the program's context and reports XID 31 (MMU
fault) or 13 (graphics engine exception). No other program and no setting of the GPU is touched.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from typing import Any

from drover_agent.sources.base import NodeEvent
from drover_agent.sources.nvml.source import NvmlSource
from gpu import common

PATIENCE_S = 20.0
EXPECTED = {"13", "31"}
ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS
NO_CUDA = 2  # the program's exit code
# Version 6.0 and sm_50 run on every GPU since 2014.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry fault()
{
    .reg .u64 %address;
    .reg .u32 %value;
    mov.u64 %address, 0x123456780000;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""


def delivered() -> dict[str, Any]:
    """Cause one XID and wait for it. `delay_s` is from the start of the program to the arrival at the agent."""
    source = NvmlSource("gpu-node")
    events: list[NodeEvent] = []
    try:
        source.read(round(time.time() * 1000))
        source.xids.read(round(time.time() * 1000))  # makes the event set
        if not source.xids.watching:
            return {"left_out": "NVML delivers no XID here"}
        begun_s = time.monotonic()
        program = subprocess.Popen([sys.executable, __file__], env=common.ENV, stdout=subprocess.PIPE, text=True)
        arrived_s = None
        while time.monotonic() < begun_s + PATIENCE_S and (arrived_s is None or program.poll() is None):
            events += source.xids.read(round(time.time() * 1000)).events
            if events and arrived_s is None:
                arrived_s = time.monotonic() - begun_s
        program.kill()
        said = program.communicate()[0].strip()
        if program.returncode == NO_CUDA:
            return {"left_out": said}
    finally:
        source.close()
    found = [{"gpu": event.gpu, "code": event.code, "message": event.message} for event in events]
    return {
        "program": said,
        "events": found,
        "delay_s": arrived_s and round(arrived_s, 3),
        "holds": bool(found) and {event["code"] for event in found} <= EXPECTED,
    }


def main() -> int:
    """Cause the fault, and print what CUDA said of it."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(error)
        return NO_CUDA
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    steps = {
        "cuInit": (ctypes.c_uint(0),),
        "cuDevicePrimaryCtxRetain": (ctypes.byref(context), ctypes.c_int(0)),
        "cuCtxSetCurrent": (context,),
        "cuModuleLoadData": (ctypes.byref(module), ctypes.c_char_p(PTX)),
        "cuModuleGetFunction": (ctypes.byref(kernel), module, ctypes.c_char_p(b"fault")),
        "cuLaunchKernel": (kernel, *[ctypes.c_uint(1)] * 6, ctypes.c_uint(0), None, None, None),
    }
    for name, arguments in steps.items():
        if code := getattr(cuda, name)(*arguments):
            print(f"{name}: error {code}")
            return NO_CUDA
    code = cuda.cuCtxSynchronize()
    print(f"cuCtxSynchronize: error {code}")
    return int(code != ILLEGAL_ADDRESS)


if __name__ == "__main__":
    sys.exit(main())
