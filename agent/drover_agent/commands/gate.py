"""`drover-agent gate`: may a job begin on this node? Answered from the file that the running agent keeps.

It loads neither CUDA nor gRPC nor the settings, and asks nobody. Slurm drains a node whose prolog fails, and a prolog
that fails on every node drains the partition. So the gate fails only when the collector's guard gave leave to take this
node out, or where the settings say so while no collector answers. Whatever goes wrong in the gate itself passes: a file
that is missing or damaged, a wrong argument, a defect. Sources: `Prolog`, `Epilog` and `HealthCheckProgram` of
slurm.conf(5), https://slurm.schedmd.com/prolog_epilog.html.
"""

from __future__ import annotations

import json
import os
import stat
import time

PASS, REFUSE = 0, 1
DEFAULT_FILE = "/run/drover/gate.json"
FORMAT = 1
FRESH_S = 180.0  # the collector repeats its verdict each minute
MAX_BYTES = 65_536
BOOT_ID = "/proc/sys/kernel/random/boot_id"
SCONTROL_S = 10.0  # for one answer of slurmctld
REASON_CHARS = 200
DEEP_S = 30.0
OLD = "its last verdict is old, and Slurm has {node} in service"
BACK = "Slurm has {node} in service again"
HELP = """usage: drover-agent gate [--file FILE] [--drain] [--deep [--seconds S]]

Says in one line whether a job may begin on this node: exit status 0, it may; 1, it is refused.
The running agent keeps what the collector says of the node in FILE. Only a verdict that has the
guard's leave refuses a job. Whatever goes wrong here passes.

options:
  --file FILE  default: /run/drover/gate.json, `gate.file` in the agent's settings
  --drain      on a refusal, also drain this node in Slurm by scontrol, with Drover's reason:
               for HealthCheckProgram, whose exit status Slurm ignores
  --deep       for Epilog: where nothing is refused, also ask the probe service for quick probes and
               wait for them; their result goes to the collector and refuses nothing here
  --seconds S  longest wait for these probes (default: 30)
  --spool DIR  folder of the agent's spool (default: /var/lib/drover/agent)
  --proc-root DIR  default: /proc
  -h, --help   print this
"""


class Answer:
    """What the gate says.

    Attributes:
        refused: the job must not begin here.
        plain: nothing is known against the node: not worth a line in the system's log.
        reason: what the scheduler shows if the node is drained for it.
        yields: it refuses, and the node may have been put back since; then Slurm's word counts, and this says why.
    """

    def __init__(self, refused: bool, text: str, plain: bool = False, reason: str = "", yields: str = "") -> None:
        self.refused, self.text, self.plain, self.reason, self.yields = refused, text, plain, reason, yields


def run(arguments: list[str]) -> int:
    """Print the answer and return the exit status. Never raises, and returns nothing but PASS and REFUSE."""
    try:
        return _run(arguments)
    except Exception as error:  # noqa: BLE001  # a defect here would drain each node on which a job begins
        _say(Answer(False, f"pass: the gate failed: {type(error).__name__}: {error}"))
        return PASS


def _run(arguments: list[str]) -> int:
    options = {"--file": DEFAULT_FILE, "--seconds": str(DEEP_S), "--spool": "", "--proc-root": ""}
    flags, words = set(), list(arguments)
    while words:
        word, equals, value = words.pop(0).partition("=")
        if word in ("-h", "--help"):
            os.write(1, HELP.encode())
            return PASS
        if word in ("--drain", "--deep") and not equals:
            flags.add(word)
        elif word in options and (equals or words):
            options[word] = value if equals else words.pop(0)
        else:  # argparse would exit with 2, which Slurm takes for a sick node
            _say(Answer(False, f"pass: unknown argument {word!r}: see drover-agent gate --help"))
            return PASS
    found, trouble = read(options["--file"])
    answer = judge(found, time.clock_gettime(time.CLOCK_BOOTTIME)) if found else Answer(False, f"pass: {trouble}")
    node = os.environ.get("SLURMD_NODENAME") or str(found.get("node", ""))
    if answer.yields and ("--drain" in flags or "SLURMD_NODENAME" in os.environ) and _in_service(node):
        answer = Answer(False, f"pass: {answer.yields.format(node=node)} ({answer.text})")
    _say(answer)
    if not answer.refused:
        if "--deep" in flags:
            _deep(options)
        return PASS
    if "--drain" in flags:
        try:
            _drain(answer, node)
        except Exception as error:  # noqa: BLE001  # the job is refused, whatever Slurm makes of the drain
            _say(Answer(True, f"refused, and {node} could not be drained in Slurm: {type(error).__name__}: {error}"))
    return REFUSE


