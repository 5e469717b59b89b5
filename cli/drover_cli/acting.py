"""What `drover drain`, `isolate`, `resume`, `reset` and `reboot` share."""

from __future__ import annotations

import argparse

from drover_cli import client, contexts
from drover_cli.arguments import count
from drover_cli.errors import CliError
from drover_cli.output import plain, print_json
from drover_core.model.reports import job_label
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

ADMIN = "an admin's certificate is needed to do it all the same"
DEADLINE_S = 30.0  # the collector answers within 8 s, done or not
SLOT_DIGITS = 4
SAVE_S = 300  # as docs/how-to/save-first.md proposes for a rule


def add_arguments(parser: argparse.ArgumentParser, force: str) -> None:
    client.add_arguments(parser)
    parser.add_argument("node", metavar="NODE", help="as in the fleet file")
    said = parser.add_mutually_exclusive_group(required=True)
    said.add_argument("--why", help="a sentence for the record, and for the scheduler's reason")
    said.add_argument("--check", action="store_true", help="do nothing: say what it would meet, and whether it is safe")
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def add_gpu(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--gpu", metavar="SLOT|UUID", help=text)


def _request(args: argparse.Namespace, act: str) -> pb.ActRequest:
    gpu: str | None = getattr(args, "gpu", None)
    if gpu is None:
        return pb.ActRequest(node=args.node, act=act)
    if gpu.isascii() and gpu.isdecimal() and len(gpu) <= SLOT_DIGITS:
        return pb.ActRequest(node=args.node, act=act, gpu=int(gpu))
    if not gpu.strip():
        raise CliError("--gpu: give a slot, as in --gpu 3, or a UUID")
    return pb.ActRequest(node=args.node, act=act, gpu_uuid=gpu.strip())


def _gpu(args: argparse.Namespace) -> dict[str, str]:
    gpu: str | None = getattr(args, "gpu", None)
    return {} if gpu is None else {"gpu": gpu}


def _what(args: argparse.Namespace) -> str:
    gpu: str | None = getattr(args, "gpu", None)
    return plain(args.node) if gpu is None else f"GPU {plain(gpu)} of {plain(args.node)}"


def add_save_first(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save-first", type=count, nargs="?", const=SAVE_S, default=0, metavar="SECONDS",
        help=f"ask its jobs to save themselves first, and wait so long for them (default {SAVE_S})",
    )  # fmt: skip


def run(args: argparse.Namespace, act: str) -> int:
    """0: done, or under way, or nothing against it; 1: it failed, or something is against it: the answer says what."""
    request = _request(args, act)
    with client.connect(args) as fleet:
        if args.check:
            return _checked(fleet.call(methods.PREVIEW_ACT, request, DEADLINE_S), args, act)
        request.why, request.force, request.save_s = args.why, args.force, getattr(args, "save_first", 0)
        reply = fleet.call(methods.ACT_ON_NODE, request, DEADLINE_S)
    if args.json:
        done = {"act": act, "id": reply.action_id, "state": reply.state, "detail": reply.detail}
        print_json({"node": args.node, **_gpu(args), **done})
    else:
        state = {"intended": "under way", "": "not yet"}.get(reply.state, reply.state)
        detail = plain(reply.detail) or "`drover explain` and the console say how it goes on"
        print(f"{act} {_what(args)}{contexts.in_cluster(args)}: {state}: {detail}")
    return int(reply.state in ("failed", "undone"))


def _checked(look: pb.ActPreview, args: argparse.Namespace, act: str) -> int:
    """What an act would meet; nothing is done."""
    unsafe = look.HasField("safe") and not look.safe
    against = [text for text in (look.hindrance, look.guard and f"the guard holds it back: {look.guard}") if text]
    if args.json:
        jobs = [{"job": job.job, "gpus_here": job.gpus_here, "gpus": job.gpus, "nodes": job.nodes} for job in look.jobs]
        print_json(
            {
                "node": args.node, **_gpu(args), "act": act, "safe": look.safe if look.HasField("safe") else None,
                "grounds": list(look.grounds), "against": against, "jobs": jobs, "stage": look.stage or None,
                "validates": look.validates or None, "maintenance": look.maintenance or None,
            }
        )  # fmt: skip
        return int(bool(against) or unsafe)
    print(f"{act} {_what(args)}{contexts.in_cluster(args)}: {_verdict(look, against, act)}")
    for text in (*against, *look.grounds):
        print(f"  {plain(text)}")
    for job in look.jobs:
        print(f"  {plain(job_label(job.job))} holds {job.gpus_here} of its {job.gpus} GPUs there")
    if look.maintenance:
        print(f"  Drover itself does nothing there: {plain(look.maintenance)}")
    return int(bool(against) or unsafe)


def _verdict(look: pb.ActPreview, against: list[str], act: str) -> str:
    if look.hindrance:
        return "it cannot be done"
    if against:
        return "the guard is against it; " + (ADMIN if look.no_force else "--force does it all the same")
    if act != "resume":
        return "nothing is against it"
    gate = f"; it has to pass its {look.validates} probes first" if look.validates else "; it is put back at once"
    if not look.HasField("safe"):
        return f"nothing proves that it is safe{gate}"
    return ("it is safe by all that is known" if look.safe else "it is not safe") + gate
