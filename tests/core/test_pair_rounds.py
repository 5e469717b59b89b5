"""Rounds of pairs: a port is in one pair at a time, and each member meets whom it should."""

from __future__ import annotations

import pytest

from drover_core.model.pair_rounds import ALL_UP_TO, pair_rounds


@pytest.mark.parametrize("members", [2, 3, 4, 5, 8, 31, ALL_UP_TO, ALL_UP_TO + 1, 100, 256])
def test_nobody_is_in_two_pairs_of_a_round_and_all_meet_or_log2_of_them(members: int) -> None:
    rounds = pair_rounds(members)
    for pairs in rounds:
        inside = [member for pair in pairs for member in pair]
        assert len(set(inside)) == len(inside)
        assert len(inside) >= members - members % 2, "only an odd one rests"
    pairs_ = [pair for pairs in rounds for pair in pairs]
    assert len(set(pairs_)) == len(pairs_)
    assert all(0 <= a < b < members for a, b in pairs_)
    if members <= ALL_UP_TO:
        assert len(pairs_) == members * (members - 1) // 2
        assert len(rounds) == members - 1 + members % 2
    else:
        assert len(rounds) == (members - 1).bit_length()
        partners = [sum(member in pair for pair in pairs_) for member in range(members)]
        assert min(partners) >= len(rounds) - 1, "fewer could not distinguish a port from a link"


def test_a_member_alone_has_no_pairs() -> None:
    assert pair_rounds(0) == pair_rounds(1) == ()
