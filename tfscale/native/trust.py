"""Trust in files of the cache: only files that nobody else can have written or exchanged.

Whoever can write a library that a user loads can run any code as that user, and a file that a
crash or a disk has damaged can end the process. So tfscale uses a file of its cache only if

- the file, and all folders that lead to it, belong to the user or to root, and nobody else may
  write them. In a sticky folder, such as /tmp, others may write, but cannot exchange the user's
  files. (OpenSSH's StrictModes has the same rule.)
- a checksum beside the file matches, if the file is code.

tfscale opens a file only once, so that it reads or loads exactly the content that it has checked.
"""

from __future__ import annotations

import functools
import grp
import hashlib
import os
import pwd
import stat
from pathlib import Path

from tfscale.support.files import replacing

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ACCESS_LIST = "system.posix_acl_access"


# -------------------------------------------------------------------------- folders


def doubt_of_folders(folder: Path) -> str:
    """Return why somebody else can exchange files in a folder; empty if nobody can.

    The reason can be the folder itself or a folder that leads to it.

    Args:
        folder: path without links, as ``Path.resolve`` returns.
    """
    for each in (folder, *folder.parents):
        if reason := _doubt(each.lstat(), each, leads=each != folder):
            return f"{each} {reason}"
    return ""


def keep_others_out(path: Path) -> None:
    """Forbid everybody but the owner to write; raise ``OSError`` if this user is not the owner."""
    mode = path.lstat().st_mode
    if mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(mode):
        path.chmod(stat.S_IMODE(mode) & ~_WRITABLE_BY_OTHERS)


def _doubt(status: os.stat_result, path: Path | int, leads: bool = False) -> str:
    """Return why others may have written a file or a folder with this status.

    ``leads`` says whether the path is a folder above the cache's folder.
    """
    owners = (0, os.geteuid(), *(_unknown_users() if leads else ()))
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    by_others = status.st_mode & _WRITABLE_BY_OTHERS
    if by_others == stat.S_IWGRP and _is_of_one_user(status.st_gid) and not _has_list(path):
        by_others = 0
    if by_others and not sticky:
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


@functools.cache
def _is_of_one_user(group: int) -> bool:
    """Return whether a group is the user's private group.

    Such a group has the user's name and no other member. With the umask 002, the default of Ubuntu
    and Fedora, this group may write all files that the user makes.
    """
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = found.gr_name == user.pw_name and user.pw_gid == group
    members = {*found.gr_mem, *(each.pw_name for each in pwd.getpwall() if each.pw_gid == group)}
    return own and members <= {user.pw_name}


def _has_list(path: Path | int) -> bool:
    """Return whether an access control list gives rights to others than the group."""
    try:
        return _ACCESS_LIST in os.listxattr(path)
    except OSError:  # this file system has no such lists
        return False


def _unknown_users() -> tuple[int, ...]:
    """Return the user whom a container shows as the owner of files of the host's other users.

    In such a container (Apptainer, rootless Docker), files of the host's root have this owner, too.
    """
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return ()
        return (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except OSError:
        return ()


# ---------------------------------------------------------------------------- files


class OpenFile:
    """File that is opened once, for all checks and all uses; opening may raise ``OSError``.

    Args:
        path: path of the file; it must not be a link unless ``follow``.
        follow: whether the path may be a link.
    """

    def __init__(self, path: Path, follow: bool = False) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # else a pipe waits for its writer
        self._descriptor = os.open(path, flags | (0 if follow else os.O_NOFOLLOW))
        self._status = os.fstat(self._descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    @property
    def name(self) -> str:
        """Path that leads to this file while it is open, even if another file takes its place.

        The dynamic loader treats libraries of one name as one library. So this name contains the
        process's number, unlike the usual /proc/self, and users of the name keep the file open.
        """
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @functools.cached_property
    def content(self) -> bytes:
        """Content of the file at the first access of this attribute."""
        with open(self._descriptor, "rb", closefd=False) as file:
            return file.read()

    def doubt(self) -> str:
        """Return why somebody else may have written or could exchange the file; empty if nobody."""
        if not stat.S_ISREG(self._status.st_mode):
            return f"{self.path} is not a regular file"
        if reason := _doubt(self._status, self._descriptor):
            return f"{self.path} {reason}"
        return doubt_of_folders(self.path.parent)

    def is_sound(self) -> bool:
        """Return whether the file is unchanged since this user or root sealed it by this name."""
        try:
            with OpenFile(checksum_file(self.path)) as beside:
                return not (self.doubt() or beside.doubt()) and self._has_checksum(beside.content)
        except OSError:
            return False

    def is_damaged(self) -> bool:
        """Return whether there is a checksum beside the file that does not match."""
        beside = checksum_file(self.path)
        return beside.is_file() and not self._has_checksum(beside.read_bytes())

    def _has_checksum(self, checksum: bytes) -> bool:
        return checksum.strip() == checksum_of(self.path.name, self.content).strip()


def seal(path: Path) -> None:
    """Write a file's checksum beside it, without which the file is not ``sound``."""
    with replacing(checksum_file(path), private=True) as fresh:
        fresh.write_bytes(checksum_of(path.name, path.read_bytes()))


def is_sound(path: Path) -> bool:
    """Return whether a file is unchanged since this user or root sealed it by this name."""
    try:
        with OpenFile(path) as file:
            return file.is_sound()
    except OSError:
        return False


def checksum_file(path: Path) -> Path:
    """Return the path of a file's checksum."""
    return path.with_name(f"{path.name}.sha256")


def checksum_of(name: str, content: bytes) -> bytes:
    """Return the content of a file's checksum file.

    The checksum covers the name, too, so that a file of the cache cannot stand for another.
    """
    return hashlib.sha256(name.encode() + b"\n" + content).hexdigest().encode() + b"\n"
