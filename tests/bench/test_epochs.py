"""``tfscale bench epochs``, in a process of its own: it makes its devices."""

import pytest

from tests import warm


@pytest.mark.slow
def test_it_compares_strategies():
    code = (
        "from tfscale.tools.bench import epochs; epochs.main(['--devices', '2', '--rounds', '1'])"
    )
    ran = warm.run(["-c", code])
    assert ran.returncode == 0, ran.stdout
    for name in ("one device", "MirroredStrategy", "ScaleStrategy"):
        assert name in ran.stdout
