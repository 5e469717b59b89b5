"""`drover completion SHELL`: a script that completes commands and options, made by shtab out of the parsers."""

from __future__ import annotations

import argparse

from drover_cli.extras import needs
from drover_cli.output import print_json

HELP = "print a script that completes commands and options in your shell"
SHELLS = {
    "bash": "drover completion bash > ~/.local/share/bash-completion/completions/drover",
    "zsh": "drover completion zsh > ~/.zfunc/_drover, with ~/.zfunc in fpath",
    "fish": "drover completion fish > ~/.config/fish/completions/drover.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kept = "; ".join(SHELLS.values())
    parser.add_argument("shell", choices=list(SHELLS), help=f"kept for good: {kept}")
    parser.add_argument("--json", action="store_true", help="one JSON object: the shell and its script")


def run(args: argparse.Namespace) -> int:
    with needs("collector"):
        import shtab

    script = shtab.complete(args.drover, args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script)
    return 0