def read(path: str, boot_id: str = BOOT_ID) -> tuple[dict[str, object], str]:
    """Return the agent's file, or nothing and why."""
    try:
        # Without O_NONBLOCK, to open a FIFO waits for a writer, and the prolog with it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123  # quick
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                return {}, f"{path} is not a regular file"
            if mode & stat.S_IWOTH:
                return {}, f"anyone may write {path}; remove it, and the agent writes it again"
            found = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        return {}, f"there is no {path}: is drover-agent running?"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} cannot be read: {error}"
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return {}, f"{path} is not of this version's form; update the older of agent and gate"
    try:
        with open(boot_id, encoding="ascii") as file:  # noqa: PTH123  # quick
            now = file.read().strip()
    except OSError:
        now = ""
    if now and found.get("boot") and found["boot"] != now:
        return {}, f"{path} is of an earlier boot; is drover-agent running?"
    return found, ""


def judge(found: dict[str, object], now_s: float) -> Answer:
    """Return the answer that follows from the agent's file at `now_s` since boot.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: it is not of the written form.
    """
    verdict = found["verdict"]
    limit_s = float(str(found["age_s"]))
    received_s = float(str(verdict["received_s"])) if isinstance(verdict, dict) else None
    age_s = None if received_s is None else now_s - received_s
    if isinstance(verdict, dict) and age_s is not None and 0 <= age_s <= limit_s:
        known = _of_verdict(verdict, "" if age_s <= FRESH_S else f", as of {age_s / 60:.0f} min ago")
        if known.refused or age_s <= FRESH_S:
            return known
    away = "no word of a collector" if age_s is None else f"no word of a collector for {age_s / 60:.0f} min"
    return _of_faults(found, now_s, limit_s, away)


def _of_verdict(verdict: dict[str, object], when: str) -> Answer:
    text, incident = str(verdict["text"]), str(verdict["incident"])
    about = f"{text} (incident {incident})" if incident else text
    match verdict["answer"]:
        case "refuse":
            reason = f"drover:{incident or 'hand'}: {text}"
            # What Drover closed in Slurm itself, Slurm opens a moment before the collector can say so.
            yields = OLD if when else BACK if verdict.get("closed_by") == "slurm" else ""
            return Answer(True, f"refused{when}: {about}", reason=reason, yields=yields)
        case "observe":
            return Answer(False, f"pass{when}: in observe mode; would refuse this job: {about}")
        case "held":
            return Answer(False, f"pass{when}: the guard gives no leave to refuse: {about}")
        case "asked":
            return Answer(False, f"pass{when}: a person is asked first: {about}")
        case "pass":
            return Answer(False, f"pass{when}{': ' + about if about else ''}", plain=True)
    return Answer(False, f"pass{when}: this gate does not know the answer {verdict['answer']!r}; update the agent")


