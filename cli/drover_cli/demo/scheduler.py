"""The program that the collector of `drover demo --act` calls: it hands a request to the simulated fleet's stand-in.

python -m drover_cli.demo.scheduler SOCKET < request.json

SOCKET is the Unix socket of `drover-agent fleet --scheduler`. Only the standard library is used: it runs for each look.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

PLAIN = ("reset", "reboot")  # commands whose last line is kept unchanged
TRY_AGAIN = 75  # as docs/how-to/own-scheduler.md says
WAIT_S = 15.0


def main(where: Path) -> int:
    request = json.load(sys.stdin)
    try:
        os.chdir(where.parent)  # a socket's path has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as talk:
            talk.settimeout(WAIT_S)
            talk.connect(where.name)
            talk.sendall(json.dumps(request).encode() + b"\n")
            with talk.makefile("rb") as answers:
                answer = json.loads(answers.readline())
    except (OSError, ValueError) as error:
        print(f"the demo's stand-in scheduler does not answer: {error}", file=sys.stderr)
        return TRY_AGAIN
    if answer["status"]:
        print(answer["said"], file=sys.stderr)
    else:
        said = answer["said"]
        print(said["detail"] if request.get("act") in PLAIN else json.dumps(said))
    return int(answer["status"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
