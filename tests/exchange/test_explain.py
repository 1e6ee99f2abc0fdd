"""Table of buckets and methods, as the strategy prints it after a few steps."""

import json
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.strategy.models import BATCH
from tfscale import ScaleStrategy, sync
from tfscale.collectives import Link
from tfscale.collectives.choose import COST_MODEL, Chooser
from tfscale.exchange.explain import Explanation, Row
from tfscale.exchange.slots import ATTRIBUTE
from tfscale.native import memory
from tfscale.optimizers import AdaHessian

WORDS, WIDTH, STEPS = 40, 64, 3


def on(replicas, algorithm="ring", wire="fp32", **arguments):
    return ScaleStrategy(algorithm, wire, [f"CPU:{i}" for i in range(replicas)], **arguments)


def trained(strategy, **how):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = keras.Input([5], dtype="int32")
        hidden = layers.Flatten()(layers.Embedding(WORDS, 4, name="words")(inputs))
        hidden = layers.Dense(WIDTH, name="first")(hidden)
        outputs = layers.Dense(WIDTH, name="second")(hidden)
        model = keras.Model(inputs, layers.Dense(1, name="head")(outputs))
        model.compile(keras.optimizers.SGD(0.01), "mse", **how)
    model.fit(*data(), batch_size=BATCH, verbose=0)
    return model


def data():
    x = np.random.default_rng(1).integers(0, WORDS, [STEPS * BATCH, 5])
    return x, x.sum(1)


MIXED = {"words": "int8", "second/kernel": "int4", "bias": "bf16", "*": "int8"}


@pytest.fixture(scope="module")
def mixed():
    strategy = on(2, wire=MIXED)
    return strategy, trained(strategy)


@pytest.fixture
def rows(mixed):
    return mixed[0].explain()


def test_every_variable_is_in_one_row(mixed, rows):
    paths = sorted(v.path for v in mixed[1].trainable_variables)
    assert sorted(path for row in rows for path in row.variables) == paths


def test_rows_of_a_table_travel_on_their_wire(mixed, rows):
    (row,) = [row for row in rows if row.algorithm == "rows"]
    assert row.variables == ("words/embeddings",)
    assert (row.wire, row.feedback, row.elements, row.bytes) == ("int8", False, 0, 0)
    assert row.calls > 0
    assert row.measured > 0


def test_rows_say_what_travels(rows):
    found = {tuple(sorted(row.variables)): (row.wire, row.elements, row.feedback) for row in rows}
    assert found == {
        ("words/embeddings",): ("int8", 0, False),
        ("second/kernel",): ("int4", WIDTH * WIDTH, True),
        ("first/kernel",): ("int8", 20 * WIDTH, False),
        ("head/kernel",): ("fp32", WIDTH, False),
        ("first/bias", "head/bias", "second/bias"): ("bf16", 2 * WIDTH + 1, False),
    }


def test_bytes_are_those_on_the_wire(rows):
    size = {row.wire: row.bytes / row.elements for row in rows if row.elements}
    assert size["fp32"] == 4
    assert size["bf16"] == 2
    assert 1 <= size["int8"] < 1.2  # and a scale for each block
    assert 0.5 <= size["int4"] < 0.7


def test_what_was_measured_comes_from_the_engine(rows):
    """A ring of two sends a whole buffer in halves, which may be padded to blocks."""
    for row in [row for row in rows if row.elements]:
        assert row.calls >= STEPS
        assert row.measured > 0
        assert row.bytes <= row.sent <= row.bytes + 64
        assert (row.algorithm, row.why, row.predicted) == ("ring", "asked for", 0)


