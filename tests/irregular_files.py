"""What stands in a file's place without being one: readers must not wait for it."""

import os
from pathlib import Path

IRREGULAR = ("pipe", "folder", "link to itself", "device")


def replace_by(kind: str, file: Path) -> None:
    """Put something of a kind of `IRREGULAR` in the place of `file`."""
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "link to itself":
            file.symlink_to(file)
        case _:
            file.symlink_to("/dev/zero")
