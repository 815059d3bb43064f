"""The two exceptions of the library, and the sentences that many modules share.

Every message says who complains, what was expected, and what to do instead.
"""

from __future__ import annotations

import contextlib
import difflib
import numbers
import os
import random
import re
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast


class InputError(ValueError):
    """The caller passed something that cannot be measured; the message names the culprit and the way out."""


class NotExactError(ValueError):
    """An exact answer was demanded where the network does not allow one; the message names the operation in the way."""


LARGEST_SEED = 4_000_000_000  # NumPy and scikit-learn end at 2³² − 1; the rest is room for seeds counted up from one

_OWN = f"{Path(__file__).resolve().parent}{os.sep}"
_PYTHON = f"{Path(os.__file__).resolve().parent}{os.sep}"
_QUOTED = (str, bytes, numbers.Number, Mapping, Sequence, frozenset, set, os.PathLike)
_QUOTES = ("'", '"')

# Other people's names for the losses known here.
_OTHER_NAMES = {
    "mse": "squared_error",
    "mse_loss": "squared_error",
    "l2": "squared_error",
    "ce": "cross_entropy",
    "nll": "cross_entropy",
    "softmax": "cross_entropy",
    "bce": "binary_cross_entropy",
    "logistic": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy",
    "multilabel": "binary_cross_entropy",
    "lm": "causal_lm",
    "language_model": "causal_lm",
    "smooth_l1": "huber",
    "poisson_nll": "poisson",
}


def checked_seed(seed: object, name: str = "seed") -> int:
    """A seed that every random generator accepts, as an `int`; any kind of whole number will do.

    >>> checked_seed(-1, "--seed")
    Traceback (most recent call last):
    spiritlevel.errors.InputError: --seed must be a whole number from 0 to 4,000,000,000, got -1.
    """
    if is_array(seed) and cast(Any, seed).shape == ():  # one number that a generator drew
        seed = cast(Any, seed).item()
    return whole_number(seed, name, 0, LARGEST_SEED)


def whole_number(value: object, name: str, least: int | None = None, most: int | None = None) -> int:
    """A whole number of any kind, NumPy's too, as an `int`; neither a truth value nor a tensor counts as one.

    >>> whole_number(0, "batch_size", 1)
    Traceback (most recent call last):
    spiritlevel.errors.InputError: batch_size must be a whole number of at least 1, got 0.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        number = int(value)
        if (least is None or number >= least) and (most is None or number <= most):
            return number
    limits = "" if least is None else f" of at least {least:,}" if most is None else f" from {least:,} to {most:,}"
    raise InputError(f"{name} must be a whole number{limits}, got {shown(value)}.")


def shown(value: object) -> str:
    """A value as a message quotes it: short, on one line, and never the contents of a tensor.

    >>> shown("a" * 100), shown(object), shown(iter([]))
    ("'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa …'", 'object', 'an object of type list_iterator')
    """
    if is_array(value):
        shape = tuple(cast(Any, value).shape)
        return f"a {'tensor' if hasattr(value, 'requires_grad') else 'NumPy array'} of shape {shape}"
    if isinstance(value, type):
        return value.__name__
    if value is not None and not isinstance(value, _QUOTED):
        return f"an object of type {type(value).__name__}"
    try:
        text = " ".join(printable(repr(value)).split())
    except Exception:  # a user's own class inside, or a number with more digits than Python will write
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:58]} …{text[0] if text[0] in _QUOTES else ''}"


def is_array(value: object) -> bool:
    """Whether the value is a tensor or an array, and not a NumPy number."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, numbers.Number)


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "job"), counted(1200, "job")
    ('1 job', '1,200 jobs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def enumerated(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> enumerated(["a", "b", "c"]), enumerated(["a"])
    ('a, b and c', 'a')
    """
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def first_line(error: BaseException) -> str:
    r"""The first line of what an exception says, without the page that may follow.

    >>> first_line(RuntimeError("mat1 and mat2 cannot be multiplied.\nSee the trace below."))
    'mat1 and mat2 cannot be multiplied'
    >>> first_line(OSError(28, "No space left on device", "run/part", None, "run/report.html"))
    'No space left on device: run/part'
    """
    try:
        text = str(error)
        if isinstance(error, OSError) and error.strerror:  # without its number and the second file of a rename
            text = error.strerror if error.filename is None else f"{error.strerror}: {os.fspath(error.filename)}"
    except Exception:  # a user's own exception, which fails to print itself
        text = f"{type(error).__name__}, which cannot be shown"
    return textwrap.shorten(text.strip().split("\n", 1)[0].rstrip("."), 200, placeholder=" …")


def named_error(error: BaseException) -> str:
    """What went wrong and where in the user's file; the kind of error comes first, since its text may say nothing.

    >>> named_error(KeyError("width"))
    "KeyError: 'width'"
    """
    text = first_line(error)
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + place_of(error)


def place_of(error: BaseException) -> str:
    """The line of the user's own file in which an error arose, in brackets; nothing if it arose in a library.

    That is the last line outside installed packages, Python's own modules and this library.
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(("<", _OWN)) and "site-packages" not in file and not file.startswith(_PYTHON):
            found = f" ({Path(file).name}, line {line})"
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, in any of the ways in which Python and PyTorch say it.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("mat1 and mat2 cannot be multiplied"))
    (True, False)
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    told = first_line(error).lower() if isinstance(error, RuntimeError) else ""
    return "allocate memory" in told or "out of memory" in told or "defaultcpuallocator" in told


