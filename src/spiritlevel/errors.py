"""The two exceptions of the library, and the sentences that name the nearest right word.

Every message says who complains, what was expected, and what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """The caller passed something that cannot be measured; the message names the culprit and the way out."""


class NotExactError(ValueError):
    """An exact answer was demanded where the network does not allow one; the message names the operation in the way."""


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> InputError:
    """An `InputError` for an unknown name that lists the nearest known ones.

    >>> print(unknown_name("data set", "mnits", ["mnist", "digits"]))
    unknown data set 'mnits': did you mean 'mnist'? Known: digits, mnist.
    """
    known = sorted(choices)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.6)
    hint = f" did you mean {' or '.join(repr(word) for word in near)}?" if near else ""
    if near and len(known) > 20:  # a page of names would hide the right one
        return InputError(f"unknown {kind} {str(name)!r}:{hint}")
    return InputError(f"unknown {kind} {str(name)!r}:{hint} Known: {', '.join(known)}.")
