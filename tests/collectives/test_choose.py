"""Schedules that ``auto`` takes, and files that name others."""

import json

import pytest

from tfscale.collectives import ALGORITHMS, Cluster, Link
from tfscale.collectives.choose import Choice, Chooser
from tfscale.support.records import RecordError

LINK = Link(alpha=1e-3, beta=1e-9)
GAMMA = 1e-10
HOSTS = Cluster([4] * 4, inner=Link(1e-5, 1e-10), outer=Link(1e-3, 1e-9))
SIZES = (1, 1_000, 1_000_000, 123_456_789)


def chooser(ranks=6):
    return Chooser(LINK, GAMMA, ranks)


class TestModel:
    @pytest.mark.parametrize("ranks", [3, 4, 6, 8, 100])
    @pytest.mark.parametrize("size", SIZES)
    def test_it_takes_the_least_predicted_time(self, ranks, size):
        flat = ("ring", "tree", "halving", "direct")
        times = {a: ALGORITHMS[a](ranks).cost.time(size, LINK, GAMMA) for a in flat}
        choice = chooser(ranks).choose(size)
        assert choice.seconds == pytest.approx(min(times.values()), rel=1e-9)
        assert times[choice.algorithm] == choice.seconds
        assert choice.runner_up != choice.algorithm
        assert sorted(times.values())[1] == pytest.approx(choice.runner_up_seconds, rel=1e-9)
        assert choice.why == "cost model"

    def test_small_and_large_buffers_differ(self):
        assert chooser(6).choose(1_000).algorithm == "tree"
        assert chooser(6).choose(100_000_000).algorithm == "direct"

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_two_ranks_have_no_choice(self, ranks):
        choice = chooser(ranks).choose(1000)
        assert (choice.algorithm, choice.runner_up, choice.runner_up_seconds) == (
            "ring",
            None,
            None,
        )

    def test_of_equals_the_first(self):
        """Ring and direct differ only in the last digit without gamma, in either direction."""
        found = {Chooser(Link(0.0, 1e-9), 0.0, 6).choose(n).algorithm for n in range(1, 5000, 7)}
        assert found == {"ring"}

    def test_groups_within_the_cluster_are_used(self):
        several = Chooser(HOSTS, GAMMA, 16)
        choice = several.choose(1_000_000)
        assert choice.algorithm.startswith("hierarchical")
        schedule = several.schedule(choice.algorithm)
        assert schedule.name.startswith("hierarchical(4x4")
        assert schedule.cost.time(1_000_000, HOSTS, GAMMA) == choice.seconds

    def test_every_candidate_is_a_correct_schedule(self):
        several = Chooser(HOSTS, GAMMA, 16)
        outers = ("hierarchical", *(f"hierarchical/{a}" for a in ("tree", "halving", "direct")))
        names = {several.schedule(name).verify() and several.schedule(name).name for name in outers}
        assert len(names) == 4

    def test_groups_that_are_not_the_ranks(self):
        with pytest.raises(ValueError, match=r"\(4, 4, 4, 4\) are not 15 ranks"):
            Chooser(HOSTS, GAMMA, 15)

    @pytest.mark.parametrize("machine", [LINK, HOSTS])
    def test_ranges_say_what_choose_says(self, machine):
        made = Chooser(machine, GAMMA, 16)
        ranges = made.ranges()
        starts = [start for start, _ in ranges]
        assert starts[0] == 1 and starts == sorted(set(starts)) and len(starts) > 1
        for start, choice in ranges:
            assert made.choose(start) == choice
        for start, (_, before) in zip(starts[1:], ranges, strict=False):
            assert made.choose(start - 1).algorithm == before.algorithm

    def test_what_was_measured_holds_for_that_size_alone(self):
        made = chooser()
        measured = Choice("ring", 0.5, "tree", 0.6, "measured")
        made.decide(1000, measured)
        assert made.choose(1000) == measured
        assert made.choose(1001).why == "cost model"


