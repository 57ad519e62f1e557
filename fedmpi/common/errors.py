"""The exception for mistakes that a user can correct, and the exit code of runs that can be resumed."""

RESTART_LATER = 75  # BSD's EX_TEMPFAIL: the run was stopped by a signal and can be resumed


class UserError(Exception):
    """A mistake that the user can correct; its message is printed without a traceback, and the exit code is 2.

    The message says what is wrong and where, and names the value, the allowed values and the remedy.

    Args:
        has_context: whether the message names the round and the client.
        has_source_line: whether the message already names a line of the user's code, or needs none.
    """

    def __init__(self, text: str, has_context: bool = False, has_source_line: bool = False) -> None:
        super().__init__(text)
        self.has_context, self.has_source_line = has_context, has_source_line


class MissingDataError(UserError):
    """Raised if data files are missing; other mistakes in a config are reported first."""


class RankWarning(UserWarning):
    """A warning that is shown on every rank; other warnings are the same on all ranks, and are shown only on rank 0."""
