"""The one exception users see: what failed with the value seen, and what to do about it."""


class SurgeryError(Exception):
    """A known failure. `message` says what failed and the value seen; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ReportedElsewhere(Exception):  # noqa: N818 - no error of its own
    """This process of several ends, and the first of them says why."""


class UsageError(SurgeryError):
    """The options contradict each other or the model; the command line exits 2 for it."""