class TestFile:
    def edited(self, path, edit, made=None):
        (made or chooser()).dump(path)
        fields = json.loads(path.read_text())
        edit(fields)
        path.write_text(json.dumps(fields))
        return path

    @pytest.mark.parametrize("machine", [LINK, HOSTS])
    def test_dumped_and_loaded_it_chooses_the_same(self, tmp_path, machine):
        made = Chooser(machine, GAMMA, 16)
        made.decide(5000, Choice("central", 0.5, "tree", 0.6, "measured"))
        made.dump(tmp_path / "auto.json")
        again = Chooser.load(tmp_path / "auto.json", 16)
        assert (again.machine, again.gamma) == (made.machine, made.gamma)
        for size in (1, 100, 5000, 5001, 1 << 20, 1 << 30, *(s for s, _ in made.ranges())):
            assert again.choose(size).algorithm == made.choose(size).algorithm
            assert again.choose(size).why == f"pinned by {tmp_path / 'auto.json'}"
        assert again.choose(1 << 20).seconds == made.choose(1 << 20).seconds

    def test_a_pin_overrides_the_model(self, tmp_path):
        def pin(fields):
            fields["table"] = [
                {"from_bytes": 1000, "algorithm": "central"},
                {"from_bytes": 2000, "algorithm": "auto"},
            ]

        pinned = Chooser.load(self.edited(tmp_path / "auto.json", pin), 6)
        found = [pinned.choose(size).algorithm for size in (999, 1000, 1999, 2000)]
        assert found == ["tree", "central", "central", "tree"]
        assert pinned.choose(1000).runner_up is None
        assert pinned.choose(2000) == chooser().choose(2000)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda f: f.pop("gamma"), r"gamma: expected a number, got nothing"),
            (lambda f: f.update(gamma=-1), r"gamma: expected a finite number, 0 or more, got -1"),
            (lambda f: f.update(gamma=float("nan")), r"gamma: expected a finite number"),
            (
                lambda f: f.update(ranks=7),
                r"ranks: expected 6, the number of ranks that take part, got 7",
            ),
            (lambda f: f.update(ranks=6.5), r"ranks: expected a whole number, got 6.5"),
            (lambda f: f.update(gama=1), r"gama: expected no such key, only ranks, link"),
            (lambda f: f.pop("link"), r"link: expected an object \{...\}, got nothing"),
            (lambda f: f["link"].update(alpha="1"), r"link.alpha: expected a number, got '1'"),
            (lambda f: f.pop("table"), r"table: expected a list"),
            (lambda f: f.update(table=[5]), r"table\[0\]: expected an object \{...\}, got 5"),
            (
                lambda f: f["table"][1].update(algorithm="rign"),
                r"table\[1\].algorithm: expected one of auto, ring, .*central, got 'rign'",
            ),
            (
                lambda f: f["table"][1].update(from_bytes=1),
                r"table\[1\].from_bytes: expected more than the 1 before it, got 1",
            ),
            (lambda f: f["table"][0].update(secs=1), r"table\[0\].secs: expected no such key"),
            (
                lambda f: f.update(
                    groups=[4, 4], inner=f["link"], outer=f["link"], link=f.pop("link")
                ),
                r"groups: expected sizes that add up to 6 ranks, got \[4, 4\]",
            ),
            (lambda f: f.update(groups=[0]), r"groups: expected a size of 1 or more"),
        ],
    )
    def test_a_wrong_file_says_where_and_what(self, tmp_path, edit, message):
        path = self.edited(tmp_path / "auto.json", edit)
        with pytest.raises(RecordError, match=message) as error:
            Chooser.load(path, 6)
        assert str(path) in str(error.value)

    def test_what_is_not_json_says_the_line(self, tmp_path):
        path = tmp_path / "auto.json"
        chooser().dump(path)
        path.write_text(path.read_text().replace('"gamma":', '"gamma"'))
        with pytest.raises(RecordError, match=r"auto.json, line 7, column \d+: this is not JSON"):
            Chooser.load(path, 6)

    def test_a_dump_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "auto.json"
        path.write_text("old")
        monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            chooser().dump(path)
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]
