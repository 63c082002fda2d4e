import pytest
import torch

from regard.errors import RegardError
from regard.generate import ChainProcessor, SamplingState, parse_chain


def test_a_processor_gives_what_the_chain_gives():
    words = ["repetition=1.3", "dry={multiplier=0.8, allowed_length=1}", "min_p=0.1", "typical=0.9"]
    chain, generator = parse_chain(words), torch.Generator().manual_seed(0)
    processor = ChainProcessor(chain)
    ids = torch.randint(20, (3, 6), generator=generator)
    for _ in range(5):
        scores = torch.randn(3, 20, generator=generator)
        expected = chain.process(scores, SamplingState.from_prompts(ids.tolist(), 1))
        torch.testing.assert_close(processor(ids, scores), expected)
        ids = torch.cat([ids, torch.randint(20, (3, 1), generator=generator)], 1)


@pytest.mark.parametrize(
    "words", [["mirostat_2=2.0"], ["adaptive_p=0.3"], ["top_k=9", "mirostat_1=2"]]
)
def test_samplers_with_a_memory_learn_one_call_later(words):
    chain, generator = parse_chain(words), torch.Generator().manual_seed(0)
    processor, sampling = ChainProcessor(chain), SamplingState.from_prompts([[1, 2]], 30, seed=0)
    ids = torch.tensor([[1, 2]])
    for _ in range(30):
        scores = torch.randn(1, 40, generator=generator)
        expected = chain.process(scores, sampling)
        torch.testing.assert_close(processor(ids, scores), expected)
        drawn = chain(scores, sampling)
        sampling.append(drawn)
        ids = torch.cat([ids, drawn.unsqueeze(1)], 1)


def test_another_text_begins_anew():
    processor, scores = (
        ChainProcessor(parse_chain(["min_new_tokens=2"]), stop=(0,)),
        torch.zeros(1, 4),
    )
    for _ in range(2):
        ids = torch.tensor([[3, 2]])
        possible = []
        for _ in range(3):
            possible.append(bool(processor(ids, scores)[0, 0].isfinite()))
            ids = torch.cat([ids, torch.ones(1, 1, dtype=torch.long)], 1)
        assert possible == [False, False, True]


def test_settings_that_leave_nothing_are_named():
    processor = ChainProcessor(parse_chain(["xtc=0.5", "ban=[0, 1, 2, 3]"]))
    with pytest.raises(RegardError, match=r"row 0 has no token left to sample: ban.* removed"):
        processor(torch.tensor([[3, 2]]), torch.zeros(1, 4))


def test_what_ends_a_text_may_be_a_list():
    processor = ChainProcessor(parse_chain("min_new_tokens=5"), stop=[0])
    processed = processor(torch.tensor([[3, 2]]), torch.zeros(1, 4))
    assert processed.isfinite().tolist() == [[False, True, True, True]]


def test_words_are_no_chain():
    with pytest.raises(RegardError, match="chain must be a Chain, as parse_chain makes it"):
        ChainProcessor(["top_p=0.5"])


@pytest.mark.parity
def test_transformers_writes_what_we_write():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = 0
    model = GPT2LMHeadModel(config).eval()
    words = [
        "repetition=1.3",
        "frequency=0.4",
        "dry={multiplier=2.0, allowed_length=1}",
        "ban=[0]",
        "greedy",
    ]
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        do_sample=True,
        top_k=0,
        logits_processor=[ChainProcessor(parse_chain(words))],
    )
    expected = by_hand(model, prompt[0].tolist(), parse_chain(words), 20)
    assert generated[0, 5:].tolist() == expected


@torch.no_grad()
def by_hand(model, prompt, chain, tokens):
    sampling = SamplingState.from_prompts([prompt], tokens)
    for _ in range(tokens):
        ids = sampling.history[:, : int(sampling.lengths)]
        sampling.append(chain(model(ids).logits[:, -1], sampling))
    return sampling.history[0, len(prompt) :].tolist()
