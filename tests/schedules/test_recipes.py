"""Schedules of published trainings, in the words of tfscale."""

import pytest

from tfscale import schedules

IMAGENET = 1281167


def test_resnet_50_in_an_hour():
    """Goyal et al. 2017: sections 2.1 (rule), 2.2 (warm-up) and 5.1 (0.1 per 256; drops)."""
    recipe = schedules.Drops(
        0.1, at=[30, 60, 80], factor=0.1, start=0.1, warmup=5, unit="epochs", base_batch=256
    )
    steps = IMAGENET // 8192
    rate = recipe.for_batch(8192).in_steps(steps)
    assert [float(rate(steps * epoch)) for epoch in (0, 5, 29, 30, 59, 60, 79, 80, 89)] == (
        pytest.approx([0.1, 3.2, 3.2, 0.32, 0.32, 0.032, 0.032, 0.0032, 0.0032])
    )
    halfway = float(rate(steps * 5 // 2))
    assert halfway == pytest.approx((0.1 + 3.2) / 2)
    rises = {round(float(rate(i + 1)) - float(rate(i)), 6) for i in range(5 * steps)}
    assert rises == {round(3.1 / (5 * steps), 6)}  # the same amount in each iteration
    assert float(recipe.for_batch(256).in_steps(5004)(17)) == pytest.approx(0.1)  # the reference


# You et al. 2020, table 4: batch, rate times 1000, warm-up as a share of the training.
LAMB_BERT = [
    (512, 5 / 2**3.0, 1 / 320),
    (1024, 5 / 2**2.5, 1 / 160),
    (2048, 5 / 2**2.0, 1 / 80),
    (4096, 5 / 2**1.5, 1 / 40),
    (8192, 5 / 2**1.0, 1 / 20),
    (16384, 5 / 2**0.5, 1 / 10),
    (32768, 5 / 2**0.0, 1 / 5),
]


@pytest.mark.parametrize(("batch", "thousandths", "warmup"), LAMB_BERT)
def test_lamb_on_bert(batch, thousandths, warmup):
    """Use equal samples for each batch: 15625 steps of 32768. All warm up for 3125 steps."""
    steps = 15625 * 32768 // batch
    recipe = schedules.Polynomial(
        0.005,
        end=1,
        warmup=warmup,
        unit="epochs",
        base_batch=32768,
        scaling="square root",
    )
    rate = recipe.for_batch(batch).in_steps(steps)
    assert rate.warmup == pytest.approx(3125)
    assert float(rate(3125)) == pytest.approx(thousandths / 1000)
    assert float(rate(3125 / 5)) == pytest.approx(thousandths / 5000)
    middle = (3125 + steps) / 2
    assert float(rate(middle)) == pytest.approx(thousandths / 2000)
    assert float(rate(steps)) == 0


# The same paper, table 5: batch, rate times 100, warm-up in epochs of 90.
LAMB_RESNET = [
    (512, 4 / 2**3.0, 0.3125),
    (1024, 4 / 2**2.5, 0.625),
    (2048, 4 / 2**2.0, 1.25),
    (4096, 4 / 2**1.5, 2.5),
    (8192, 4 / 2**1.0, 5),
    (16384, 4 / 2**0.5, 10),
    (32768, 4 / 2**0.0, 20),
]


@pytest.mark.parametrize(("batch", "hundredths", "epochs"), LAMB_RESNET)
def test_lamb_on_imagenet(batch, hundredths, epochs):
    """Warm-ups of fractional epochs."""
    recipe = schedules.Polynomial(
        0.04, end=90, warmup=epochs, unit="epochs", base_batch=32768, scaling="square root"
    )
    steps = IMAGENET / batch
    rate = recipe.for_batch(batch).in_steps(steps)
    assert float(rate(epochs * steps)) == pytest.approx(hundredths / 100)
    assert float(rate(epochs * steps / 4)) == pytest.approx(hundredths / 400)
    assert float(rate(90 * steps)) == 0


def test_lars_at_32k():
    """Power 2 from the warm-up's end, as in Google's ResNet-50 for TPUs.

    (tensorflow/tpu, models/official/resnet/lars_util.py: ``poly_rate_schedule``; there the
    rate becomes 0 one step later.)
    """
    recipe = schedules.Polynomial(32.0, end=90, power=2, warmup=14, unit="epochs")
    steps = IMAGENET // 32768
    rate = recipe.in_steps(steps)
    assert [float(rate(epoch * steps)) for epoch in (0, 7, 14)] == pytest.approx([0, 16, 32])
    for epoch in range(14, 91):
        assert float(rate(epoch * steps)) == pytest.approx(32 * ((90 - epoch) / 76) ** 2)


def test_caffes_poly_policy():
    """Follow You, Gitman, Ginsburg 2017 (LARS): power 2, from the training's beginning."""
    recipe = schedules.Polynomial(1.0, end=90, begin=0, power=2, warmup=5, unit="epochs")
    rate = recipe.in_steps(40)
    assert float(rate(40 * 45)) == pytest.approx(1 / 4)
    assert float(rate(40 * 5)) == pytest.approx((85 / 90) ** 2)


def test_the_transformer():
    """Vaswani et al. 2017, equation 3, with d = 512 and 4000 steps of warm-up."""
    rate = schedules.InverseSquareRoot((512 * 4000) ** -0.5, warmup=4000)
    for step in (1, 100, 4000, 16000, 100000):
        published = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert float(rate(step)) == pytest.approx(published)
