"""The one exception that a user sees."""


class UserError(Exception):
    """A mistake of the user or of their files. One line: what is wrong, where, and the mend."""
