"""Rounds of pairs: in each round every member is in at most one pair, so that no pair disturbs another one's port.

SuperBench's network validation runs its pairs in such rounds too (microsoft/superbenchmark, pull request 191:
ib_validation_performance).
"""

from __future__ import annotations

ALL_UP_TO = 32  # members: each with each, in members - 1 rounds; of more, each meets log2 of them

Round = tuple[tuple[int, int], ...]


def pair_rounds(members: int, all_up_to: int = ALL_UP_TO) -> tuple[Round, ...]:
    """Return rounds of pairs (a, b), a < b, of the numbers 0 .. `members` - 1.

    The circle method of round-robin tournaments: up to `all_up_to` members meet each other once. Of more there are only
    the first log2 rounds: each member has as many partners, which are others in each round.
    """
    if members < 2:
        return ()
    circle = [*range(members), *([-1] if members % 2 else [])]  # -1: rests in this round
    count = len(circle) - 1 if members <= all_up_to else (members - 1).bit_length()
    rounds = []
    for _ in range(count):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append(tuple(sorted((min(a, b), max(a, b)) for a, b in met if min(a, b) >= 0)))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(rounds)
