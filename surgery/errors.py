"""The exceptions that users see: what failed, with the value seen, and what to do about it."""


class SurgeryError(Exception):
    """A known failure.

    The command line prints both lines and exits with code 1.

    Args:
        message: what failed, with the value seen.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SurgeryError):
    """A contradiction between options, or between an option and the model; exits with code 2."""


def first_line(e: BaseException) -> str:
    """Return the first line of another library's message, cut where it is long, and its type."""
    return f"{(str(e).splitlines() or [''])[0][:160]} ({type(e).__name__})"


class ReportedElsewhere(Exception):  # noqa: N818 - the error itself is reported by rank 0
    """Raised on a non-zero rank to end it in silence, because rank 0 prints the cause."""
