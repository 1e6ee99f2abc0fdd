"""Tools of a build: TensorFlow, the C++ sources and a compiler, with errors that advise."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tfscale.support.files import private_opener

LIBRARY = "libtfscale.so"
PACKAGE = Path(__file__).resolve().parent.parent

_COMPILE_SECONDS = 1800


class BuildError(RuntimeError):
    """Error if there is no native library to use; the message says what to do."""


@dataclass(frozen=True)
class TensorFlow:
    """Version and flags of the TensorFlow to build for."""

    version: str
    git_version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @property
    def abi_flags(self) -> tuple[str, ...]:
        """Flags that files without TensorFlow headers need, too: those of the C++ library's ABI."""
        return tuple(f for f in self.compile_flags if "_GLIBCXX_USE_CXX11_ABI" in f)

    @property
    def flags_without_paths(self) -> tuple[str, ...]:
        """Flags for compiling and linking, without folders of this machine."""
        flags = self.compile_flags + self.link_flags
        return tuple(f for f in flags if not f.startswith(("-I", "-L")))

    def __str__(self) -> str:
        return f"{self.version} ({self.git_version})"


def find_tensorflow() -> TensorFlow:
    """Return a description of the installed TensorFlow; raise ``BuildError`` if there is none."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise BuildError(no_tensorflow(error)) from error
    return TensorFlow(
        version=str(tf.version.VERSION),
        git_version=str(tf.version.GIT_VERSION),
        compile_flags=tuple(tf.sysconfig.get_compile_flags()),
        link_flags=tuple(tf.sysconfig.get_link_flags()),
    )


def no_tensorflow(error: ImportError) -> str:
    """Return a message that says what to do if TensorFlow cannot be imported."""
    return (
        f"TensorFlow cannot be imported by {sys.executable}: {error}\n"
        "tfscale does not install TensorFlow by itself. Choose one of these:\n"
        "  pip install 'tensorflow[and-cuda]'   (for GPUs)\n"
        "  pip install tensorflow-cpu           (for CPUs only, x86-64)\n"
        "  pip install tensorflow               (for other CPUs)"
    )


@dataclass(frozen=True)
class Sources:
    """C++ files of tfscale; `root` is the folder that contains `custom_ops`."""

    root: Path
    units: tuple[str, ...]
    headers: tuple[str, ...]

    def hash(self, *files: str) -> str:
        """Return a hash of the names and contents of some files; by default, of all files."""
        digest = hashlib.sha256()
        for name in files or self.units + self.headers:
            content = (self.root / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def short_hash(self) -> str:
        """Return the first 16 digits of the hash of all files."""
        return self.hash()[:16]


def find_sources(root: Path | None = None) -> Sources:
    """Return the sources below `root`, or else those of the package or of the checkout."""
    candidates = [root] if root else [PACKAGE, PACKAGE.parent]
    for candidate in candidates:
        folder = candidate / "custom_ops"
        files = sorted(p.relative_to(candidate).as_posix() for p in folder.rglob("*.*"))
        units = tuple(f for f in files if f.endswith(".cc"))
        if units:
            return Sources(candidate, units, tuple(f for f in files if f.endswith((".h", ".inc"))))
    places = " or ".join(str(c / "custom_ops") for c in candidates)
    raise BuildError(
        f"no C++ sources in {places}: this installation of tfscale is incomplete.\n"
        "Install it again, from its checkout: pip install --force-reinstall --no-deps ."
    )


@dataclass(frozen=True)
class Compiler:
    """C++ compiler that runs: its command, and the version that it reports."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return f"{shlex.join(self.command)}: {self.version}"


def find_compiler() -> Compiler:
    """Return the compiler: $CXX, else g++, else clang++; raise ``BuildError`` if there is none."""
    asked = os.environ.get("CXX", "").strip()
    choices = [tuple(shlex.split(asked))] if asked else [("g++",), ("clang++",)]
    for command in choices:
        if shutil.which(command[0]):
            return Compiler(command, _compiler_version(command))
    problem = f"CXX is {asked!r}, not on PATH" if asked else "there is no g++ and no clang++"
    raise BuildError(
        f"no C++ compiler for tfscale's native library: {problem}.\n"
        "Do one of these:\n"
        "  install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL),\n"
        "               or set CXX to a g++ or clang++ that you have;\n"
        "  or run `tfscale build --out DIR` on a machine with a compiler and the same TensorFlow,\n"
        f"               copy DIR/{LIBRARY} here and set TFSCALE_LIBRARY to its path."
    )


def _compiler_version(command: tuple[str, ...]) -> str:
    try:
        out = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"the C++ compiler {shlex.join(command)!r} does not run: {error}\n"
            "Set CXX to a g++ or clang++ that runs."
        ) from error
    return out.splitlines()[0] if out else "unknown version"


def run_compiler(command: list[str], what: str, folder: Path, log: Path) -> None:
    """Run a compiler; on failure, keep its whole output in `log` and raise ``BuildError``."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
        output, failed = done.stdout, done.returncode != 0
    except subprocess.TimeoutExpired:
        output, failed = f"error: no result after {_COMPILE_SECONDS} s", True
    if not failed:
        return
    with open(log, "w", opener=private_opener) as file:
        file.write(f"$ {shlex.join(command)}\n{output}")
    raise BuildError(
        f"{command[0]} could not {what}:\n"
        f"  {_first_error(output)}\n"
        f"Its whole output: {log}\n"
        f"{_hint(output)}"
    )


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "undefined" in line]
    return (telling or lines or ["(no output)"])[0]


_HINTS = (
    (
        ("Killed", "out of memory", "virtual memory exhausted", "Cannot allocate"),
        "The machine ran out of memory; free some (one compiler needs up to 1.5 GB) and try again.",
    ),
    (
        ("No space left",),
        "The disk is full; free some space, or set TFSCALE_CACHE to another disk.",
    ),
    (
        ("fatal error: tensorflow/", "'tensorflow/"),
        "This TensorFlow lacks its C++ headers; install TensorFlow again from a full wheel.",
    ),
    (
        (
            "unrecognized command",
            "unrecognized option",
            "unknown argument",
            "invalid value 'c++17'",
        ),
        "This compiler is too old; set CXX to g++ 9 or clang++ 10 or newer.",
    ),
    (
        ("fatal error: string", "'string' file not found", "'cstdint' file not found"),
        "The C++ standard library's headers are missing; install them: apt-get install g++.",
    ),
    (
        ("cannot find -l",),
        "TensorFlow's own library is missing; install TensorFlow again from a full wheel.",
    ),
)


def _hint(output: str) -> str:
    for signs, hint in _HINTS:
        if any(sign in output for sign in signs):
            return hint
    return "Try another compiler (CXX=g++ or CXX=clang++); if it fails, too, report that file."
