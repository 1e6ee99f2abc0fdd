"""Which files of the cache may be used: those that nobody else can have written or exchanged.

Whoever can write a library that a user loads can run any code as that user, and a file that a
crash or a disk has damaged can end the process. So tfscale uses a file of its cache only if

- the file, and all folders that lead to it, belong to the user or to root, and nobody else may
  write them. In a sticky folder, such as /tmp, others may write, but not exchange what is the
  user's. (OpenSSH's StrictModes asks for the same.)
- a checksum beside the file matches, if the file is code.

A file is opened once: what is read of it, or loaded, is what was checked.
"""

from __future__ import annotations

import functools
import grp
import hashlib
import os
import pwd
import stat
from pathlib import Path
from types import TracebackType

from tfscale.files import replacing

_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ACCESS_LIST = "system.posix_acl_access"


# -------------------------------------------------------------------------- folders


def doubt(path: Path) -> str:
    """Why somebody else may have written a folder or a file; empty if nobody can have."""
    return _doubt(path.lstat(), path)


def doubt_of_folders(folder: Path) -> str:
    """Why somebody else can exchange what is in a folder, by one of the folders that lead to it.

    Args:
        folder: without links in its path, as ``Path.resolve`` gives it.
    """
    for each in (folder, *folder.parents):
        if reason := _doubt(each.lstat(), each, leads=each != folder):
            return f"{each} {reason}"
    return ""


def keep_others_out(path: Path) -> None:
    """Take the right to write from all but the owner; raises ``OSError`` if that is not us."""
    mode = path.lstat().st_mode
    if mode & _OF_OTHERS and not stat.S_ISLNK(mode):
        path.chmod(stat.S_IMODE(mode) & ~_OF_OTHERS)


def _doubt(status: os.stat_result, path: Path | int, leads: bool = False) -> str:
    """Why others may have written a file or a folder of that status; ``leads``: to the cache."""
    owners = (0, os.geteuid(), *(_unknown_users() if leads else ()))
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    by_others = status.st_mode & _OF_OTHERS
    if by_others == stat.S_IWGRP and _is_of_one_user(status.st_gid) and not _has_list(path):
        by_others = 0
    if by_others and not sticky:
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


@functools.cache
def _is_of_one_user(group: int) -> bool:
    """Whether a group is the user's private one, of their name and with no other member: by the
    umask 002, which Ubuntu and Fedora have, that group may write all that the user makes.
    """
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = found.gr_name == user.pw_name and user.pw_gid == group
    members = {*found.gr_mem, *(each.pw_name for each in pwd.getpwall() if each.pw_gid == group)}
    return own and members <= {user.pw_name}


def _has_list(path: Path | int) -> bool:
    """Whether an access control list gives rights to more than the group."""
    try:
        return _ACCESS_LIST in os.listxattr(path)
    except OSError:  # of a file system that has none
        return False


def _unknown_users() -> tuple[int, ...]:
    """Whom the folders above belong to in a container that does not know the host's users.

    There (Apptainer, rootless Docker) also what belongs to the host's root shows as this user's.
    """
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return ()
        return (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except OSError:
        return ()


# ---------------------------------------------------------------------------- files


class OpenFile:
    """A file that is opened once, for all checks and for all uses; raises ``OSError``.

    Args:
        path: of the file, which is no link unless ``follow``.
        follow: whether a link will do.
    """

    def __init__(self, path: Path, follow: bool = False) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for its writer
        self._descriptor = os.open(path, flags | (0 if follow else os.O_NOFOLLOW))
        self._status = os.fstat(self._descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    @property
    def name(self) -> str:
        """A path that leads to this very file, while it is open, whatever takes its place.

        To the dynamic loader libraries of one name are one library: so the name has the process's
        number, unlike the usual /proc/self, and its user keeps the file open.
        """
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @functools.cached_property
    def content(self) -> bytes:
        """All that is in it, as it was at the first look."""
        with open(self._descriptor, "rb", closefd=False) as file:
            return file.read()

    def doubt(self) -> str:
        """Why somebody else may have written it, or could exchange it; empty if nobody could."""
        if not stat.S_ISREG(self._status.st_mode):
            return f"{self.path} is no file"
        if reason := _doubt(self._status, self._descriptor):
            return f"{self.path} {reason}"
        return doubt_of_folders(self.path.parent)

    def is_sound(self) -> bool:
        """Whether it is as it was sealed, by this user or by root, under this name."""
        try:
            with OpenFile(checksum_file(self.path)) as beside:
                return not (self.doubt() or beside.doubt()) and self._is_what(beside.content)
        except OSError:
            return False

    def is_damaged(self) -> bool:
        """Whether there is a checksum beside it, and it is another file's."""
        beside = checksum_file(self.path)
        return beside.is_file() and not self._is_what(beside.read_bytes())

    def _is_what(self, checksum: bytes) -> bool:
        return checksum.strip() == checksum_of(self.path.name, self.content).strip()


def seal(path: Path) -> None:
    """Write a file's checksum beside it; only so is it ``sound``."""
    with replacing(checksum_file(path), private=True) as fresh:
        fresh.write_bytes(checksum_of(path.name, path.read_bytes()))


def is_sound(path: Path) -> bool:
    """Whether a file is as it was sealed, by this user or by root, under this name."""
    try:
        with OpenFile(path) as file:
            return file.is_sound()
    except OSError:
        return False


def checksum_file(path: Path) -> Path:
    """Where a file's checksum is kept."""
    return path.with_name(f"{path.name}.sha256")


def checksum_of(name: str, content: bytes) -> bytes:
    """What the checksum file of a file holds: the checksum is of the name, too, since one file of
    the cache must not stand for another.
    """
    return hashlib.sha256(name.encode() + b"\n" + content).hexdigest().encode() + b"\n"
