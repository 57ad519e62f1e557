"""The one error that is the user's to mend."""


class UserError(Exception):
    """A mistake that its user can mend: printed as it stands (what, where, value, allowed, remedy); exit code 2, no
    traceback.
    """
