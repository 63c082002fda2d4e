import math

import pytest
import torch

from regard.generate import Chain, SamplingState, TracedChain, generate, parse_chain

LOGITS = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])
WORDS = ["repetition=1.5", "top_k=4", "typical=0.6", "temperature=0.5"]


def traced(words=WORDS, logits=LOGITS, seed=0):
    chain = TracedChain(parse_chain(words).samplers)
    chain(logits, SamplingState.from_prompts([[0, 1]] * len(logits), 1, seed=seed))
    return chain.tokens[0]


def bits(p):
    return -sum(x * math.log2(x) for x in p.tolist() if x > 0)


def test_every_number_of_a_trace_by_hand():
    (token,) = traced()
    before, logits = LOGITS.softmax(-1)[0], LOGITS
    assert [step.sampler for step in token.samplers] == WORDS
    assert token.entropy == pytest.approx(bits(before), abs=1e-5)
    assert token.model_prob == pytest.approx(before[token.id].item())
    for step, sampler in zip(token.samplers, parse_chain(WORDS).samplers, strict=True):
        logits = sampler(logits, SamplingState.from_prompts([[0, 1]], 1))
        after = logits.softmax(-1)[0]
        gone = [v for v in range(8) if before[v] > 0 and after[v] == 0]
        assert step.remaining == int(logits.isfinite().sum())
        assert step.removed == len(gone)
        assert step.mass == pytest.approx(1 - before[gone].sum().item(), abs=1e-6)
        assert step.entropy == pytest.approx(bits(after), abs=1e-5)
        assert [change.id for change in step.top_removed] == sorted(gone, key=lambda v: -before[v])[
            :5
        ]
        stays = [v for v in range(8) if v not in gone and abs(after[v] - before[v]) > 1e-6]
        moved = sorted(stays, key=lambda v: -abs(after[v] - before[v]))[:5]
        assert {change.id for change in step.top_changed} == set(moved)
        for change in [*step.top_removed, *step.top_changed]:
            assert change.before == pytest.approx(before[change.id].item(), abs=1e-6)
            assert change.after == pytest.approx(after[change.id].item(), abs=1e-6)
        before = after
    assert token.final_prob == pytest.approx(before[token.id].item())


def test_tracing_changes_nothing(table_model):
    words = ["repetition=1.2", "typical=0.9", "xtc=0.5", "mirostat_2=2"]
    plain, seen = parse_chain(words), TracedChain(parse_chain(words).samplers)
    prompts = [[1], [2, 3, 4]]
    answers = generate(table_model(), prompts, plain, max_new_tokens=20, seed=1)
    assert generate(table_model(), prompts, seen, max_new_tokens=20, seed=1) == answers
    assert [[token.id for token in row] for row in zip(*seen.tokens, strict=True)] == answers


def test_a_sampler_that_is_off_is_not_in_a_trace():
    (token,) = traced(["top_k=0", "temperature=1.0", "top_p=0.5"])
    assert [step.sampler for step in token.samplers] == ["top_p=0.5"]


def test_rows_of_their_own_are_traced_with_their_own_settings():
    chains = [parse_chain(["top_k=2"]), parse_chain(["top_k=3", "temperature=0.5"])]
    one, other = traced_together(chains)
    assert [step.sampler for step in one.samplers] == ["top_k=2", "temperature=1"]
    assert [step.remaining for step in one.samplers] == [2, 2]
    assert [step.sampler for step in other.samplers] == ["top_k=3", "temperature=0.5"]


def traced_together(chains):
    chain = TracedChain(Chain.per_row(chains).samplers)
    chain(LOGITS.expand(2, -1), SamplingState.from_prompts([[0], [1]], 1, seed=0))
    return chain.tokens[0]


def test_a_traced_chain_is_not_captured():
    assert parse_chain(WORDS).capturable
    assert not TracedChain(parse_chain(WORDS).samplers).capturable
