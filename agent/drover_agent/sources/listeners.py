"""Whose programs listen at a TCP port of this machine (kernel: Documentation/networking/proc_net_tcp.rst)."""

from __future__ import annotations

from pathlib import Path

SYSTEM_USERS = 1000  # below it are root and services' users: SYS_UID_MAX, login.defs(5)
_LISTEN = "0A"  # kernel: include/net/tcp_states.h


def user_listening(proc: Path, port: int) -> int | None:
    """A user id that listens at this port and is no system user's; None when there is none.

    None is also what a port has that a container runtime forwards by packet filter: nobody here listens then.

    Raises:
        OSError: it cannot be known.
    """
    wanted = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            file = (proc / "net" / name).open(encoding="ascii", errors="replace")
        except FileNotFoundError:  # a kernel without IPv6
            if name == "tcp":
                raise
            continue
        with file:
            next(file, None)
            for line in file:
                fields = line.split()
                if len(fields) < 8 or fields[3] != _LISTEN:  # connections follow; there may be thousands
                    break
                if fields[1].endswith(wanted) and int(fields[7]) >= SYSTEM_USERS:
                    return int(fields[7])
    return None
