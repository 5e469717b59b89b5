"""A probe's process that plays a part: `python probe_child.py PART [FILE]`, in place of `drover_agent.probes.child`.

It speaks the protocol of the real one. FILE: where it writes what the test waits for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def result(probe: str, **fields: Any) -> None:
    say("result", **({"probe": probe, "gpu": None, "value": 1.0, "unit": "x"} | fields))


def wait() -> None:
    while True:
        time.sleep(0.05)


def main(part: str, file: Path) -> None:
    request = json.loads(sys.stdin.readline())
    if part.endswith("_once"):  # the second process of this FILE goes well
        part = "well" if file.exists() else part.removesuffix("_once")
        file.write_text(json.dumps(request))
    if part == "silent":
        wait()
    if part == "unfit":
        say("unfit", text="torch 2.9+cpu on this node is built without CUDA: install one with it")
        return
    if part == "unseen":
        say("unseen", number=1)
        return
    say("devices", devices=[])
    say("start", probe=request["probes"][0])
    say("progress", text="cuda:1: bf16 8192" if request["gpus"] else "cpu: bf16 128")
    result(request["probes"][0])
    if part == "hang":
        wait()
    elif part == "deaf":
        signal.signal(signal.SIGTERM, lambda *_: file.write_text("asked to end"))
        say("progress", text="deaf now")
        wait()
    elif part == "obedient":
        signal.signal(signal.SIGTERM, lambda *_: (file.write_text("asked to end"), sys.exit(0)))
        say("progress", text="waits for its end")
        wait()
    elif part == "environment":
        for name in sys.argv[3:] or ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            result(request["probes"][0], detail=f"{name}={os.environ.get(name)}")
    elif part == "short":
        say("unmeasured", probe=request["probes"][0], text="not enough memory: CUDA out of memory on cuda:1")
    elif part == "litter":
        (Path(request["folder"]) / "sub").mkdir()
        (Path(request["folder"]) / "sub/left.bin").write_bytes(b"1")
        file.write_text(request["folder"])
        os.kill(os.getpid(), signal.SIGKILL)
    elif part == "fails":
        say("error", probe=request["probes"][0], text="RuntimeError: CUDA error: uncorrectable ECC error on cuda:1")
        for probe in request["probes"][1:]:
            say("start", probe=probe)
            result(probe)
        if request["level"] == "deep":
            wait()
    elif part == "crash":
        print("RuntimeError: CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif part == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif part == "exit":
        print("no such device", file=sys.stderr)
        sys.exit(3)
    elif part == "eats":
        eaten = bytearray()
        while True:
            eaten += b"\1" * (16 << 20)
            say("progress", text=f"{len(eaten) >> 20} MiB")
            time.sleep(0.02)
    elif part == "family":
        loop = "import time\nwhile True: time.sleep(1)"
        same = subprocess.Popen([sys.executable, "-c", loop])
        other_group = subprocess.Popen([sys.executable, "-c", loop], process_group=0)
        file.write_text(f"{same.pid} {other_group.pid}")
        if request["level"] == "deep":
            say("progress", text="both are there")
            wait()
    elif part == "junk":
        sys.stdout.buffer.write(b"\xff\x00 not ours\n[1]\n{}\n3\nnull\n" + b"x" * (3 << 20) + b"\n")
        for line in (
            {"kind": "start", "probe": "rm -rf"}, {"kind": "start"}, {"kind": ["start"]}, {"kind": "progress"},
            {"kind": "result", "probe": "x"}, {"kind": "devices", "devices": [1]}, {"kind": "end"}, {"kind": "later"},
            {"kind": "result", "probe": "launch", "gpu": None, "value": "5", "unit": "us"},
        ):  # fmt: skip
            print(json.dumps(line), flush=True)
        result("launch", value=7.0)
    say("end", stopped=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path("/dev/null"))