def test_the_table_is_for_people_who_ask_for_it(mixed, capsys):
    explained = mixed[0].explain()
    assert not capsys.readouterr().out
    print(explained)
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    assert printed[0] == "Gradients, in the order in which they are sent"
    assert printed[1].split() == ["numbers", "bytes", "method", "ms", "by", "model", "ms", "taken"]
    starts = [memory.words().startswith(line) for line in printed]
    del printed[starts.index(True) :]  # what is said of memory, which differs with the machine
    assert printed.pop() == "They go within this process to 1"
    words = "\n".join(printed[2::2])
    for row in explained:
        assert f"{row.bucket}, by {row.algorithm} ({row.why})" in words
    assert any(f"{WIDTH * WIDTH:,}" in line and "int4 + feedback" in line for line in printed[3::2])
    assert repr(explained) == str(explained)  # so does a notebook


def test_long_names_are_not_broken():
    """A long name begins a new line, at a space."""
    path = "/a/folder/with/a/name/so/long/that/it/alone/is/longer/than/a/line/of/eighty/characters"
    row = Row("adam gradients 0: encoder/kernel", (), 10**10, "int4", True, 5 * 10**9, 4 * 10**10,
              "hierarchical(8x8, ring)", f"pinned by {path}", 1.0, 0.0, 1, 1.0, 1.0,
              "int4 + feedback")  # fmt: skip
    lines = str(Explanation([row], 2)).splitlines()
    assert f"  {path})" in lines
    assert max(len(line) for line in lines if path not in line) <= 80


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("gamma", "pays"), [(0.0, True), (1e-8, False)])
def test_a_wire_that_does_not_pay_is_said(gamma, pays):
    """Compare 8 bits with fp32, which costs nothing but its bytes."""
    strategy = on(2, "auto", "int8")
    chooser = Chooser(Link(0.0, 1e-9), gamma, 2)
    chooser.lossless = Chooser(Link(0.0, 1e-9), 0.0, 2)
    strategy.reducer.team.schedules = chooser
    trained(strategy)
    explained = strategy.explain()
    (row,) = [row for row in explained if row.wire == "int8"]
    assert (row.gain > 0) == pays
    assert ("The wire 'int8' does not pay here" in str(explained)) != pays


def test_one_replica_has_nothing_to_explain():
    assert str(on(1).explain()) == "Nothing is sent: there is one replica."


def test_before_the_first_step_there_is_nothing_to_tell():
    assert on(2).explain() == []
    assert "Nothing to show yet" in str(on(2).explain())


def test_eager_steps_are_counted():
    strategy = on(2)
    model = trained(strategy, run_eagerly=True)
    rows = strategy.explain()
    found = sorted(path for row in rows for path in row.variables)
    assert found == sorted(v.path for v in model.trainable_variables)
    for row in rows:
        assert row.calls >= STEPS
        assert row.measured > 0


def test_a_rule_that_matches_nothing_is_told_once(caplog):
    strategy = on(2, wire={"secnd/kernel": "int4", "first/kernel": "int8"})
    with caplog.at_level(logging.WARNING, "tfscale"):
        trained(strategy, run_eagerly=True)
    (warning,) = [r.getMessage() for r in caplog.records if "matches no" in r.getMessage()]
    assert "'secnd/kernel'" in warning
    assert "words/embeddings, first/kernel" in warning


def chosen(dumped):
    return [(row["from_bytes"], row["algorithm"]) for row in dumped["table"]]


def written(strategy, path):
    strategy.dump(path)
    return json.loads(path.read_text())


