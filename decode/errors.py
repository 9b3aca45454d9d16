"""The one exception that a user sees."""


class UserError(Exception):
    """A mistake of the user or of their files. One line: what is wrong, where, and the mend."""


def one_line(error: object, limit: int = 300) -> str:
    """What another library's error says, on one line and short enough to quote inside a line of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
