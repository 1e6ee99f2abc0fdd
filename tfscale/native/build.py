"""Builds the native library for the TensorFlow that is installed, once per machine.

TensorFlow promises no stable C++ interface between its versions, so a library fits only one
version. tfscale looks for the library in these places, in this order:

1. the file that `TFSCALE_LIBRARY` names;
2. `libtfscale.so` in the package's folder, where an image may have put the library;
3. the package's own library for this version of TensorFlow, if its wheel holds libraries;
4. the cache. If it has no library, tfscale compiles the C++ sources that it carries.

A library has a tag, readable without loading the library, which says what it was built for.
tfscale never loads a library that does not fit: in the first two places such a library is an
error, in the others tfscale builds another one. tfscale uses a file of the cache only if nobody
else can have written the file and a matching checksum is beside it (``trust.py``); otherwise
tfscale builds the file again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tfscale.native import shipped, trust
from tfscale.native.toolchain import (
    LIBRARY,
    PACKAGE,
    BuildError,
    Compiler,
    Sources,
    TensorFlow,
    find_compiler,
    find_sources,
    find_tensorflow,
    run_compiler,
)
from tfscale.native.units import Unit, find_units, write_generated
from tfscale.support import messages
from tfscale.support.files import PRIVATE_FILE, make_private_folder, private_opener, replacing

# No flag may change a result. -fno-math-errno does not change numbers, and without it the compiler
# cannot vectorise loops with square roots, since sqrt may set errno.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-DNDEBUG",
    "-pthread",
)
_TAG = b"tfscale-build: "
_WAIT_SECONDS = 3600
_OBJECT_DAYS = 14
_LIBRARIES_KEPT = 16
_BYTES_PER_COMPILER = 1_500_000_000

_threads_of_this_process = threading.Lock()


# ------------------------------------------------------------------------- tags


def make_tag(tf: TensorFlow, sources: Sources) -> dict[str, str]:
    """Return the tag that a library must have to fit this TensorFlow, machine and tfscale."""
    return {
        "tensorflow": tf.version,
        "tensorflow-git": tf.git_version,
        "abi": ",".join(tf.abi_flags) or "default",
        "machine": platform.machine(),
        "sources": sources.short_hash(),
    }


def read_tag(library: Path) -> dict[str, str] | None:
    """Return the tag of a library; None if it has none."""
    return _tag_in(library.read_bytes())


def _tag_in(content: bytes) -> dict[str, str] | None:
    start = content.find(_TAG)
    if start < 0:
        return None
    text = content[start + len(_TAG) : content.find(b"\0", start)].decode(errors="replace")
    return dict(item.split("=", 1) for item in text.split(";") if "=" in item)


def _tag_unit(tag: dict[str, str]) -> str:
    text = _TAG.decode() + ";".join(f"{key}={value}" for key, value in tag.items())
    literal = text.replace("\\", "\\\\").replace('"', '\\"')
    return (
        'extern "C" {\n'
        'extern const char tfscale_build_tag[] __attribute__((used, visibility("default")));\n'
        f'const char tfscale_build_tag[] = "{literal}";\n'
        "}\n"
    )


def check_fits(library: Path, tag: dict[str, str]) -> None:
    """Raise ``BuildError`` unless the library was built for `tag`."""
    _opened_if_it_fits(library, tag).close()


def misfit(library: Path, tag: dict[str, str]) -> str:
    """Return why a library does not fit where one for `tag` is needed; empty if it fits."""
    with _opened(library) as file:
        return _misfit(file, tag)


def _opened_if_it_fits(library: Path, tag: dict[str, str]) -> trust.OpenFile:
    file = _opened(library)
    try:
        if reason := _misfit(file, tag):
            raise BuildError(f"{reason}\n{_advice(file.path)}")
    except BaseException:
        file.close()
        raise
    return file


def _opened(library: Path) -> trust.OpenFile:
    """Open a library that was built ahead; raise ``BuildError`` if there is none."""
    if not library.is_file():
        raise BuildError(
            f"there is no library at {library}.\n"
            "TFSCALE_LIBRARY must name a file made by `tfscale build --out DIR`; unset it to let "
            "tfscale build its own."
        )
    return trust.OpenFile(library, follow=True)


def _misfit(file: trust.OpenFile, tag: dict[str, str]) -> str:
    library = file.path
    if file.is_damaged():
        return (
            f"{library} is damaged: its content does not have the checksum in "
            f"{trust.checksum_file(library)}."
        )
    found = _tag_in(file.content)
    if found is None:
        return (
            f"{library} was not made by `tfscale build`, or is damaged: it does not say which "
            "TensorFlow it is for."
        )
    differences = [key for key in tag if found.get(key) != tag[key]]
    if not differences:
        return ""
    lines = [f"  {k}: built for {found.get(k)}, here it is {tag[k]}" for k in differences]
    what = "another TensorFlow" if differences != ["sources"] else "another version of tfscale"
    if "machine" in differences:
        what = "another kind of machine"
    return f"{library} was built for {what}:\n" + "\n".join(lines)


def _advice(library: Path) -> str:
    remove = f"remove {library}" if library.parent == PACKAGE else "unset TFSCALE_LIBRARY"
    return (
        "Build it again where TensorFlow and tfscale are the same as here, with "
        f"`tfscale build --out DIR`; or {remove} to let tfscale build its own."
    )


# ------------------------------------------------------------------------ cache


def cache_folder() -> Path:
    """Return $TFSCALE_CACHE, else $XDG_CACHE_HOME/tfscale, else ~/.cache/tfscale."""
    if asked := os.environ.get("TFSCALE_CACHE"):
        return Path(asked).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "tfscale"
    return Path(os.path.expanduser("~")).absolute() / ".cache" / "tfscale"


def _make_folder(folder: Path, *, ours: bool = True) -> None:
    """Make a folder of the cache that others cannot write.

    ``ours`` says whether tfscale has chosen the name of the folder. Only then does tfscale change
    permissions of a folder that exists.
    """
    try:
        make_private_folder(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"no permission to write in {folder}")
    except OSError as error:
        raise BuildError(
            f"tfscale cannot write to its cache: {error}\n"
            "Set TFSCALE_CACHE to a folder that can be written. If there is none, run "
            "`tfscale build --out DIR`\nbeforehand on another machine and set TFSCALE_LIBRARY to "
            f"DIR/{LIBRARY}."
        ) from error
    if ours:
        with contextlib.suppress(OSError):
            trust.keep_others_out(folder)
    if reason := trust.doubt_of_folders(folder):
        raise BuildError(
            f"{folder}, of tfscale's cache, cannot be trusted: {reason}. Another user could "
            "exchange its files, which would run as you.\nSet TFSCALE_CACHE to a folder of your "
            "own, such as one in your home or in /tmp; or forbid others to write there "
            "(chmod go-w)"
        )


def _folder_of(cache: Path, tag: dict[str, str], tf: TensorFlow) -> Path:
    """Return the cache's folder for one library.

    The folder's name does not depend on the compiler, so that a machine without a compiler can use
    a library that is in the cache.
    """
    flags = (*_FLAGS, *tf.flags_without_paths, os.environ.get("CXX", ""))
    key = hashlib.sha256(repr((sorted(tag.items()), flags)).encode()).hexdigest()[:16]
    return cache / f"tensorflow-{tf.version}-{key}"


@contextlib.contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one process in at a time; when that process ends, even by a kill, the lock is free."""
    with (
        _threads_of_this_process,
        open(folder / "lock", "w", opener=private_opener) as file,
    ):
        deadline = time.monotonic() + _WAIT_SECONDS
        has_waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                raise BuildError(
                    f"the file system of {folder} cannot lock files: {error}\n"
                    "Set TFSCALE_CACHE to a folder on a local disk."
                ) from error
            if not has_waited:
                say("another process is building the native library; waiting for it")
                has_waited = True
            if time.monotonic() > deadline:
                raise BuildError(
                    f"waited {_WAIT_SECONDS} s for another process that builds in {folder}.\n"
                    f"Find the process that holds the lock (fuser {folder / 'lock'}), end it, "
                    "and try again."
                )
            time.sleep(0.1)
        yield