def _of_faults(found: dict[str, object], now_s: float, limit_s: float, away: str) -> Answer:
    """Judge by what the node saw itself: nobody gave leave. Without a fault the gate passes, whatever is set."""
    faults = found["faults"]
    texts = [
        str(fault["text"])
        for fault in (faults if isinstance(faults, list) else [])
        if 0 <= now_s - float(str(fault["at_s"])) <= limit_s
    ]
    if not texts:
        return Answer(False, f"pass: {away}, and this node found no fault itself")
    verdict = found["verdict"]
    mode = verdict["mode"] if isinstance(verdict, dict) else "observe"
    what = "; ".join(texts)
    if mode != "enforce":
        return Answer(False, f"pass: {away}; its mode was {mode}, which refuses nothing; this node found: {what}")
    if found["unanswered"] != "closed":
        return Answer(False, f'pass: {away}, gate.unanswered is "open"; this node found: {what}')
    return Answer(
        True, f'refused without leave: {away}, gate.unanswered is "closed"; this node found: {what}',
        reason=f"drover gate, no collector: {what}",
    )  # fmt: skip


def _say(answer: Answer) -> None:
    """Print the answer, and log what is not a plain pass: Slurm shows nobody what a prolog prints."""
    line = "drover gate: " + "".join(c if c.isprintable() else "?" for c in answer.text)
    try:
        os.write(1, f"{line}\n".encode(errors="replace"))
        printed = True
    except OSError:  # closed by who called: the log has it then
        printed = False
    if not (answer.plain and printed):
        import syslog

        syslog.openlog("drover-gate")
        syslog.syslog(syslog.LOG_WARNING if answer.refused else syslog.LOG_NOTICE, line)


def _deep(options: dict[str, str]) -> None:
    """Probe after a job. Whatever goes wrong is said, and refuses nothing."""
    try:
        from drover_agent.commands import gate_deep

        seconds = float(options["--seconds"])
        if not 0 < seconds <= 3600:
            raise ValueError(f"--seconds {seconds:g}: more than 0 and at most 3600")
        said = gate_deep.after_job(seconds, options["--spool"] or gate_deep.SPOOL, options["--proc-root"] or "/proc")
    except Exception as error:  # noqa: BLE001  # a failed Epilog drains its node
        said = f"not probed: {type(error).__name__}: {error}"
    _say(Answer(False, f"pass: {said}"))


def _is_name(node: str) -> bool:
    return node.upper() != "ALL" and node.replace("-", "").replace("_", "").replace(".", "").isalnum()


OUT_STATES = ("DRAIN", "DOWN", "FAIL", "UNKNOWN", "NOT_RESPONDING")  # sinfo(1); "*": it does not answer


def _in_service(node: str) -> bool:
    """Return whether Slurm itself says that this node takes jobs. False where it does not answer."""
    if not _is_name(node):
        return False
    try:
        shown = _scontrol("show", "node", "-o", node)
    except Exception:  # noqa: BLE001  # unknown is not in service: the last verdict stands
        return False
    state = shown.partition(" State=")[2].partition(" ")[0]
    return bool(state) and not state.endswith("*") and not any(word in state for word in OUT_STATES)


def _drain(answer: Answer, node: str) -> None:
    """Drain this node in Slurm, unless somebody has. A failure is said; the exit status refuses all the same."""
    import subprocess

    if not _is_name(node):
        _say(Answer(True, f"refused, and not drained in Slurm: {node!r} is not the name of one node"))
        return
    reason = " ".join(answer.reason.encode("ascii", "replace").decode().split())[:REASON_CHARS]
    try:
        shown = _scontrol("show", "node", "-o", node)
        if "DRAIN" in shown.partition(" State=")[2].partition(" ")[0]:
            return
        _scontrol("update", f"nodename={node}", "state=drain", f"reason={reason}")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or error
        _say(Answer(True, f"refused, and {node} could not be drained in Slurm: {said}"))


def _scontrol(*words: str) -> str:
    import subprocess

    done = subprocess.run(
        ["scontrol", *words], capture_output=True, timeout=SCONTROL_S, check=True, stdin=subprocess.DEVNULL,
        encoding="utf-8", errors="replace",  # people's reasons and comments
    )  # fmt: skip
    return done.stdout
