"""The exception for mistakes that a user can correct, and the exit code of runs that should be started again."""

RESTART_LATER = 75  # BSD's EX_TEMPFAIL: the run was stopped by a signal and can be resumed


class UserError(Exception):
    """A mistake that the user can correct. Its message is printed without a traceback, and the exit code is 2.

    The message contains the fault, its place, the value, the allowed values and the remedy.

    Args:
        has_context: whether the message names the round and the client.
        has_source_line: whether the message names a line of the user's code, or needs none.
    """

    def __init__(self, text: str, has_context: bool = False, has_source_line: bool = False) -> None:
        super().__init__(text)
        self.has_context, self.has_source_line = has_context, has_source_line


class MissingDataError(UserError):
    """The error for missing data files, raised if no other mistake is known."""


class RankWarning(UserWarning):
    """A warning that is shown on every rank. Other warnings are shown on rank 0 only, because all ranks issue them."""
