"""Telemetry of trainings on one device, and on two replicas of one process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mirrored

from tests.callbacks.telemetries import BATCH, STEPS, WIDTH, added, compiled, fit, lines, numbers
from tests.compression.test_adaptive import eager_to_change
from tfscale import ScaleStrategy
from tfscale.callbacks import BatchGrowth, Recompute, Telemetry, Warmup, telemetry as module
from tfscale.collectives import Link, ring
from tfscale.collectives.choose import Choice, Chooser
from tfscale.compression import Adaptive
from tfscale.exchange.explain import rows
from tfscale.exchange.slots import Slots
from tfscale.ops import Communicator

FULL = pytest.mark.full
KERNELS = 2 * WIDTH * WIDTH  # numbers on the lossy wire


@pytest.fixture(autouse=True)
def a_line_for_each_step(monkeypatch):
    monkeypatch.setattr(module, "SHORTEST", 0)


def on_two(wire="fp32", algorithm="ring", **arguments):
    return ScaleStrategy(algorithm, wire, ["CPU:0", "CPU:1"], **arguments)


@pytest.fixture(scope="module")
def int8():
    return on_two("int8")


def trained(strategy, telemetry, *others, optimizer=None, compile=None, **how):
    with strategy.scope():
        model = compiled(optimizer and optimizer(), **(compile or {}))
    fit(model, [telemetry, *others], **how)
    return model


# ---------------------------------------------------------------- one device


def test_one_device_has_a_rate_and_no_wire(tmp_path):
    telemetry = Telemetry(tmp_path / "run.jsonl")
    history = fit(compiled(), [telemetry], epochs=2).history
    assert len(history["samples_per_second"]) == 2
    assert not {"sent_mb", "exposed_ms", "efficiency_estimated"} & history.keys()
    steps = lines(tmp_path / "run.jsonl", "step")
    assert [line["step"] for line in steps] == list(range(2 * STEPS))
    assert {line["samples"] for line in steps} == {BATCH}
    assert {line["sent"] for line in steps} == {None}
    (start,) = lines(tmp_path / "run.jsonl", "start")
    assert "no gradients are sent" in start["words"]
    assert "no gradients are sent" in telemetry.summary()


def test_the_end_tells_memory(tmp_path):
    model = compiled(keras.optimizers.Adam())
    fit(model, [Telemetry(tmp_path / "run.jsonl")])
    (end,) = lines(tmp_path / "run.jsonl", "end")
    numbers = 3 * model.count_params() + 2  # and the counter of steps, and the learning rate
    assert 4 * numbers <= end["kept"] <= 4 * numbers + 16
    assert end["resident"] > 50e6  # TensorFlow alone takes more


def test_mirrored_strategy_has_a_rate_and_no_known_wire():
    telemetry = Telemetry(baseline=1e-3)
    with mirrored().scope():
        model = compiled()
    history = fit(model, [telemetry]).history
    rate = history["samples_per_second"][0]
    assert history["efficiency_measured"][0] == pytest.approx(rate / (2 * 1e-3))
    assert "not known: MirroredStrategy uses" in " ".join(telemetry.summary().split())


def test_steps_are_one_after_the_other(tmp_path):
    fit(compiled(), [Telemetry(tmp_path / "run.jsonl")])
    steps = lines(tmp_path / "run.jsonl", "step")
    for before, after in itertools.pairwise(steps):
        assert before["end"] == after["begin"]
        assert before["seconds"] > 0
    assert [line["usual"] for line in steps] == [False] + [True] * (STEPS - 1)


def test_a_second_fit_goes_on_in_the_same_file(tmp_path):
    telemetry, model = Telemetry(tmp_path / "run.jsonl"), compiled()
    for _ in range(2):
        fit(model, [telemetry])
    assert [line["step"] for line in lines(tmp_path / "run.jsonl", "step")] == list(
        range(2 * STEPS)
    )
    assert len(lines(tmp_path / "run.jsonl", "end")) == 2


def test_short_steps_share_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHORTEST", 1000)
    telemetry = Telemetry(tmp_path / "run.jsonl")
    fit(compiled(), [telemetry], epochs=2)
    steps = lines(tmp_path / "run.jsonl", "step")
    assert [(line["epoch"], line["batch"], line["step"]) for line in steps] == [
        (0, 0, 0), (0, 1, 1), (1, 0, STEPS),
    ]  # fmt: skip
    assert [line["steps"] for line in steps] == [1, STEPS - 1, STEPS]
    assert [line["samples"] for line in steps] == [line["steps"] * BATCH for line in steps]
    assert lines(tmp_path / "run.jsonl", "end")[0]["steps"] == 2 * STEPS


# ------------------------------------------------------------------- samples


def test_the_last_batch_may_be_short(tmp_path):
    x, y = numbers()
    compiled().fit(x[:-3], y[:-3], BATCH, verbose=0, callbacks=[Telemetry(tmp_path / "run.jsonl")])
    assert [line["samples"] for line in lines(tmp_path / "run.jsonl", "step")] == [
        *[BATCH] * (STEPS - 1),
        BATCH - 3,
    ]


def generator():
    for _ in range(STEPS):
        yield tuple(part[:BATCH] for part in numbers())


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("shortest, windows", [(0, STEPS), (1000, 2)])
@pytest.mark.parametrize("batch", [None, BATCH])
def test_data_of_unknown_length(tmp_path, batch, shortest, windows, monkeypatch):
    """Keras begins a step more, for which there is no data."""
    monkeypatch.setattr(module, "SHORTEST", shortest)
    spec = tuple(tf.TensorSpec([None, n]) for n in (WIDTH, 1))
    data = tf.data.Dataset.from_generator(generator, output_signature=spec)
    telemetry = Telemetry(tmp_path / "run.jsonl", batch=batch)
    compiled().fit(data, verbose=0, callbacks=[telemetry])
    steps = lines(tmp_path / "run.jsonl", "step")
    assert (len(steps), added(steps, "steps")) == (windows, STEPS)
    assert [each["samples"] for each in steps] == [
        batch and batch * each["steps"] for each in steps
    ]
    assert ("Telemetry(batch=...)" in telemetry.summary()) == (batch is None)


def test_batches_that_grow(tmp_path):
    growth = BatchGrowth({0: 8, 3: 12})
    telemetry = Telemetry(tmp_path / "run.jsonl", batch=growth.size)
    data = growth.batches(tf.data.Dataset.from_tensor_slices(numbers()))
    compiled().fit(data, verbose=0, steps_per_epoch=5, callbacks=[growth, telemetry])
    assert [line["samples"] for line in lines(tmp_path / "run.jsonl", "step")] == [8] * 3 + [12] * 2


# --------------------------------------------------------------------- bytes


def counted_by_engine(strategy, that):
    communicators = strategy.reducer.team.communicators
    totals = [total for each in communicators for total in each.totals().items()]
    return sum(total.sent for bucket, total in totals if that(bucket))


@pytest.mark.parametrize("wire", ["int8", *(pytest.param(w, marks=FULL) for w in ("fp32", "sign"))])
def test_bytes_are_what_the_engine_counted_and_the_schedule_says(tmp_path, wire):
    strategy = on_two(wire)
    trained(strategy, Telemetry(tmp_path / "run.jsonl"), epochs=2)
    steps = lines(tmp_path / "run.jsonl", "step")
    assert added(steps, "sent") == counted_by_engine(strategy, lambda bucket: bucket.graph)
    found = rows(strategy.reducer)
    volume = ring(2).cost.sent
    gradients = 2 * len(steps) * volume * sum(row.bytes for row in found)
    assert counted_by_engine(strategy, lambda bucket: bucket.owner) == gradients
    saved = 2 * len(steps) * volume * sum(row.lossless - row.bytes for row in found)
    assert added(steps, "saved") == saved
    (end,) = lines(tmp_path / "run.jsonl", "end")
    assert (end["steps"], end["sent"]) == (len(steps), added(steps, "sent"))
    assert end["samples"] == 2 * STEPS * BATCH
    assert end["sent_in_all"] >= end["sent"]


@pytest.mark.slow
def test_int8_saves_three_quarters(tmp_path, int8):
    trained(int8, Telemetry(tmp_path / "run.jsonl"))
    (row,) = [line for line in lines(tmp_path / "run.jsonl", "choice") if line["wire"] == "int8"]
    assert row["elements"] == KERNELS
    last = lines(tmp_path / "run.jsonl", "step")[-1]
    assert last["saved"] == 2 * (row["lossless"] - row["bytes"])
    assert row["lossless"] / row["bytes"] == pytest.approx(4, rel=0.02)


def test_validation_belongs_to_no_step(tmp_path, int8):
    model = trained(int8, Telemetry(tmp_path / "run.jsonl"), epochs=2)
    fit(model, [Telemetry(tmp_path / "more.jsonl")], epochs=2, validation_data=numbers())
    plain, more = (lines(tmp_path / f"{name}.jsonl", "step") for name in ("run", "more"))
    assert [line["sent"] for line in more] == [line["sent"] for line in plain]
    assert lines(tmp_path / "more.jsonl", "end")[0]["sent_in_all"] > added(more, "sent")


@pytest.mark.slow
def test_accumulated_gradients_travel_at_the_end_of_their_window(tmp_path, int8):
    def optimizer():
        return keras.optimizers.SGD(0.001, gradient_accumulation_steps=2)

    trained(int8, Telemetry(tmp_path / "run.jsonl"), optimizer=optimizer, epochs=2)
    steps = lines(tmp_path / "run.jsonl", "step")
    assert [line["saved"] > 0 for line in steps] == [False, True] * STEPS
    assert [line["exposed"] > 0 for line in steps] == [False, True] * STEPS
    assert [line["step"] for line in steps] == list(range(2 * STEPS))


def test_several_steps_per_execution(tmp_path, int8):
    trained(int8, Telemetry(tmp_path / "one.jsonl"))
    trained(int8, Telemetry(tmp_path / "two.jsonl"), compile={"steps_per_execution": 2})
    one, two = (lines(tmp_path / f"{name}.jsonl", "step") for name in ("one", "two"))
    assert [(line["step"], line["steps"]) for line in two] == [(0, 2), (2, 2), (4, 1)]
    assert [line["samples"] for line in two] == [2 * BATCH, 2 * BATCH, BATCH]
    assert two[0]["sent"] == 2 * one[0]["sent"]
    assert added(two, "sent") == added(one, "sent")


def test_eager_steps(tmp_path, int8):
    trained(int8, Telemetry(tmp_path / "graph.jsonl"))
    trained(int8, Telemetry(tmp_path / "eager.jsonl"), compile={"run_eagerly": True})
    graph, eager = (lines(tmp_path / f"{name}.jsonl", "step") for name in ("graph", "eager"))
    assert [line["saved"] for line in eager] == [line["saved"] for line in graph]
    assert lines(tmp_path / "eager.jsonl", "error")


# --------------------------------------------------------------------- times


def test_times_are_within_each_other(tmp_path, int8):
    trained(int8, Telemetry(tmp_path / "run.jsonl"))
    for line in lines(tmp_path / "run.jsonl", "step"):
        assert 0 < line["exposed"] <= line["communication"] <= line["seconds"]


@pytest.mark.slow
def test_without_a_baseline_efficiency_is_what_is_not_exposed(tmp_path, int8):
    telemetry = Telemetry(tmp_path / "run.jsonl")
    trained(int8, telemetry)
    usual = lines(tmp_path / "run.jsonl", "step")[1:]
    (epoch,) = lines(tmp_path / "run.jsonl", "epoch")
    exposed = added(usual, "exposed") / added(usual, "seconds")
    assert epoch["efficiency_estimated"] == pytest.approx(1 - exposed)
    assert epoch["samples_per_second"] == pytest.approx(
        added(usual, "samples") / added(usual, "seconds")
    )
    assert "estimated" in telemetry.summary()


def test_what_the_engine_has_forgotten_is_not_made_up(tmp_path, int8, monkeypatch):
    log = Communicator.log
    monkeypatch.setattr(Communicator, "log", lambda self, last: log(self, min(last, 7)))
    monkeypatch.setattr(module, "SHARE", 0)  # one reading, and then at the end of the epoch
    trained(int8, Telemetry(tmp_path / "run.jsonl"))
    sent = [line["sent"] for line in lines(tmp_path / "run.jsonl", "step")]
    assert sent[1:-1] == [None] * (STEPS - 2)
    assert sent[-1] is not None
    (end,) = lines(tmp_path / "run.jsonl", "end")
    assert end["sent"] == sum(value or 0 for value in sent) < end["sent_in_all"]


@pytest.mark.slow
def test_it_reads_no_more_than_its_share_of_the_time_allows(int8, monkeypatch):
    readings = []
    read = Telemetry._read
    monkeypatch.setattr(Telemetry, "_read", lambda self: (readings.append(1), read(self)))
    monkeypatch.setattr(module, "SHARE", 0)
    trained(int8, Telemetry(), epochs=3)
    assert len(readings) == 1 + 3


def test_what_was_read_is_not_read_again(int8, monkeypatch):
    asked, log = [], Communicator.log

    def noted(communicator, last):
        asked.append(last)
        return log(communicator, last)

    monkeypatch.setattr(Communicator, "log", noted)
    communicators = int8.reducer.team.communicators

    def calls():
        return sum(total.calls for each in communicators for total in each.totals().values())

    with int8.scope():
        model = compiled()
    before = calls()
    fit(model, [Telemetry()], epochs=3)
    assert len(asked) > 2
    assert sum(asked) <= calls() - before


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_recomputation_goes_with_it(tmp_path, int8, first):
    weights = []
    for callbacks in (
        [],
        [Recompute(segments="sqrt", verbose=0), Telemetry(tmp_path / "run.jsonl")],
    ):
        with int8.scope():
            model = compiled()
        fit(model, callbacks if first else callbacks[::-1])
        weights.append(model.get_weights())
    for mine, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert lines(tmp_path / "run.jsonl", "error")


# -------------------------------------------------------------------- errors


@pytest.mark.slow
def test_the_error_with_feedback_is_the_residuals(tmp_path):
    """Weights and data stay, so that the gradient is known."""
    strategy = on_two("sign")
    model = trained(
        strategy,
        Telemetry(tmp_path / "run.jsonl"),
        optimizer=lambda: keras.optimizers.SGD(0.0),
        epochs=2,
    )
    x, y = (part[-BATCH:][: BATCH // 2] for part in numbers())
    kernels = [v.value.values[0] for v in model.trainable_variables if v.shape == (WIDTH, WIDTH)]
    with tf.GradientTape() as tape, tf.device("CPU:0"):
        loss = tf.reduce_sum((model(x) - y) ** 2) / BATCH
    gradient = tf.linalg.global_norm(tape.gradient(loss, kernels))
    residuals = Slots.of(model.optimizer, strategy).named("residual").values()
    lost = tf.linalg.global_norm([each.values[0] for each in residuals])
    last = lines(tmp_path / "run.jsonl", "error")[-1]
    assert (last["wire"], last["measured"]) == ("sign", True)
    assert last["error"] == pytest.approx(float(lost / gradient), rel=1e-4)


@pytest.mark.parametrize(
    "wire, least, most",
    [
        pytest.param("bf16", 2**-8, 2**-8, marks=FULL),
        ("int8", 1 / 254, 0.06),
    ],
)
def test_the_error_without_feedback_is_its_bound(tmp_path, wire, least, most):
    telemetry = Telemetry(tmp_path / "run.jsonl")
    trained(on_two(wire), telemetry)
    for line in lines(tmp_path / "run.jsonl", "error"):
        assert not line["measured"]
        assert least * 0.999 <= line["error"] <= most * 1.001
    assert "<= 0.0" in telemetry.summary()


@pytest.mark.slow
def test_errors_are_asked_for_while_a_fit_lasts(int8):
    telemetry = Telemetry()
    model = trained(int8, telemetry)
    assert int8.reducer.watch is None
    before = telemetry._samples.distortions()
    assert before
    fit(model)
    assert telemetry._samples.distortions() == before
    fit(model, [telemetry])
    assert telemetry._samples.distortions() != before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wire, errors", [("fp32", True), ("int8", False)])
def test_otherwise_a_step_is_the_same_graph(wire, errors):
    strategy = on_two(wire)
    with strategy.scope():
        model = compiled()
    fit(model)
    traced = model.train_function
    fit(model, [Telemetry(errors=errors)])
    assert model.train_function is traced


@pytest.mark.parametrize("wire", ["int8", pytest.param("sign", marks=FULL)])
def test_weights_are_the_same_with_and_without(wire):
    strategy = on_two(wire)
    weights = []
    for callbacks in ([], [Telemetry()]):
        with strategy.scope():
            model = compiled()
        fit(model, callbacks, epochs=2)
        weights.append(model.get_weights())
    for mine, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(mine, expected)


# ------------------------------------------------------------------- choices


@pytest.mark.slow
def test_choices_and_switches(tmp_path):
    file = tmp_path / "links.json"
    Chooser(Link(1e-6, 1e-9), 1e-10, 2).dump(file)
    strategy = on_two("int8", "auto", schedule_file=file)
    chooser = strategy.reducer.team.schedules

    class Decide(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for row in rows(strategy.reducer):
                if epoch == 1 and row.wire == "int8":
                    self.before = row.algorithm
                    chooser.decide(row.bytes, Choice("tree", 1e-3, "ring", 2e-3, "measured"))

    decide = Decide()
    with strategy.scope():
        model = compiled()
    fit(model, [Telemetry(tmp_path / "run.jsonl"), decide], epochs=3)
    choices = {line["bucket"]: line for line in lines(tmp_path / "run.jsonl", "choice")}
    assert {line["wire"] for line in choices.values()} == {"fp32", "int8"}
    (switch,) = lines(tmp_path / "run.jsonl", "switch")
    assert (switch["before"], switch["algorithm"], switch["why"]) == (
        decide.before,
        "tree",
        "measured",
    )
    assert decide.before == choices[switch["bucket"]]["algorithm"] != "tree"
    assert 2 * STEPS <= switch["step"] <= 3 * STEPS


@pytest.mark.slow
def test_methods_that_are_chosen_live(tmp_path, monkeypatch):
    """Train two models whose optimizers have one name by one strategy, too."""
    strategy = ScaleStrategy("ring", devices=["CPU:0", "CPU:1"], method=Adaptive(1.0, ("int8",)))
    models, made = [], 0  # what is known of an optimizer goes with it
    with eager_to_change(monkeypatch):
        for name in "ab":
            told, timeline = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.json"
            telemetry = Telemetry(told, timeline=timeline, profile=(1, 12 * STEPS))
            models.append(trained(strategy, telemetry, epochs=12))
            changes = [c for p in strategy.reducer.packings.values() for c in p.changes]
            written = lines(told, "method")
            assert written == [{"kind": "method", **dataclasses.asdict(c)} for c in changes[made:]]
            assert written
            check_marks(timeline, written)
            made = len(changes)


def check_marks(timeline, changes):
    events = json.loads(timeline.read_text())["traceEvents"]
    for rank in (0, 1):
        marks = [event for event in events if event["ph"] == "i" and event["pid"] == rank]
        assert [mark["args"] for mark in marks] == [
            {"why": change["why"], "step": change["step"]} for change in changes
        ]
        for mark, change in zip(marks, changes, strict=True):
            assert mark["name"].endswith(f"{change['after']} instead of {change['before']}")
    names = " ".join(event["name"] for event in events if event["ph"] == "b")
    assert changes[0]["bucket"] in names


# --------------------------------------------------------------------- sinks


def test_the_bar_has_two_more_numbers_and_history_has_all(int8, capsys):
    """Train with ``Warmup``, which adds the learning rate."""
    warmup = Warmup(steps=3)
    history = trained(int8, Telemetry(), warmup, verbose=1, epochs=2).history.history
    lines = re.split(r"[\r\n]", capsys.readouterr().out)
    bars = [dict(re.findall(r" - (\w+): (\S+)", line)) for line in lines]
    assert max(map(len, bars)) == 3
    for bar in bars:
        assert bar.keys() <= {"loss", "learning_rate", "samples_per_second"}
    names = {"samples_per_second", "communication_ms", "exposed_ms", "sent_mb", "saved_mb"}
    assert {*names, "efficiency_estimated", "learning_rate", "loss"} == history.keys()
    model = trained(int8, Telemetry(progress=False))
    assert model.history.history.keys() == {"loss"}


def test_other_callbacks_see_what_the_bar_leaves_out(int8):
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs))
    trained(int8, Telemetry(), note, epochs=2, verbose=1)
    assert "exposed_ms" in seen[-1]


def test_tensorboard(tmp_path, int8):
    trained(int8, Telemetry(tmp_path / "run.jsonl", tensorboard=tmp_path / "board"), epochs=2)
    (file,) = (tmp_path / "board").iterdir()
    found = {}
    for raw in tf.data.TFRecordDataset(str(file)):
        event = tf.compat.v1.Event.FromString(raw.numpy())
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    errors = lines(tmp_path / "run.jsonl", "error")
    (name,) = {f"telemetry/error/{line['bucket']}" for line in errors}
    assert [step for step, _ in found[name]] == [line["step"] for line in errors]
    assert [value for _, value in found[name]] == pytest.approx([line["error"] for line in errors])
    assert found["telemetry/sent_mb"][-1][0] == 2 * STEPS
    assert found["telemetry/sent_mb"][-1][1] > 0


def test_timeline(tmp_path, int8):
    before = tmp_path / "run.jsonl"
    timeline = tmp_path / "trace.json"
    trained(int8, Telemetry(before, timeline=timeline, profile=(2, 4)))
    steps = lines(before, "step")
    assert [line["usual"] for line in steps] == [False, True, False, False, True]
    begin, end = 1e6 * steps[2]["begin"], 1e6 * steps[3]["end"]
    events = json.loads(timeline.read_text())["traceEvents"]
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        names = [e["args"]["name"] for e in mine if e["ph"] == "M"]
        assert names == [f"rank {rank}, within this process to 1", "compute"]
        compute = [event for event in mine if event["ph"] == "X"]
        assert {event["name"] for event in compute} == {"backward", "forward and update"}
        begins, ends = ([e for e in mine if e["ph"] == phase] for phase in "be")
        assert [e["id"] for e in begins] == [e["id"] for e in ends]
        gradients = [event for event in begins if "gradients" in event["name"]]
        assert len(gradients) == 2 * 2  # buckets in steps
        assert all(begin <= event["ts"] < end for event in [*compute, *begins])
        assert all(event["dur"] > 0 for event in compute)


def test_a_timeline_of_one_device(tmp_path):
    fit(compiled(), [Telemetry(timeline=tmp_path / "trace.json", profile=(1, 2))])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0}
    assert {event["ph"] for event in events} == {"M", "X"}


@pytest.mark.slow
def test_a_fit_that_ends_within_the_timeline(tmp_path, int8):
    trained(int8, Telemetry(timeline=tmp_path / "trace.json", profile=(3, 100)))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_fit_that_ends_before_the_timeline(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tfscale"):
        fit(compiled(), [Telemetry(timeline=tmp_path / "trace.json")])
    assert "begin after 10 steps of fit, but fit made only 5" in caplog.text
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.slow
def test_another_profile_is_under_way(tmp_path, caplog, int8):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        with caplog.at_level(logging.WARNING, "tfscale"):
            trained(int8, Telemetry(timeline=tmp_path / "trace.json", profile=(1, 3)))
    finally:
        tf.profiler.experimental.stop()
    assert "another profile is running" in caplog.text
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "b", "e"}


@pytest.mark.slow
def test_evaluate_and_predict_take_it(int8):
    telemetry = Telemetry()
    model = trained(int8, telemetry)
    x, y = numbers()
    plain = model.evaluate(x, y, verbose=0)
    assert model.evaluate(x, y, verbose=0, callbacks=[telemetry]) == plain
    assert model.predict(x, verbose=0, callbacks=[telemetry]).shape == (len(x), 1)


def test_summary_and_picture(int8):
    telemetry = Telemetry()
    trained(int8, telemetry, epochs=2)
    text = telemetry.summary()
    for word in ("samples per second", "exposed", "saved in all", "int8", "ring", "asked for"):
        assert word in text
    pytest.importorskip("matplotlib")
    figure = telemetry.draw()
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "samples per second",
        "ms per step",
        "MB per step",
    ]
    assert figure._repr_png_().startswith(b"\x89PNG")
    (whole,) = re.findall(r"to step 1: ([\d,]+) ms", figure.axes[-1].get_xlabel())
    traced = float(whole.replace(",", ""))
    assert figure.axes[1].get_ylim()[1] < traced / 3
    for line in (line for panel in figure.axes for line in panel.lines):
        assert 1 not in line.get_xdata()


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"profile": (3, 3)}, r"such as \(10, 13\); got \(3, 3\)"),
        ({"batch": 0}, "batch is a number of samples .*1 or more; got 0"),
        ({"baseline": -1.0}, "baseline is a number of samples .*more than 0; got -1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        Telemetry(**arguments)


@pytest.mark.parametrize("asked", ["summary", "draw"])
def test_before_fit_there_is_nothing_to_tell(asked):
    with pytest.raises(ValueError, match=r"nothing to show yet: .* callbacks=\[telemetry\]"):
        getattr(Telemetry(), asked)()