def test_what_auto_chose_is_written_edited_and_read(tmp_path):
    """Nothing is measured when a file says what to choose, so all is known here."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    Chooser(Link(1e-4, 1e-9), 1e-10, 4).dump(first)
    strategy = on(4, "auto", schedule_file=first, bucket_bytes=4 * WIDTH * WIDTH)
    again = written(strategy, second)
    assert chosen(again) == chosen(json.loads(first.read_text()))

    again["table"] = [
        {"from_bytes": 1, "algorithm": "auto"},
        {"from_bytes": 4 * WIDTH * WIDTH, "algorithm": "tree"},
    ]
    second.write_text(json.dumps(again))
    strategy = on(4, "auto", schedule_file=second, bucket_bytes=4 * WIDTH * WIDTH)
    trained(strategy)
    found = {row.bytes >= 4 * WIDTH * WIDTH: row for row in strategy.explain() if row.elements}
    assert (found[True].algorithm, found[True].why) == ("tree", f"pinned by {second}")
    assert found[False].why == COST_MODEL
    assert found[False].predicted > 0
    assert chosen(written(strategy, first))[-1] == (4 * WIDTH * WIDTH, "tree")


def test_what_was_asked_for_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="has no choices to write"):
        on(2).dump(tmp_path / "chosen.json")


def test_two_optimizers_of_one_name_are_told_apart():
    strategy = on(2)
    with strategy.scope():
        first, second = (
            keras.Variable(tf.ones([3]), name="a"),
            keras.Variable(tf.ones([5]), name="b"),
        )
        optimizers = [keras.optimizers.SGD(0.1, name="same") for _ in range(2)]

    @tf.function
    def step():
        def each():
            optimizers[0].apply([tf.ones([3])], [first])
            optimizers[1].apply([tf.ones([5])], [second])

        strategy.run(each)

    step()
    assert sorted((row.variables, row.elements, row.calls) for row in strategy.explain()) == [
        (("a",), 3, 1),
        (("b",), 5, 1),
    ]


def test_rows_that_do_not_take_their_wire_are_told_once(caplog):
    strategy = on(2, "auto", {"embeddings": "bf16"}, backend="tensorflow")
    with caplog.at_level(logging.WARNING, "tfscale"):
        model = trained(strategy)
        model.fit(*data(), batch_size=BATCH, verbose=0)
    told = [r.getMessage() for r in caplog.records if "rows of a table" in r.getMessage()]
    assert len(told) == 1
    assert "words/embeddings" in told[0]
    assert "'bf16'" in told[0]


def test_what_rows_lose_is_kept_where_they_have_feedback():
    model = trained(on(2, wire={"embeddings": "int4", "second/kernel": "int8"}))
    (kept,) = getattr(model.optimizer, ATTRIBUTE).named("residual").values()
    assert kept.shape[-2:] == [WORDS, 4]
    assert np.abs(kept.numpy()).max() > 0


accumulates, full = {"gradient_accumulation_steps": 2}, pytest.mark.full


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "optimizer, rule, replicas, calls",
    [
        pytest.param({}, None, 2, STEPS, id="each step"),
        pytest.param({"update_each": 2}, sync.Hierarchical(group=2), 4, 2, id="in groups"),
        pytest.param({"update_each": 2}, None, 2, 2, id="some steps", marks=full),
        pytest.param(accumulates, None, 2, STEPS, id="accumulating", marks=full),
        pytest.param({}, sync.LocalSGD(2, start=1), 2, 1, id="a synchronous start", marks=full),
    ],
)
def test_curvature_has_rows_of_its_own(optimizer, rule, replicas, calls):
    """The steps that measure curvature send it, exactly, and groups send it to the group only: a
    ring of two sends the buffer once, one of four 1.5 times.
    """
    strategy = on(replicas, wire="int8", sync=rule)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([5]), layers.Dense(WIDTH)])
        model.compile(AdaHessian(0.01, **optimizer), "mse")
    x = np.random.default_rng(1).normal(size=[STEPS * BATCH, 5])
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0)
    rows = [row for row in strategy.explain() if row.variables[0].endswith("/curvature")]
    found = sorted(path for row in rows for path in row.variables)
    assert found == sorted(f"{v.path}/curvature" for v in model.trainable_variables)
    for row in rows:
        assert str(row.bucket).startswith(f"{model.optimizer.name} curvature ")
        assert (row.wire, row.bytes, row.calls) == ("fp32", row.lossless, calls)
        assert row.bytes <= row.sent <= row.bytes + 64
