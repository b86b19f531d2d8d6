"""Exit codes, and the errors that the user of the command can do something about."""

FOUND_BAD = 1  # verify found a bad file; explain, that the two do not share
NOT_THERE = 1  # p2p ping and status: no engine answers
USAGE = 2
INCOMPLETE = 3  # something could not be read or removed


class UserError(Exception):
    """What was asked for cannot be done; one line that names the path and says what to do."""
