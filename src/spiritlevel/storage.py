"""Files that several processes may read or want to write at once: whole files, locks, keys of configs, the cache.

Whatever is written appears whole or not at all, even if the process is killed, and the system frees a lock when its
holder dies. Knows nothing of tensors, so it costs nothing to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spiritlevel.errors import InputError

_POLL_SECONDS = 0.2


def fingerprint(text: str) -> str:
    """Twelve hex digits that no other text has, except by design.

    >>> fingerprint("1.0"), fingerprint("1.1")
    ('d0ff5974b6aa', 'b05e244762b1')
    """
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]


def write_atomically(path: str | Path, content: str | bytes) -> None:
    r"""Write `content` so that a reader sees the old file or the whole new one, never a part.

    The file gets the permissions of any new file, or keeps those it has. A link is followed; what is not a file, such
    as a pipe or /dev/stdout, is written to directly. Texts are written as UTF-8; a byte of a name that is not UTF-8,
    which Python keeps as half a character, becomes an escape such as \udce9, which JSON and JavaScript read back.
    """
    write_together({path: content})


def _about(path: Path, error: OSError) -> OSError:
    """The same error, naming the file that was asked for alone."""
    error.filename = str(path)
    del error.filename2  # None would be printed as a second name
    return error


def write_together(contents: Mapping[Any, str | bytes]) -> None:
    """Write several files of one folder, by path, so that a reader finds all the old ones or all the new ones.

    All are written before the first takes its place, so a full disk changes nothing; of two processes that write the
    same files, one goes first. Only a kill or a crash between two renames can leave them of different ages.
    """
    staged: dict[Path, Path] = {}
    try:
        for name, content in contents.items():
            path = Path(name).resolve()
            if path.is_dir():
                raise InputError(f"{str(name) or '.'!r} is a folder; name a file in it.")
            data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
            try:
                if temporary := _stage(path, data):
                    staged[path] = temporary
            except OSError as error:  # a full disk names no file, other errors the temporary one
                raise _about(path, error) from None
        with _one_at_a_time(next(iter(staged)).parent) if len(staged) > 1 else contextlib.nullcontext():
            for path, temporary in staged.items():
                try:
                    temporary.replace(path)
                except OSError as error:
                    raise _about(path, error) from None
    except BaseException:
        for temporary in staged.values():
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise


def _stage(path: Path, data: bytes) -> Path | None:
    """The finished file beside its destination; None for what is not a file, which is written to directly."""
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(data)
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return temporary


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A lock on the folder itself while files are renamed; nothing where the system has no locks."""
    descriptor = None
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def check_readable(path: str | Path) -> None:
    """Refuse what cannot be read as a file, and say why: a file that may not be read is neither missing nor damaged.

    >>> check_readable("nowhere.pt")
    Traceback (most recent call last):
    spiritlevel.errors.InputError: there is no file 'nowhere.pt'.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb"):
                return
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"there is no file {str(path)!r}.") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"the file {str(path)!r} cannot be read: {reason}.") from error
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise InputError(f"{str(path)!r} is {kind}, but a file is needed.")


@contextmanager
def lock(
    folder: str | Path, *, waiting: Callable[[], None] | None = None, seconds: float | None = None, name: str = ".lock"
) -> Iterator[bool]:
    """Let one process at a time into `folder`, which is made if need be; the others wait for their turn.

    The lock dies with its holder, however that ends, so a left-over lock file means nothing. It also holds between
    threads of one process, but is not reentrant.

    Args:
        folder: The folder to own, or to own a part of.
        waiting: Called again and again while another process holds the lock.
        seconds: Give up after this long. Default: wait forever.
        name: The lock file in the folder; another name is another lock.

    Yields:
        Whether the lock is held: False after `seconds`, or where the system or its file system has no locks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, lock(folder) as held:
    ...     held
    True
    """
    folder, held = Path(folder), False
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
    with (folder / name).open("ab") as file:
        if sys.platform != "win32":
            import fcntl

            while not held:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        break
                    if waiting:
                        waiting()
                    time.sleep(_POLL_SECONDS)
                except OSError:  # a file system without locks
                    break
        yield held


def plain(config: Any) -> Any:
    """A config as plain JSON values: dataclasses become dicts with the name of their class, tuples become lists.

    >>> plain({"sizes": (1, 2), "rate": 0.1})
    {'sizes': [1, 2], 'rate': 0.1}
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {"class": type(config).__name__, **fields}
    if isinstance(config, Mapping):
        if not all(isinstance(key, str) for key in config):
            raise InputError(f"the keys of a config must be strings, got {sorted(map(repr, config))}.")
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    if isinstance(config, Path):
        return str(config)
    if config is None or isinstance(config, str | bool | int | float):
        return config
    raise InputError(f"a config holds strings, numbers, lists and dataclasses of them, got a {type(config).__name__}.")


def digest(config: Any, length: int = 16) -> str:
    """A short name for a config: the first `length` hex digits of the SHA-256 of its JSON form, keys sorted.

    Equal configs have equal digests in every process and on every machine.

    >>> digest({"a": 1, "b": (2, 3)}) == digest({"b": [2, 3], "a": 1})
    True
    >>> len(digest({"a": 1})), digest({"a": 1}) == digest({"a": 1.0})
    (16, False)
    """
    text = json.dumps(plain(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:length]


def cache_folder() -> Path:
    """Where downloads and trained networks are kept: `SPIRITLEVEL_CACHE`, by default the platform's cache folder.

    >>> isinstance(cache_folder(), Path)
    True
    """
    if os.environ.get("SPIRITLEVEL_CACHE"):
        return Path(os.environ["SPIRITLEVEL_CACHE"]).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("spiritlevel")
