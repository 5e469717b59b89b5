"""Which signal makes a Slurm job save itself, as the job says.

sbatch(1), --signal=[{R|B}:]<sig_num>[@sig_time]: the signal that Slurm sends before the time limit; with `B:` only the
batch script gets it, else only the steps. Slurm shows it nowhere but in the script, so a job that names it on the
command line, and a job that wants another one, says `drover:signal=B:USR1` in its comment.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# Those that programs use for this. Others end or stop a job, or are the kernel's.
NAMES = frozenset({"HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "URG", "XCPU"})
_WORD = r"((?:[RB]{1,2}:)?[A-Za-z0-9]+)"
_DIRECTIVE = re.compile(rf"#SBATCH\b.*?\s--signal(?:=|\s+){_WORD}")
_COMMENT = re.compile(rf"\bdrover:signal={_WORD}")


@dataclass(frozen=True, slots=True)
class SaveSignal:
    """`name`: without SIG. `to_script`: for the batch script alone, not for the steps."""

    name: str
    to_script: bool = False


def of_script(text: str) -> SaveSignal | None:
    """Return the signal of a batch script's last `#SBATCH --signal`; None: it has none that is usable.

    sbatch reads directives up to the first line that is neither empty nor a comment.
    """
    found = None
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if (match := _DIRECTIVE.match(line)) is not None:
            found = _signal(match[1])
    return found


def of_comment(shown: str) -> SaveSignal | None:
    """Return the signal in the comment of `scontrol -o show job`."""
    _, comment, rest = shown.partition(" Comment=")
    return of_words(rest) if comment else None


def of_words(comment: str) -> SaveSignal | None:
    """Return the signal that a comment names."""
    match = _COMMENT.search(comment)
    return None if match is None else _signal(match[1])


def _signal(word: str) -> SaveSignal | None:
    flags, colon, name = word.rpartition(":")
    name = name.upper().removeprefix("SIG")
    if name.isdecimal():
        try:
            name = signal.Signals(int(name)).name.removeprefix("SIG")
        except ValueError:
            return None
    return SaveSignal(name, bool(colon) and "B" in flags) if name in NAMES else None
