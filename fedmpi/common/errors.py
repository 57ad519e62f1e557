"""The error for mistakes that a user can correct, and the exit code that asks for a new start."""

RESTART_LATER = 75  # BSD's EX_TEMPFAIL: stopped by a signal; starting again would help


class UserError(Exception):
    """A mistake that the user can correct; it is printed as it stands and ends the run with exit code 2.

    The message says what is wrong, where, the value, what is allowed and the remedy. placed: it names the round and
    client; located: it names a line of the user's code, or needs none.
    """

    def __init__(self, text: str, placed: bool = False, located: bool = False) -> None:
        super().__init__(text)
        self.placed, self.located = placed, located


class MissingDataError(UserError):
    """Data files are missing; nothing else need be wrong."""


class RankWarning(UserWarning):
    """A warning that any rank shows. Other warnings are shown on rank 0 only, as all ranks have the same."""
