"""The heap that keeps what messages need, in processes of their own: it is set for good."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")

# Fills an arena of a thread and empties it again: how much stays resident.
PROGRAM = """
import ctypes, threading
from tfscale.ops.memory import keep_freed_memory
done = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
kept = []
def work():
    blocks = [libc.malloc(1 << 20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in reversed(blocks):
        libc.free(block)
    kept.append(int(open("/proc/self/statm").read().split()[1]) * 4096)
before = int(open("/proc/self/statm").read().split()[1]) * 4096
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(done, (kept[0] - before) >> 20)
"""


def run(**environment):
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    done, kept = output.split()[-2:]
    return done == "True", int(kept)


def test_freed_memory_stays():
    done, kept = run()
    assert done
    assert kept >= 38


@pytest.mark.parametrize("name", ["MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"])
def test_what_the_user_has_set_is_left_alone(name):
    done, kept = run(**{name: "131072"})
    assert not done
    assert kept < 20


def test_tunables_are_the_users_too():
    assert not run(GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072")[0]
