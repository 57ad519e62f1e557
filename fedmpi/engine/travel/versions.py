"""Which version of the model each client has, and from that how many numbers clients send and are sent.

Counted client by client, as papers do, whichever rank trains whom: a client is not sent again what it has already. The
engine's own numbers are left out. Where the format of a message takes fewer bytes (comm.wire) so many numbers count as
would take these bytes. Of a format for differences only who has the version before can make use.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmpi.engine.messages import ENGINE_DOWN, ENGINE_UP, Groups, Messages


class Versions:
    """A group's version is the number of rounds that have changed it; a client knows those that it was sent."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.current = dict.fromkeys(messages.shared_groups, 0)  # group -> rounds in which it was stepped, so far
        self._latest: tuple[int, dict[str, int]] = -1, {}  # the round counted last, and its numbers
        self.known: dict[int, dict[str, int]] = {}  # client -> the versions that it has; none where it never took part

    def missing(self, client: int) -> Groups:
        """The groups of which a client has an older version, or none."""
        known = self.known.get(client, {})
        return frozenset(group for group, version in self.current.items() if known.get(group) != version)

    def _told(self, client: int) -> int:
        """Entries of the announcement that brings a client up to date."""
        missing, known, form = self.missing(client), self.known.get(client, {}), self.messages.wire.down
        news = self.messages.announcement(missing)
        whole = form is not None and form.changes_only and any(known.get(g) != self.current[g] - 1 for g in missing)
        return news.packing.size if whole else news.size

    def count(self, t: int, members: Sequence[int]) -> dict[str, int]:
        """Round t's up_parameters and down_parameters over its cohort, which from now on has the current versions.

        A round that is made again after a rank failure is counted once.
        """
        if self._latest[0] == t:
            return self._latest[1]
        messages = self.messages
        personal = messages.personal_coding.entries if messages.personal_coding else messages.per_client.size
        told: dict[int, int] = {}  # by the versions that clients have, which those of an earlier round share
        down = len(members) * (personal - ENGINE_DOWN)
        for k in members:
            key = id(self.known.get(k))
            if key not in told:
                told[key] = self._told(k)
            down += told[key]
        now = dict(self.current)
        self.known |= dict.fromkeys(members, now)
        self.current |= {group: self.current[group] + 1 for group in messages.groups(t)}
        self._latest = (
            t,
            {"up_parameters": len(members) * (messages.upload(t).size - ENGINE_UP), "down_parameters": down},
        )
        return self._latest[1]
