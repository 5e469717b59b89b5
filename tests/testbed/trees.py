"""Folders for tests, written down in one text file each: a sysfs tree has hundreds of files of one line.

# a comment
[sys/class/net/eth0]            the folder of the lines that follow
operstate: up                   a file; \\n, \\0 and \\t in its text are meant; a line end is added but after \\0
device -> ../../../devices/x    a symbolic link
queues/                         an empty folder
"""

from __future__ import annotations

from pathlib import Path


def plant(tree: Path, root: Path) -> Path:
    """Make below `root` what the file `tree` describes; gives `root`."""
    folder = root
    for number, line in enumerate(tree.read_text("utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("[") and text.endswith("]"):
            folder = root / text[1:-1]
            folder.mkdir(parents=True, exist_ok=True)
        elif " -> " in text:
            name, _, target = text.partition(" -> ")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)
        elif text.endswith("/") and ":" not in text:
            (folder / text).mkdir(parents=True, exist_ok=True)
        else:
            name, colon, content = text.partition(":")
            assert colon, f"{tree}:{number}: neither folder, file nor link: {line!r}"
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = content.strip().replace("\\n", "\n").replace("\\0", "\0").replace("\\t", "\t")
            path.write_text(content if content.endswith("\0") or not content else content + "\n")
    return root
