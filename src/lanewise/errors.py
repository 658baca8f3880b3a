"""The one error a user can cause, and the exit codes every verb keeps to."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2  # the user's input is wrong: one clear line, no traceback
EXIT_RESUMABLE = 75  # stopped early, resumable (sysexits.h EX_TEMPFAIL)


class UserError(ValueError):
    """The input is wrong. The message is one line: what is wrong, then the remedy."""
