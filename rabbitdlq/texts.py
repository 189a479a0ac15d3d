"""Texts for wires, logs and terminals: always valid UTF-8, never longer than there is room for."""

__all__ = ["printable", "shorten"]


def printable(text: str) -> str:
    r"""The text with bytes that were not UTF-8 written as ``\xff``, safe for logs, JSON and terminals."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half a surrogate pair, as JSON can write one: not a byte of anybody's
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text: str, limit: int, mark: str = " …[cut]") -> str:
    """The text in at most ``limit`` bytes of UTF-8, cut between two characters and marked as cut.

    >>> shorten("Größe", 100)
    'Größe'
    >>> shorten("ä" * 100, 20)
    'äääää …[cut]'
    """
    if len(text) <= limit and text.isascii():
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode("utf-8")
    tail = mark.encode()
    if limit < len(tail):
        return data[: max(limit, 0)].decode("utf-8", "ignore")
    return data[: limit - len(tail)].decode("utf-8", "ignore") + mark
