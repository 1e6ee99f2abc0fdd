"""The heap that keeps what messages need, in processes of their own: it is set for good."""

import os
import platform
import subprocess
import sys

import pytest

from tfscale.native.memory import WITHOUT_POOL

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")

# Fills an arena of a thread and empties it again: how much stays resident.
PROGRAM = """
import ctypes, threading
from tfscale.native.memory import keep_freed_memory
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


# What a strategy does first, and the page faults of four operations on 39,063 pages each: more than
# glibc keeps (see _SETTINGS), so that without a pool all of them are fresh. numpy() waits for the
# last one: a function may return before its operations have ended.
TENSORS = """
import resource
import tensorflow as tf
from tfscale.ops import memory
if %(late)r:
    tf.zeros([1])
memory.keep_memory()
x = tf.zeros([40_000_000])
add = tf.function(lambda x: x + 1)
for _ in range(3):
    y = add(x)
y.numpy()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    y = add(x)
y.numpy()
print("FAULTS", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(memory.words())
"""


def faults(late=False, **environment):
    output = subprocess.run(
        [sys.executable, "-c", TENSORS % {"late": late}],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    number, words = output.partition("FAULTS ")[2].split("\n", 1)
    return int(number), words


def test_tensors_come_from_memory_that_is_kept():
    number, words = faults()
    assert number < 39_063  # not even one of the four results is fresh
    assert "keeps the memory of tensors, since tfscale has set TF_CPU_ALLOCATOR_USE_BFC" in words


@pytest.mark.slow
def test_a_user_can_turn_the_pool_off():
    number, words = faults(TF_CPU_ALLOCATOR_USE_BFC="0")
    assert number > 150_000
    assert "_BFC=0 says so. To keep memory, unset TF_CPU_ALLOCATOR_USE_BFC" in words


@pytest.mark.slow
def test_a_user_can_turn_all_pools_off():
    number, words = faults(TF_ENABLE_ONEDNN_OPTS="1", **WITHOUT_POOL)
    assert number > 150_000
    assert "TF_CPU_ALLOCATOR_USE_BFC=false says so" in words


@pytest.mark.slow
def test_a_tensor_before_the_strategy_is_too_early():
    number, words = faults(late=True)
    assert number > 150_000
    assert "make the strategy first" in words
