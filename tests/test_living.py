"""Objects that others keep alive, in the order in which they came."""

from __future__ import annotations

from tightfit.living import Living


class Member:
    pass


def test_members_leave_when_nothing_else_keeps_them_or_when_they_are_left_out() -> None:
    first, second, third = Member(), Member(), Member()
    living: Living[Member] = Living()
    for member in (first, second, third):
        living.add(member)
    living.discard(second)
    living.discard(second)  # not among them: nothing happens
    assert [*living] == [first, third]
    del member, first
    assert living.now() == [third] and living.are_only(third) and not living.are_only(second)


def test_a_member_may_die_while_the_others_are_looked_at() -> None:
    members = [Member() for _ in range(3)]
    living: Living[Member] = Living()
    for member in members:
        living.add(member)
    del member
    for seen in living:
        members.clear()
        del seen
    assert living.now() == []