# ------------------------------------------------------------------------ build


def find_or_build(
    *,
    tf: TensorFlow | None = None,
    root: Path | None = None,
    cache: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Return the path of a library that fits; compile it if there is none yet."""
    with open_library(tf=tf, root=root, cache=cache, say=say) as library:
        return library.path


def open_library(
    *,
    tf: TensorFlow | None = None,
    root: Path | None = None,
    cache: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> trust.OpenFile:
    """Open a library that fits; compile it if there is none yet."""
    tf = tf or find_tensorflow()
    sources = find_sources(root)
    tag = make_tag(tf, sources)
    if ready := ready_made():
        return _opened_if_it_fits(ready, tag)
    file, why_not = _shipped(tf, tag)
    if file:
        return file
    return _from_cache(tf, sources, tag, cache or cache_folder(), say or _say, why_not)


def ready_made() -> Path | None:
    """Return a library that was built ahead: the user's choice, else the package's."""
    if asked := os.environ.get("TFSCALE_LIBRARY"):
        return Path(asked).expanduser().absolute()
    packaged = PACKAGE / LIBRARY
    return packaged if packaged.exists() else None


def _shipped(tf: TensorFlow, tag: dict[str, str]) -> tuple[trust.OpenFile | None, str]:
    """Open the package's own library for this TensorFlow; if none fits, return None and why.

    The reason is empty if the package holds no libraries at all. Whoever can write the library
    can write the package's Python files as well, so only the checksum and the tag are checked.
    """
    versions = shipped.versions()
    if not versions:
        return None, ""
    if tf.version not in versions:
        held = ", ".join(versions)
        return None, f"this package has no library for TensorFlow {tf.version}, only for {held}"
    file = trust.OpenFile(shipped.place(tf.version), follow=True)  # some installers make links
    reason = _misfit(file, tag)
    if not trust.checksum_file(file.path).is_file():
        reason = f"{file.path} has no checksum beside it"
    if not reason:
        return file, ""
    file.close()
    return None, reason


def build(out: Path | None = None, *, say: Callable[[str], None] | None = None) -> Path:
    """Build the library, also if a ready-made one exists, and return its path.

    With `out`, copy the library to this folder and return the path of the copy.
    """
    tf = find_tensorflow()
    sources = find_sources()
    with _from_cache(tf, sources, make_tag(tf, sources), cache_folder(), say or _say) as built:
        library, content = built.path, built.content
    if out is None:
        return library
    try:
        out.mkdir(parents=True, exist_ok=True)
        copy = out.absolute() / LIBRARY
        contents = {copy: content, trust.checksum_file(copy): trust.checksum_of(copy.name, content)}
        for path, data in contents.items():
            with replacing(path) as fresh:
                fresh.write_bytes(data)
    except OSError as error:
        raise BuildError(
            f"cannot write {out / LIBRARY}: {error}\nGive --out a folder that can be written."
        ) from error
    return copy


def existing_library(tf: TensorFlow) -> Path | None:
    """Return the library of the package or of the cache that fits, if there is one."""
    tag = make_tag(tf, find_sources())
    file, _ = _shipped(tf, tag)
    if not file:
        cache = cache_folder().resolve()
        file = _fitting(_folder_of(cache, tag, tf) / LIBRARY, tag)
    if not file:
        return None
    file.close()
    return file.path


def _from_cache(
    tf: TensorFlow,
    sources: Sources,
    tag: dict[str, str],
    cache: Path,
    say: Callable[[str], None],
    why_needed: str = "",
) -> trust.OpenFile:
    """Open the cache's library; build it if it is not there.

    ``why_needed`` says why the package's own libraries do not fit; empty if it has none.
    """
    cache = cache.resolve()  # somebody could exchange a link that leads there
    folder = _folder_of(cache, tag, tf)
    library = folder / LIBRARY
    if found := _fitting(library, tag):
        return found
    _make_folder(cache, ours="TFSCALE_CACHE" not in os.environ)
    compiler = _find_compiler(why_needed)
    _make_folder(folder)
    with _locked(folder, say):
        if found := _fitting(library, tag):
            return found
        if why_needed:
            say(why_needed)
        _Build(tf, sources, tag, compiler, folder, say).run()
        if found := _fitting(library, tag):
            return found
    raise BuildError(
        f"{library} has changed since tfscale built it: another program has changed it, or the "
        "disk is damaged.\nTry again, or set TFSCALE_CACHE to another folder."
    )


def _find_compiler(why_needed: str) -> Compiler:
    try:
        return find_compiler()
    except BuildError as error:
        if not why_needed:
            raise
        raise BuildError(f"{why_needed}; and {error}") from error


def _fitting(library: Path, tag: dict[str, str]) -> trust.OpenFile | None:
    """Open a library of the cache; return None unless it can be trusted and was built for `tag`."""
    try:
        file = trust.OpenFile(library)
    except OSError:
        return None
    if file.is_sound() and _tag_in(file.content) == tag:
        return file
    file.close()
    return None


@dataclass(frozen=True)
class _Build:
    """Build of one library into `folder`; the caller holds its lock."""

    tf: TensorFlow
    sources: Sources
    tag: dict[str, str]
    compiler: Compiler
    folder: Path
    say: Callable[[str], None]

    def run(self) -> None:
        started = time.monotonic()
        self.say(
            f"building the native library for TensorFlow {self.tf.version} (once per machine), "
            f"{self.compiler}"
        )
        try:
            self._clear()
            _make_folder(self._objects)
            sources = self._snapshot()
            self._link(self._compile(sources))
            _remove_old_files(self.folder.parent)
        except OSError as error:
            raise BuildError(
                f"writing to the cache failed: {error}\n"
                f"Make room in {self.folder.parent}, or set TFSCALE_CACHE to another folder."
            ) from error
        finally:
            shutil.rmtree(self._work, ignore_errors=True)
        self.say(f"built {self.folder / LIBRARY} in {time.monotonic() - started:.0f} s")

    @property
    def _work(self) -> Path:
        return self.folder / "work"

    @property
    def _objects(self) -> Path:
        return self.folder.parent / "objects"

    def _clear(self) -> None:
        """Remove the files that a killed or failed build has left."""
        shutil.rmtree(self._work, ignore_errors=True)
        make_private_folder(self._work)
        for log in self.folder.glob("*.log"):
            log.unlink()

    def _snapshot(self) -> Sources:
        """Return a copy of the sources, so that edits during the build do not change the result."""
        copy = Sources(self._work / "sources", self.sources.units, self.sources.headers)
        for name in copy.units + copy.headers:
            (copy.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.sources.root / name, copy.root / name)
        if self.tag["sources"] != copy.short_hash():
            raise BuildError(
                f"{self.sources.root / 'custom_ops'} has changed during the build; try again."
            )
        return copy

    def _compile(self, sources: Sources) -> list[Path]:
        """Return one object per unit; objects of unchanged units come from the cache."""
        units = find_units(sources)
        write_generated(units, sources.root)
        objects = {unit: self._object(unit, sources) for unit in units}
        missing = {}
        for unit, item in objects.items():
            if trust.is_sound(item):
                item.touch()
            else:
                missing[unit] = item
        self._compile_each(missing, sources.root)
        return list(objects.values())

    def _object(self, unit: Unit, sources: Sources) -> Path:
        """Return the path of a unit's object in the cache; the name is a hash of all inputs."""
        identity = str(self.tf) if unit.uses_tensorflow else ""
        content = sources.hash(*unit.files, *unit.headers)
        key = repr((self.compiler.version, self._flags(unit), identity, content))
        return self._objects / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.o"

    def _flags(self, unit: Unit) -> list[str]:
        """Return a unit's flags without paths."""
        if not unit.uses_tensorflow:
            return [*_FLAGS, *self.tf.abi_flags]
        return [*_FLAGS, *(f for f in self.tf.compile_flags if not f.startswith("-I"))]

    def _compile_each(self, missing: dict[Unit, Path], root: Path) -> None:
        if not missing:
            return
        files = sum(len(unit.files) for unit in missing)
        with (
            messages.Progress("compiled {} of {} files", files, self.say) as progress,
            ThreadPoolExecutor(_compilers_at_once(len(missing))) as pool,
        ):
            tasks = {
                pool.submit(self._compile_one, unit, item, root): unit
                for unit, item in missing.items()
            }
            try:
                for task in as_completed(tasks):
                    task.result()
                    progress.advance(len(tasks[task].files))
            finally:
                pool.shutdown(cancel_futures=True)

    def _compile_one(self, unit: Unit, item: Path, root: Path) -> None:
        name = unit.name.replace("/", "-")
        fresh = self._work / f"{name}.o"
        paths = ["-I."]
        if unit.uses_tensorflow:
            paths += [f for f in self.tf.compile_flags if f.startswith("-I")]
        command = [*self.compiler.command, *self._flags(unit), *paths]
        run_compiler(
            [*command, "-c", unit.name, "-o", str(fresh)],
            f"compile {unit}",
            root,
            self.folder / f"{name}.log",
        )
        _put(fresh, item)

    def _link(self, objects: list[Path]) -> None:
        (self._work / "tag.cc").write_text(_tag_unit(self.tag))
        fresh = self._work / LIBRARY
        command = [*self.compiler.command, *_FLAGS, "-shared", "-o", str(fresh)]
        command += [*map(str, objects), "tag.cc", *self.tf.link_flags]
        run_compiler(command, "link the native library", self._work, self.folder / "link.log")
        _put(fresh, self.folder / LIBRARY)


def _put(fresh: Path, path: Path) -> None:
    """Move a compiler's output from the private work folder to its place, and seal it."""
    fresh.chmod(PRIVATE_FILE)
    fresh.replace(path)
    trust.seal(path)


def _compilers_at_once(units: int) -> int:
    """Return how many compilers may run at once: one per processor, if memory suffices."""
    by_memory = _free_memory() // _BYTES_PER_COMPILER
    return max(1, min(len(os.sched_getaffinity(0)), by_memory, units))


def _free_memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * _BYTES_PER_COMPILER


def _remove_old_files(cache: Path) -> None:
    """Remove old libraries and objects, so that frequent edits do not fill the disk."""
    libraries = [(p.stat().st_mtime, p) for p in cache.glob(f"tensorflow-*/{LIBRARY}")]
    unwanted = [p for _, p in sorted(libraries)[:-_LIBRARIES_KEPT]]
    oldest = time.time() - _OBJECT_DAYS * 86400
    unwanted += [p for p in cache.glob("objects/*.o") if p.stat().st_mtime < oldest]
    for path in unwanted:
        path.unlink(missing_ok=True)
        trust.checksum_file(path).unlink(missing_ok=True)


def _say(message: str) -> None:
    logging.getLogger("tfscale").info(message)
