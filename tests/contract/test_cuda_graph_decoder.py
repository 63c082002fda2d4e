"""Fast decoding gives what plain decoding gives, for every model that generates."""

import pytest
import torch

from contract.test_models import LANGUAGES, ROWS, TRANSFORMERS, make, near
from regard.accel import pack
from regard.accel.packed_decoder import PackedDecoder
from regard.generate import CudaGraphDecoder, generate, parse_chain

GREEDY = parse_chain(["greedy"])
PACKED = [case for case in TRANSFORMERS if isinstance(pack(make(case).model), PackedDecoder)]


def test_most_decoders_are_packed():
    assert len(PACKED) > 50


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("counts", [None, (3, 5, 4)])
@torch.inference_mode()
def test_a_packed_decoder_gives_the_logits_of_the_model(case, counts):
    subject = make(case)
    model, fast = subject.model, pack(subject.model)
    counts = None if counts is None else torch.tensor(counts)
    _, state = model.step(subject.ids[:, :5], model.start(ROWS, 12), counts=counts)
    _, fast_state = fast.step(subject.ids[:, :5], fast.start(ROWS, 12), counts=counts)
    steady = fast_state.with_static_shapes()
    for t in range(5, 8):
        ids = subject.ids[:, t : t + 1]
        expected, state = model.step(ids, state)
        actual, fast_state = fast.step(ids, fast_state)
        near(actual, expected)
    assert torch.equal(fast_state.lengths, state.lengths)
    steady.lengths.copy_(steady.lengths.new_tensor([5, 5, 5] if counts is None else [3, 5, 4]))
    for t in range(5, 8):
        again, steady = fast.step(subject.ids[:, t : t + 1], steady)
    near(again, expected)


@pytest.mark.parametrize("case", LANGUAGES)
def test_the_cuda_graph_decoder_generates_what_plain_generation_does(case):
    subject = make(case)
    prompts = [
        subject.ids[0, :1].tolist(),
        subject.ids[1, :6].tolist(),
        subject.ids[2, :3].tolist(),
    ]
    given = {"max_new_tokens": 8, "stop": {0, 1}, "source": subject.source}
    plain = generate(subject.model, prompts, GREEDY, **given)
    decoder = CudaGraphDecoder(pack(subject.model), capture=True)
    assert generate(decoder, prompts, GREEDY, **given) == plain
    assert generate(decoder, prompts, GREEDY, **given) == plain  # with the loop that was kept
