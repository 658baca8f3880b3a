"""Time and memory: sums, limits known by hand, and monotony."""

from dataclasses import fields, replace

import numpy as np
import pytest

from lanewise import config
from lanewise.planner.choice import SCHEDULES, Choice
from lanewise.planner.cluster import read_cluster
from lanewise.planner.cost import Time, calibrated, ring, step_time
from lanewise.planner.memory import Engine, in_flight, memory
from lanewise.planner.model import Transformer, describe

MODEL = describe(config.load_model({"preset": "llama3-8b"}))
CLUSTER = read_cluster("8x8 H100")


def test_parts_add_up_and_arrays_are_many_choices():
    choices = Choice(data=np.array([64.0, 8.0]), tp=np.array([1.0, 8.0]), micro=np.array([1.0, 1.0]))
    both = step_time(MODEL, choices, 8192, CLUSTER)
    for i, one in enumerate((Choice(data=64), Choice(data=8, tp=8))):
        alone = step_time(MODEL, one, 8192, CLUSTER)
        parts = [float(np.broadcast_to(getattr(both, f.name), 2)[i]) for f in fields(Time)]
        assert sum(parts) == pytest.approx(float(alone.total), rel=1e-12)


def test_no_step_beats_the_device():
    """Model FLOPs at the peak rate are a bound on any prediction."""
    for choice in (Choice(data=64, micro=4), Choice(data=8, tp=8, count=4), Choice(data=8, pp=8, count=32)):
        tokens = float(choice.data * choice.micro * choice.count * 8192)
        bound = MODEL.step_flops(8192, tokens) / (64 * CLUSTER.device.peak["bf16"])
        assert float(step_time(MODEL, choice, 8192, CLUSTER).total) > bound


def test_bubble_is_that_of_the_formula():
    rates = replace(calibrated()["fused"], bubble=1.0, uneven=0.0, network=1e9, link=1e9)
    quiet = replace(CLUSTER, latency=(0.0, 0.0))
    for chunks in (1, 4):
        choice = Choice(data=8, pp=8, count=16, chunks=chunks)
        time = step_time(MODEL, choice, 8192, quiet, rates=rates)
        busy = sum(
            float(getattr(time, f.name))
            for f in fields(Time)
            if f.name not in ("bubble", "data", "optimizer", "jitter")
        )
        assert float(time.bubble) == pytest.approx(busy * 7 / (16 * chunks), rel=1e-3)


def test_a_ring_moves_what_a_ring_moves():
    rates = replace(calibrated()["fused"], link=1.0, network=1.0)
    quiet = replace(CLUSTER, latency=(0.0, 0.0))
    assert float(ring(8e9, 8, 1, quiet, rates)) == pytest.approx(8e9 * 7 / 8 / 450e9)
    # 64 ranks: a node's eight links to the network bring in what the other seven nodes hold
    assert float(ring(8e9, 64, 1, quiet, rates)) == pytest.approx(max(8e9 * 7 / 8 / (8 * 50e9), 8e9 * 7 / 8 / 450e9))


def test_microbatches_in_flight():
    one = Choice(pp=4, count=8)
    assert [float(in_flight(one, stage)) for stage in range(4)] == [4, 3, 2, 1]
    assert float(in_flight(replace(one, schedule=SCHEDULES.index("gpipe")), 3)) == 8
    # interleaved: (pp - 1) / v microbatches' worth more than 1F1B in the first rank (arXiv:2205.05198, section 4.2.3)
    assert float(in_flight(replace(one, chunks=2, schedule=SCHEDULES.index("interleaved")), 0)) == 4 * (1 + 3 / 8)


def test_sharding_divides_what_it_should():
    alone = memory(MODEL, Choice(), 4096)
    P = MODEL.parameters
    assert float(alone.weights) == pytest.approx(2 * P, rel=1e-3)
    assert float(alone.gradients) == pytest.approx(4 * P, rel=1e-3)
    assert float(alone.optimizer) == pytest.approx(12 * P, rel=1e-3)
    shared = memory(MODEL, Choice(data=8, zero=1), 4096)
    assert float(shared.optimizer) == pytest.approx(float(alone.optimizer) / 8)
    # its chunk of seven others' arrives beside its own gradient
    assert float(shared.gradients) == pytest.approx(float(alone.gradients) * (1 + 7 / 8))
    assert float(memory(MODEL, Choice(data=8, zero=2), 4096).gradients) == pytest.approx(float(alone.gradients) / 8)
    assert float(memory(MODEL, Choice(tp=8), 4096).weights) == pytest.approx(2 * P / 8, rel=1e-3)


