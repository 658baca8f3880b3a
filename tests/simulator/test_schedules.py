"""Our orders against those of torch's schedule objects, made without any process."""

import itertools
import re

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.schedules import get_schedule_class

from lanewise.errors import UserError
from lanewise.simulator.schedules import SCHEDULES, Action, order, stages_of

NAMES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip


class _Stage:
    """As much of a stage as a schedule's constructor asks for."""

    def __init__(self, index: int, ranks: int, count: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, ranks, 0
        self.is_first, self.is_last, self.has_backward = index == 0, index == count - 1, True
        self.submod, self.device = torch.nn.Identity(), torch.device("cpu")
        self.stage_index_to_group_rank = {i: i % ranks for i in range(count)}


def torchs_order(schedule: str, ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    stages = [_Stage(i, ranks, ranks * chunks) for i in stages_of(schedule, ranks, chunks)[0]]
    cls = get_schedule_class(NAMES[schedule])
    single = issubclass(cls, theirs.PipelineScheduleSingle)
    made = cls(stages[0] if single else stages, microbatches, loss_fn=lambda a, b: a)
    found = []
    for rank in range(ranks):
        flat = []
        for action in made.pipeline_order[rank]:
            flat += [] if action is None else action.sub_actions or [action]
        # they print as stage, kind, microbatch; what is no computation (a reduction of gradients) does not match
        words = [re.fullmatch(r"(\d+)([FBIW])(\d+)", str(action)) for action in flat]
        found.append([Action(word[2], int(word[1]), int(word[3])) for word in words if word])
    if schedule == "1f1b" and found[-1][0].microbatch == 1:
        # torch 2.13 lists the last rank's forwards from 1; what it runs (`_step_microbatches`) starts from 0
        found[-1] = [a._replace(microbatch=a.microbatch - (a.kind == "F")) for a in found[-1]]
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 9), (4, 16)])
def test_same_order_as_torch(schedule, ranks, microbatches):
    for chunks in {"gpipe": [1], "1f1b": [1], "zbv": [2], "dualpipev": [2]}.get(schedule, [2, 3]):
        assert order(schedule, ranks, microbatches, chunks) == torchs_order(schedule, ranks, microbatches, chunks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_is_done_once(schedule):
    chunks = {"gpipe": 1, "1f1b": 1}.get(schedule, 2)
    done = list(itertools.chain(*order(schedule, 4, 8, chunks)))
    assert len(done) == len(set(done))
    for stage, m in itertools.product(range(4 * chunks), range(8)):
        assert Action("F", stage, m) in done
        assert (Action("B", stage, m) in done) != (Action("I", stage, m) in done and Action("W", stage, m) in done)


def test_impossible_schedules_are_refused():
    with pytest.raises(UserError, match="unknown"):
        order("pipedream", 2, 4)
    with pytest.raises(UserError, match="needs 8 microbatches"):
        order("dualpipev", 4, 4, 2)
    with pytest.raises(UserError, match="two stages"):
        order("zbv", 4, 8, 1)
