"""Check the node itself: settings, rights, kernel log, spool, clock, service."""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
import tempfile
from pathlib import Path

from drover_agent.commands.check.result import CheckResult, CheckState
from drover_agent.commands.once import kernel_log
from drover_agent.config import DEFAULT_PATH, AgentConfig

UNIT = "drover-agent.service"
SYSTEMCTL_S = 5.0
CAPABILITIES = {"CAP_DAC_OVERRIDE": 1, "CAP_SYS_PTRACE": 19, "CAP_SYSLOG": 34}  # linux/capability.h
TIME_ERROR = 5  # sys/timex.h: the clock is not synchronized
TIMEX_BYTES = 1024  # struct timex has 208 on 64-bit machines; all zeros changes nothing
AS_THE_SERVICE = (
    "systemd-run --pipe --wait -p User=drover -p AmbientCapabilities=CAP_SYSLOG /opt/drover/bin/drover-agent check"
)


def settings(file: str) -> list[CheckResult]:
    """Report the settings file. Invalid settings have ended the command before."""
    text = f"{file}: all keys known" if file else f"none at {DEFAULT_PATH}: defaults"
    return [CheckResult("settings", CheckState.OK, text)]


def user() -> list[CheckResult]:
    if os.geteuid() == 0:
        text = "this is root; the service runs as a user with fewer rights"
        return [
            CheckResult("user", CheckState.LIMITED, text, f"to check with the rights of the service: {AS_THE_SERVICE}")
        ]
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = str(os.geteuid())
    held = [name for name, bit in CAPABILITIES.items() if _effective() >> bit & 1]
    return [CheckResult("user", CheckState.OK, f"{name}, with {', '.join(held) or 'no capability'}")]


def _effective() -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def kernel_log_readable(config: AgentConfig) -> list[CheckResult]:
    if not config.kmsg_enabled:
        return [
            CheckResult("kernel log", CheckState.MISSING, "turned off: no XIDs are read from it", "kmsg_enabled = true")
        ]
    found = kernel_log(config)
    if found["readable"]:
        return [CheckResult("kernel log", CheckState.OK, f"{config.kmsg_path} can be read")]
    remedy = "AmbientCapabilities=CAP_SYSLOG in the unit, as in the one that Drover ships"
    if "not allowed" not in found["why"]:
        remedy = "check kmsg_path; a container needs the device passed in"
    return [CheckResult("kernel log", CheckState.BROKEN, f"{config.kmsg_path}: {found['why']}", remedy)]


def spool(config: AgentConfig) -> list[CheckResult]:
    folder = Path(config.spool.dir)
    above = next(path for path in (folder, *folder.parents) if path.exists())
    owner = f"mkdir -p {folder} && chown drover: {folder} (StateDirectory= in the unit does it)"
    try:
        if not above.is_dir():
            return [CheckResult("spool", CheckState.BROKEN, f"{above} is not a folder", "set spool.dir")]
        if above == folder:
            with tempfile.TemporaryFile(dir=folder):
                pass
        elif not os.access(above, os.W_OK | os.X_OK):
            return [
                CheckResult(
                    "spool", CheckState.BROKEN, f"{folder} does not exist, and this user may not create it", owner
                )
            ]
        room = os.statvfs(above)
    except OSError as error:
        return [CheckResult("spool", CheckState.BROKEN, f"{folder}: {error.strerror}", owner)]
    free, used = room.f_bavail * room.f_frsize, _size(folder)
    wanted = max(config.spool.max_bytes - used, 0)
    text = f"{folder}: {free / 1e6:,.0f} MB free, {used / 1e6:,.1f} MB used of {config.spool.max_bytes / 1e6:,.0f}"
    if above != folder:
        text = f"{folder} will be created at the first start; {free / 1e6:,.0f} MB free"
    if free < wanted:
        return [
            CheckResult(
                "spool", CheckState.LIMITED, f"{text}: the disk will be full before the spool is", "spool.max_bytes"
            )
        ]
    return [CheckResult("spool", CheckState.OK, text)]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.glob("**/*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:  # a running agent removed it meanwhile
            continue
    return total


def clock() -> list[CheckResult]:
    """Check whether the kernel reports a synchronized clock (adjtimex(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = int(libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)))
    if state < 0:
        return [CheckResult("clock", CheckState.LIMITED, f"cannot be read: {os.strerror(ctypes.get_errno())}")]
    if state == TIME_ERROR:
        text = "not synchronized (no NTP); collectors mark events of a wrong clock"
        return [CheckResult("clock", CheckState.LIMITED, text, "timedatectl set-ntp true, or chrony")]
    return [CheckResult("clock", CheckState.OK, "synchronized by a time service")]


def service() -> list[CheckResult]:
    """Check the unit, and show the status line of the running agent."""
    if not Path("/run/systemd/system").exists():
        return [CheckResult("service", CheckState.MISSING, "systemd does not run here: nothing restarts a hung agent")]
    properties = "LoadState,ActiveState,Type,User,WatchdogUSec,StatusText"
    try:
        shown = subprocess.run(
            ["systemctl", "show", UNIT, f"--property={properties}"],
            capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [CheckResult("service", CheckState.LIMITED, f"systemctl does not answer: {error}")]
    return [of_unit(dict(line.partition("=")[::2] for line in shown.splitlines()))]


def of_unit(unit: dict[str, str]) -> CheckResult:
    """`unit`: properties as `systemctl show` prints them."""
    if unit.get("LoadState") != "loaded":
        text = f"no {UNIT}: nothing starts the agent at boot"
        return CheckResult(
            "service", CheckState.MISSING, text, "docs/how-to/install.md: the unit is in share/drover/systemd"
        )
    active = unit.get("ActiveState", "?")
    if active == "failed":
        return CheckResult("service", CheckState.BROKEN, f"{UNIT} has failed", f"journalctl -u {UNIT}")
    text = f"{UNIT} is {active}, user {unit.get('User') or 'root'}"
    if unit.get("StatusText"):
        text += f": {unit['StatusText']}"
    if unit.get("Type") != "notify" or unit.get("WatchdogUSec", "0") in ("0", "infinity"):
        text += "; no watchdog: a hung agent is not restarted"
        return CheckResult(
            "service", CheckState.LIMITED, text, "Type=notify and WatchdogSec=60, as in the unit that Drover ships"
        )
    return CheckResult("service", CheckState.OK, f"{text}; watchdog {unit['WatchdogUSec']}")
