"""Which version of the model each client has, and from that how many numbers clients send and are sent.

Counted client by client, as papers do, whichever rank trains whom: a client is not sent again what it has already. The
engine's own numbers are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmpi.engine.messages import ENGINE_DOWN, ENGINE_UP, Groups, Messages


class Versions:
    """A group's version is the number of rounds that have changed it; a client knows those that it was sent."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.current = dict.fromkeys(messages.shared_groups, 0)  # group -> rounds in which it was stepped, so far
        self.known: dict[int, dict[str, int]] = {}  # client -> the versions that it has; none where it never took part

    def missing(self, client: int) -> Groups:
        """The groups of which a client has an older version, or none."""
        known = self.known.get(client, {})
        return frozenset(group for group, version in self.current.items() if known.get(group) != version)

    def count(self, t: int, members: Sequence[int]) -> dict[str, int]:
        """Round t's up_parameters and down_parameters over its cohort, which from now on has the current versions."""
        messages = self.messages
        each = len(members) * messages.per_client.size
        down = sum(messages.announcement(self.missing(k)).packing.size - ENGINE_DOWN for k in members) + each
        now = dict(self.current)
        self.known |= dict.fromkeys(members, now)
        self.current |= {group: self.current[group] + 1 for group in messages.groups(t)}
        return {"up_parameters": len(members) * (messages.upload(t).packing.size - ENGINE_UP), "down_parameters": down}
