"""Ask the Hub again where it is busy: a few times, and as late as it asks for.

`huggingface_hub` repeats the requests for files, but neither those for listings nor most that
write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
BUSY = (429, 500, 502, 503, 504)
TRIES = 5
LONGEST = 60.0  # seconds between two tries, however late the Hub asks for


def patiently(call: Callable[[], T], sleep: Callable[[float], object] = time.sleep) -> T:
    """Return what `call` returns, trying again while the Hub answers that it is busy.

    The waits are 1, 2, 4 and 8 seconds, or what the answer's Retry-After says. What is raised at
    the last try, and any other exception, is the caller's.
    """
    for wait in (2.0**n for n in range(TRIES - 1)):
        try:
            return call()
        except Exception as error:
            if status_of(error) not in BUSY:
                raise
            sleep(min(_asked(error, wait), LONGEST))
    return call()


def status_of(error: object) -> int:
    """Return the HTTP status of the answer that an exception is about; 0 without one."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _asked(error: object, otherwise: float) -> float:
    """Return the seconds in the answer's Retry-After, which may also be a date."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    value = str(headers.get("Retry-After", ""))
    return float(value) if value.isdecimal() else otherwise
