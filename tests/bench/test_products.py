"""``tfscale bench products``, on small batches."""

from tfscale.bench import products


def test_it_measures_costs(capsys):
    parts = ["--parts", "cost,memory", "--models", "mlp"]
    assert products.main([*parts, "--rounds", "1", "--shrink", "64"]) == 0
    printed = capsys.readouterr().out
    assert "product" in printed and printed.count("mlp") >= 2
