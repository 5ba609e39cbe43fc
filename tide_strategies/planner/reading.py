"""Read a file that somebody names on a command line: a regular one of bounded size, as data."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from tide_strategies.errors import TideConfigError

#: A model's config or a machine's rates are a few KiB.
MOST_BYTES = 16 << 20


def read_bytes(file: Path, most: int) -> bytes:
    """What is in ``file``.

    Raises:
        OSError: it cannot be read.
        TideConfigError: it is no regular file, or has more than ``most`` bytes.
    """
    # A pipe in the place of a file must not hold anybody up.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise TideConfigError(f"no regular file, or one of more than {most} bytes")
        return opened.read(most)


def read_json(file: Path, what: str, most: int = MOST_BYTES) -> Any:
    """The value in ``file``, which is to be ``what``, in words.

    Raises:
        TideConfigError: it cannot be read, is no regular file, has more than ``most`` bytes, or is not JSON.
    """
    try:
        return json.loads(read_bytes(file, most))
    except TideConfigError as e:
        raise TideConfigError(f"cannot read {what} from {file}: {e}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise TideConfigError(f"cannot read {what} from {file}: {type(e).__name__}: {e}") from None
