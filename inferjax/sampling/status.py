"""The bits by which compiled code reports what went wrong with a row."""

import enum


class Status(enum.IntFlag):
    """Problems of one row, 0 for none; the host turns them into an error for that request."""

    OK = 0
    NAN_LOGITS = 1
    BAD_SAMPLING = 2
    ALL_MASKED = 4
    BAD_TOKEN = 8
    OUT_OF_PAGES = 16
    EMPTY_PROMPT = 32
    BAD_LENGTH = 64
    TOO_LONG = 128
