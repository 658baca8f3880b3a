import math

import pytest

from lanewise.config import Schedule
from lanewise.schedule import learning_rate


def rates(updates=100, **settings):
    schedule = Schedule(warmup=10, min_ratio=0.1, **settings)
    return [learning_rate(schedule, 2.0, u, updates) for u in range(updates)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(kind):
    rate = rates(kind=kind)
    assert rate[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rate) == pytest.approx(2.0)


def test_shapes():
    cosine, linear, wsd, constant = (rates(kind=k) for k in ("cosine", "linear", "wsd", "constant"))
    assert [cosine[-1], linear[-1], wsd[-1]] == pytest.approx([0.2, 0.2, 0.2])
    assert constant[-1] == 2.0
    middle = 10 + 89 / 2
    assert cosine[54] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * (54 - 10) / 89)))
    assert linear[54] == pytest.approx(2.0 - 1.8 * (54 - 10) / 89)
    assert wsd[int(middle)] == 2.0
    assert sum(r < 2.0 for r in wsd[10:]) == pytest.approx(0.2 * 90, abs=1)


def test_fewer_steps_than_warm_up():
    assert rates(updates=3, kind="cosine") == pytest.approx([0.2, 0.4, 0.6])
