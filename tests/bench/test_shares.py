"""``tfscale bench shares``, on a few steps."""

from tfscale.tools.bench import shares


def test_it_prints_a_row_for_each_kind_of_shares(capsys):
    assert shares.main(["--workers", "2", "--steps", "6", "--ms", "1"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    found = {row[0]: row for row in rows if row[0] in (shares.EQUAL, shares.FIXED, shares.MEASURED)}
    assert len(found) == 3, printed
    assert found[shares.EQUAL][3] == "50.0%" and found[shares.FIXED][3] == "33.3%"
    assert all(float(row[4]) < 1e-6 for row in found.values()), printed
