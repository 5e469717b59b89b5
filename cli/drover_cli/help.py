"""The groups in which `drover --help` shows the commands."""

from __future__ import annotations

import argparse

from drover_core import VERSION

GROUPS: dict[str, tuple[str, ...]] = {
    "look": ("status", "clusters", "top", "node", "nodes", "find", "incidents", "job", "fabric", "thermals"),
    "understand": ("why", "explain", "runbook", "risk", "capacity", "report", "audit"),
    "decide": ("decisions", "approve", "reject", "policy", "silence", "silences", "unsilence"),
    "hand over": ("ack", "assign", "comment", "ticket", "outcome"),
    "act": ("probe", "drain", "isolate", "resume", "reset", "reboot"),
    "set up and mend": ("doctor", "config", "fleet", "certs", "backup", "restore", "completion"),
    "try and measure": ("demo", "simulate", "export", "import", "replay", "score"),
}
MORE = "more"  # commands that are in none of the groups


class GroupedParser(argparse.ArgumentParser):
    """The parser of `drover` itself."""

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        (inner,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        lines = {action.dest: action for action in inner._choices_actions}
        grouped = {name for names in GROUPS.values() for name in names}
        for title, names in (*GROUPS.items(), (MORE, tuple(name for name in lines if name not in grouped))):
            formatter.start_section(title)
            formatter.add_arguments([lines[name] for name in names if name in lines])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action is not inner])
        formatter.end_section()
        formatter.add_text("`drover COMMAND --help` says more.")
        return formatter.format_help()


def version() -> str:
    return f"drover {VERSION}"
