"""An operator's own scheduler, as `act.command.program` calls it (docs/how-to/own-scheduler.md): a file for a node.

python -m testbed.command_scheduler FOLDER < request.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> int:
    request = json.load(sys.stdin)
    file = folder / f"{request['node']}.json"
    held = json.loads(file.read_text()) if file.exists() else {"service": "in", "reason": "", "by": "", "jobs": []}
    if request["act"] == "observe":
        print(json.dumps(held))
        return 0
    if request["act"] in ("drain", "isolate"):
        held |= {"service": "drained", "reason": request["reason"], "by": "drover"}
    elif request["act"] == "resume":
        held |= {"service": "in", "reason": "", "by": ""}
    with (folder / "asked.jsonl").open("a") as asked:
        asked.write(json.dumps(request) + "\n")
    file.write_text(json.dumps(held))
    print(json.dumps({"detail": f"{request['act']} noted"}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
