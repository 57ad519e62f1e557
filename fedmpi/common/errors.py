"""The one error for mistakes that the user can correct, and the exit code of who is to be started again."""

RESTART_LATER = 75  # BSD's EX_TEMPFAIL: stopped by a signal; starting again would help


class UserError(Exception):
    """A mistake that the user can correct; it is printed as it stands and ends the run with exit code 2.

    The message says what is wrong, where, the value, what is allowed and the remedy.
    """


class MissingDataError(UserError):
    """Data that are not where they are looked for; all else may be right."""


class RankWarning(UserWarning):
    """A warning that any rank may have to tell; of others only rank 0's are shown, as all would say the same."""