# What only parts of the library need: the package to import, its name for pip, and the extra that brings it.
OPTIONAL = {
    "PIL": ("pillow", "report"),
    "altair": ("altair", "report"),
    "datasets": ("datasets", "integrations"),
    "jinja2": ("jinja2", "report"),
    "lightning": ("lightning", "integrations"),
    "polars": ("polars", "report"),
    "pooch": ("pooch", "cli"),
    "ray": ("ray", "cluster"),
    "rich": ("rich", "cli"),
    "timm": ("timm", "timm"),
    "transformers": ("transformers", "integrations"),
    "tyro": ("tyro", "cli"),
    "vl_convert": ("vl-convert-python", "report"),
}


@contextlib.contextmanager
def needs(purpose: str) -> Iterator[None]:
    """Around imports: if a package of an extra is missing, say so in one sentence with the command that installs it.

    Python's random state stays as it was: rich, which scikit-learn imports, draws from it while it is imported.

    >>> with needs("a table"):
    ...     raise ModuleNotFoundError(name="polars")
    Traceback (most recent call last):
    spiritlevel.errors.InputError: a table needs polars, which is not installed: run pip install 'spiritlevel[report]'.
    """
    before = random.getstate()
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        package, extra = OPTIONAL[error.name]
        raise InputError(
            f"{purpose} needs {package}, which is not installed: run pip install 'spiritlevel[{extra}]'."
        ) from error
    finally:
        random.setstate(before)


_NAMES = 40  # shown of a long list; twice as many are still a list that can be read


def unknown_name(
    kind: str, name: object, choices: Iterable[str], others: Mapping[str, str] = _OTHER_NAMES
) -> InputError:
    """An `InputError` for an unknown name that lists the nearest known ones, or what others mean by it.

    A library's thousand names are not printed: a list that long begins and is counted.

    >>> print(unknown_name("data set", "mnits", ["mnist", "digits"]))
    unknown data set 'mnits': did you mean 'mnist'? Known: digits, mnist.
    >>> print(unknown_name("loss", "MSE", ["cross_entropy", "squared_error"]))
    unknown loss 'MSE': did you mean 'squared_error'? Known: cross_entropy, squared_error.
    >>> str(unknown_name("layer", "head", (f"block{i:03}" for i in range(1_000))))[-22:]
    'block039 and 960 more.'
    """
    known = sorted(choices)
    other = others.get(str(name).casefold())
    near = [other] if other in known else difflib.get_close_matches(str(name), known, n=3, cutoff=0.6)
    hint = f": did you mean {' or '.join(repr(word) for word in near)}?" if near else "."
    if near and len(known) > 20:  # a page of names would hide the right one
        return InputError(f"unknown {kind} {str(name)!r}{hint}")
    more = f" and {len(known) - _NAMES:,} more" if len(known) > 2 * _NAMES else ""
    names = ", ".join(known[:_NAMES] if more else known)
    return InputError(f"unknown {kind} {str(name)!r}{hint} Known: {names}{more}.")


# Control characters except tab and line feed, marks that change the direction of writing, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""A text from elsewhere, made safe to show: no terminal obeys it, and it can be written in UTF-8.

    >>> print(printable("\x1b[31mred\x07"), printable("caf\udce9"), printable("λ₁ × 2"))
    \x1b[31mred\x07 caf\xe9 λ₁ × 2
    """

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        code -= 0xDC00 if 0xDC80 <= code <= 0xDCFF else 0  # how Python keeps a byte of a name that is not UTF-8
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _UNPRINTABLE.sub(escaped, text)
