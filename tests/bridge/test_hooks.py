"""Functions and attributes that are replaced for a while, by several users, in any order."""

import gc
import inspect
import threading
import types
import weakref

import pytest

from tfscale.bridge import hooks
from tfscale.bridge.hooks import Hook

ANSWER = Hook("module", "answer", hooks.CALL, "tests")
AGAIN = Hook("module", "answer", hooks.OBJECT, "other tests")
ADD = Hook("Counter", "add", hooks.CALL, "tests")
NUMBER = Hook("Counter", "number", hooks.CALL, "tests")


class Counter:
    number = 1

    def add(self, x, by=1):
        return self, x + by


def module():
    made = types.ModuleType("module")
    made.answer = lambda x: x
    return made


def plus_one(original, x):
    return original(x) + 1


def times_ten(original, x):
    return 10 * original(x)


def ten_times(original, counter, x):
    return original(counter, 10 * x)


def test_the_last_one_is_called_first():
    one = module()
    with ANSWER.on(one, plus_one), ANSWER.on(one, times_ten):
        assert one.answer(1) == 20
    with ANSWER.on(one, times_ten), ANSWER.on(one, plus_one):
        assert one.answer(1) == 11


def test_hooks_leave_in_any_order():
    one = module()
    original = one.answer
    first, second = ANSWER.put(one, plus_one), AGAIN.put(one, times_ten)
    assert one.answer(1) == 20
    first.off()  # before the one that came later
    assert one.answer(1) == 10
    second.off()
    assert one.answer is original
    second.off()
    assert one.answer is original


def test_users_of_one_replacement_share_it():
    one = module()
    original = one.answer
    first, second = ANSWER.put(one, plus_one), ANSWER.put(one, plus_one)
    assert one.answer(1) == 2
    first.off()
    assert one.answer(1) == 2
    second.off()
    assert one.answer is original


def test_an_error_puts_it_back():
    one = module()
    original = one.answer
    with pytest.raises(RuntimeError), ANSWER.on(one, plus_one):
        raise RuntimeError
    assert one.answer is original


def test_many_threads_share_one_replacement():
    one = module()
    original, begin, found = one.answer, threading.Barrier(8), []

    def use():
        begin.wait()
        for _ in range(200):
            with ANSWER.on(one, plus_one):
                found.append(one.answer(1))

    in_threads([use] * 8)
    assert set(found) == {2}
    assert one.answer is original


def test_a_hook_may_be_for_calls_of_its_thread_alone():
    one = module()
    original, begin, found = one.answer, threading.Barrier(8), []

    def use(number):
        def plus(original, x):
            return original(x) + number

        begin.wait()
        for _ in range(200):
            with ANSWER.on(one, plus, in_thread=True):
                found.append(one.answer(1) == 1 + number)

    in_threads([lambda number=number: use(number) for number in range(8)])
    assert all(found)
    assert one.answer is original


def in_threads(functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_methods_of_a_class_get_their_object():
    counter, own = Counter(), vars(Counter)["add"]
    with ADD.on(Counter, ten_times):
        assert counter.add(2) == (counter, 21)
    assert counter.add(2) == (counter, 3)
    assert vars(Counter)["add"] is own


def test_a_method_that_a_class_inherits_is_inherited_again():
    class More(Counter):
        pass

    with ADD.on(More, ten_times):
        assert More().add(2)[1] == 21
        assert Counter().add(2)[1] == 3
    assert "add" not in vars(More)


def test_a_method_of_one_object_looks_like_the_one_that_it_replaces():
    counter, other = Counter(), Counter()
    with ADD.on(counter, ten_times):
        assert counter.add(2) == (counter, 21)
        assert other.add(2) == (other, 3)
        assert counter.add.__self__ is counter
        assert counter.add.__name__ == "add"
        assert inspect.signature(counter.add) == inspect.signature(other.add)
    assert not vars(counter)


def test_a_function_that_an_object_was_given_is_there_again():
    counter = Counter()
    own = counter.add = lambda x: 100 + x
    with ADD.on(counter, ten_times):
        assert counter.add(2) == 120
    assert counter.add is own


def test_a_hook_of_the_class_is_called_by_one_of_an_object():
    counter = Counter()
    with ADD.on(counter, ten_times), ADD.on(Counter, lambda add, own, x: add(own, x, by=5)):
        assert counter.add(2) == (counter, 25)


def test_values_are_replaced_and_come_back():
    counter = Counter()
    with NUMBER.showing(counter, None):
        assert counter.number is None
        with NUMBER.showing(counter, 3):
            assert counter.number == 3
        assert counter.number is None
    assert counter.number == 1
    assert not vars(counter)


@pytest.mark.parametrize("owner", [Counter, Counter()], ids=["class", "object"])
def test_what_somebody_assigns_meanwhile_stays(owner):
    own = vars(owner).get("add")

    def assigned(*_):
        return "assigned"

    worn = ADD.put(owner, ten_times)
    owner.add = assigned
    worn.off()
    assert vars(owner)["add"] is assigned
    with ADD.on(owner, lambda original, *_: original(None, 1) + " again"):
        assert owner.add() == "assigned again"
    delattr(owner, "add") if own is None else setattr(owner, "add", own)


def test_a_hook_ends_with_an_object():
    one, strategy, another = module(), Counter(), Counter()
    original = one.answer
    ANSWER.put(one, plus_one, while_lives=strategy)
    ANSWER.put(one, plus_one, while_lives=another)
    assert one.answer(1) == 2
    del strategy
    assert one.answer(1) == 2
    del another
    assert one.answer is original


def test_a_hook_keeps_no_object_alive():
    counter = Counter()
    gone = weakref.ref(counter)
    ADD.put(counter, ten_times)
    del counter
    gc.collect()
    assert gone() is None


def test_a_weak_hook_lets_its_object_go_at_once():
    counter = Counter()
    gone = weakref.ref(counter)
    ADD.put(counter, ten_times, weakly=True)
    assert counter.add(2) == (counter, 21)
    gc.disable()
    try:
        del counter
        assert gone() is None
    finally:
        gc.enable()


def test_hooks_are_listed():
    one = module()
    first, second = ANSWER.put(one, plus_one), AGAIN.put(one, times_ten)
    assert [(hook, owner) for hook, owner in hooks.active() if owner is one] == [
        (ANSWER, one),
        (AGAIN, one),
    ]
    assert ANSWER.replacements(one) == [plus_one]
    ANSWER.off(one)
    assert AGAIN.replacements(one) == [times_ten]
    assert not ANSWER.replacements(one)
    second.off()
    first.off()
    assert not [owner for _, owner in hooks.active() if owner is one]


def test_a_hook_is_no_attribute_that_somebody_has_assigned():
    counter = Counter()
    with ADD.on(counter, ten_times):
        assert not hooks.is_assigned(counter, "add")
        counter.add = print
        assert hooks.is_assigned(counter, "add")
        with ADD.on(counter, ten_times):
            assert hooks.is_assigned(counter, "add")


def test_each_hook_says_what_it_is_for():
    assert len(hooks.declared()) > 30
    assert len(set(hooks.declared())) == len(hooks.declared())
    for hook in hooks.declared():
        assert hook.whose
        assert hook.name
        assert hook.until
        assert hook.why
