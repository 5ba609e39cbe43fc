"""Read a JSON file that somebody names on a command line: a regular file of bounded size, as data."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from tide_strategies.errors import TideConfigError

#: A model's config or a machine's rates are a few KiB.
MOST_BYTES = 16 << 20


def read_json(file: Path, what: str) -> Any:
    """The value in ``file``, which is to be ``what``, in words.

    Raises:
        TideConfigError: it cannot be read, is no regular file, has more than :data:`MOST_BYTES`, or is not JSON.
    """
    try:
        # A pipe in the place of a file must not hold anybody up.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
                raise TideConfigError(
                    f"cannot read {what} from {file}: no regular file, or one of more than {MOST_BYTES} bytes"
                )
            return json.loads(opened.read(MOST_BYTES))
    except TideConfigError:
        raise
    except (OSError, ValueError, RecursionError) as e:
        raise TideConfigError(f"cannot read {what} from {file}: {type(e).__name__}: {e}") from None
