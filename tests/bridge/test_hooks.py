"""Functions that are replaced for a while, by several users, in any order."""

import threading
import types

import pytest

from tfscale.bridge.hooks import replaced


def owner():
    module = types.ModuleType("module")
    module.answer = lambda x: x
    return module


def plus_one(original, x):
    return original(x) + 1


def test_the_original_is_back_after_the_last_user_has_left():
    module = owner()
    original = module.answer
    first, second = (replaced(module, "answer", plus_one) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert module.answer(1) == 2
    first.__exit__(None, None, None)  # before the one that came later
    assert module.answer(1) == 2
    second.__exit__(None, None, None)
    assert module.answer is original


def test_an_error_puts_it_back():
    module = owner()
    original = module.answer
    with pytest.raises(RuntimeError), replaced(module, "answer", plus_one):
        raise RuntimeError
    assert module.answer is original


def test_many_threads_share_one_replacement():
    module = owner()
    original, begin, found = module.answer, threading.Barrier(8), []

    def use():
        begin.wait()
        for _ in range(200):
            with replaced(module, "answer", plus_one):
                found.append(module.answer(1))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {2}
    assert module.answer is original


def test_methods_of_a_class_get_their_object():
    class Counter:
        def add(self, x):
            return self, x

    counter = Counter()
    with replaced(Counter, "add", lambda original, self, x: original(self, 10 * x)):
        assert counter.add(2) == (counter, 20)
    assert counter.add(2) == (counter, 2)
