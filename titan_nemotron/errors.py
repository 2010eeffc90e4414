"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """A mistake in a configuration, a file or an argument.

    The message is one line for each mistake; it names the key or the file, the value found, and what to do.
    Commands print it without a traceback and exit with status 2.
    """