def test_lanes_of_a_replica_keep_gradients_of_their_own():
    """The tree of 8 lanes has two nodes waiting (sizes 4 and 2) beside the lane at work, which is added onto its left
    sibling; with two microbatches the lane at work needs a gradient of its own. `Reducer` is asked below."""
    one, eight, two = (
        memory(MODEL, Choice(data=8, lanes=n, count=n * k, zero=2), 4096) for n, k in ((1, 1), (8, 1), (8, 2))
    )
    assert float(eight.gradients) == pytest.approx(3 * 4 * MODEL.parameters, rel=1e-3)
    assert float(two.gradients) == pytest.approx(4 * 4 * MODEL.parameters, rel=1e-3)
    assert float(one.gradients) == pytest.approx(float(eight.gradients) / 3 / 8)


@pytest.mark.parametrize(("lanes", "microbatches"), [(1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (2, 2), (3, 2), (5, 2)])
def test_gradients_of_lanes_are_those_the_reducer_keeps(lanes, microbatches):
    from lanewise.planner import steps

    words = ["model.preset=tiny-dense", "model.vocab_size=300", "model.layers=1", "model.hidden=64", "batch.size=1"]
    words += [f"batch.lanes={lanes}", f"batch.microbatches={microbatches}", "batch.sequence_length=16"]
    step = steps.Step(config.load(None, words), steps.alone())
    for _ in range(2):
        step()
    kept = {len(bucket_sum.pool) for bucket_sum in step.replica.reducer.sums}
    held = memory(MODEL, Choice(lanes=lanes, count=lanes * microbatches), 4096).gradients
    assert kept == {round(float(held) / (4 * MODEL.parameters))}


def test_experts_are_spread_by_ep():
    model = describe(config.load_model({"preset": "deepseek-v3"}))
    whole, spread = (memory(model, Choice(data=64, ep=ep), 4096, Engine()) for ep in (1, 64))
    experts = 2 * model.blocks * model.block_experts
    assert float(whole.weights - spread.weights) == pytest.approx(experts * 63 / 64, rel=1e-6)


@pytest.mark.parametrize("recompute", [1, 2])
def test_recomputation_trades_time_for_memory(recompute):
    none, some = Choice(micro=2), Choice(micro=2, recompute=recompute)
    assert float(memory(MODEL, some, 8192).activations) < float(memory(MODEL, none, 8192).activations)
    assert float(step_time(MODEL, some, 8192, CLUSTER).total) > float(step_time(MODEL, none, 8192, CLUSTER).total)


def test_attention_that_keeps_its_scores():
    """arXiv:2205.05198, equation 1: s b h (34 + 5 a s / h) bytes a layer, of plain feed-forwards."""
    gpt = Transformer(24, 4096, 32, 32, 128, 128, 16384, 50304, matrices=2)
    engine = Engine(scores=5.0, slack=0.0)
    held = float(memory(gpt, Choice(micro=2), 1024, engine).activations)
    assert held == pytest.approx(24 * 1024 * 2 * 4096 * (34 + 5 * 32 * 1024 / 4096), rel=0.05)


def test_the_ends_of_an_uneven_pipeline_are_short():
    gpt = Transformer(22, 4096, 32, 32, 128, 128, 16384, 50304, matrices=2)
    choice = Choice(pp=8, count=64, micro=1)
    even, short = (memory(gpt, choice, 1024, Engine(short=short, slack=0.0)) for short in (False, True))
    assert float(short.activations) == pytest.approx(float(even.activations) * 7 / 8), "the second stage has 3 blocks"
    assert float(even.weights) - float(short.weights) == pytest.approx(2.0 * gpt.embedding), "and no embedding"
    kept = float(memory(gpt, replace(choice, flight=16), 1024, Engine(slack=0.0)).activations)
    assert kept == pytest.approx(2 * float(even.activations)), "a schedule that may hold twice as many"


@pytest.mark.parametrize("preset", ["tiny", "tiny-dense", "qwen2-0.5b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_cut_of_a_pipeline_is_as_even_as_the_exact_one(preset, ranks):
    from lanewise.parallel.stages import end_cost, layer_cost, stages
    from lanewise.planner.stages import cut

    model = config.load_model({"preset": preset, "vocab_size": 4096})
    exact = stages(model, ranks)
    costs = [sum(layer_cost(model, index) for index in stage) for stage in exact]
    costs[-1] += end_cost(model)
    most, last, uneven = (float(number) for number in cut(describe(model), ranks))
    assert uneven == pytest.approx(max(costs) * ranks / sum(costs) - 1, abs=0.12)
    if ranks > 1:
        assert abs(last - model.layers + exact[-1].start - getattr(model, "mtp_layers", 0)) <= 1
        assert abs(most - max(len(stage) for stage in exact[:-1])) <= 1
