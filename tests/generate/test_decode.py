import pytest
import torch

from regard.errors import ConfigError, ShapeError
from regard.generate import Chain, detokenize_stream, generate, parse_chain, stream
from regard.models.base import Language
from regard.nn.state import Source
from regard.seeds import row_key

GREEDY = parse_chain(["greedy"])
PROMPTS = [[1], [2, 3, 4, 0, 1], [5, 5]]
TWO = Chain.per_row([parse_chain(["top_k=2"]), parse_chain(["top_k=3"])])
SOURCE = Source(torch.tensor([[4, 2, 9], [7, 0, 0], [3, 3, 0]]), torch.tensor([3, 1, 2]))


def by_hand(model, prompt, max_new_tokens, *, stop=(), source=None, slides=True):
    """Greedy continuation without any state: the whole window anew for every token."""
    window, answer = list(prompt), []
    if model.context is not None:
        window = window[-model.context :]
    for _ in range(max_new_tokens):
        if model.context is not None and len(window) > model.context:
            if not slides:
                return answer
            window = window[-max(1, model.context // 2) :]
        state = model.start(1, len(window), source)
        logits, _ = model.step(torch.tensor([window]), state)
        token = int(logits[0, 0].argmax())
        if token in stop:
            return answer
        answer.append(token)
        window.append(token)
    return answer


def row_of(source, row):
    return Source(source.ids[row : row + 1], source.lengths[row : row + 1])


def test_the_table_model_is_a_language(table_model):
    assert isinstance(table_model(), Language)


def test_ragged_prompts_are_continued_as_if_each_were_alone(table_model):
    model = table_model()
    answers = generate(model, PROMPTS, GREEDY, max_new_tokens=20)
    assert answers == [by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert len(set(map(tuple, answers))) == 3


def test_the_first_row_draws_the_same_alone_and_in_a_batch(table_model):
    model = table_model()
    together = generate(model, PROMPTS, Chain(), max_new_tokens=30, seed=3)
    assert together[0] == generate(model, PROMPTS[:1], Chain(), max_new_tokens=30, seed=3)[0]


def test_every_row_draws_from_its_own_generator(table_model, monkeypatch):
    model = table_model()
    together = generate(model, PROMPTS, Chain(), max_new_tokens=30, seed=3)
    monkeypatch.setattr("regard.generate.sampling_state.row_key", lambda seed, _: row_key(seed, 2))
    assert together[2] == generate(model, PROMPTS[2:], Chain(), max_new_tokens=30, seed=3)[0]


def test_the_same_seed_gives_the_same_text_and_another_another(table_model):
    one, same, other = (
        generate(table_model(), [[1]], Chain(), max_new_tokens=30, seed=seed) for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize("context", [None, 8])
def test_streaming_gives_what_generate_gives(table_model, context):
    model = table_model(context=context)
    streamed = list(stream(model, [2, 3], Chain(), max_new_tokens=25, stop={5}, seed=9))
    assert [streamed] == generate(model, [[2, 3]], Chain(), max_new_tokens=25, stop={5}, seed=9)


def test_a_row_ends_before_its_stop_and_the_others_go_on(table_model):
    model = table_model()
    answers = generate(model, PROMPTS, GREEDY, max_new_tokens=40, stop={0, 3})
    assert answers == [by_hand(model, prompt, 40, stop={0, 3}) for prompt in PROMPTS]
    assert len(set(map(len, answers))) > 1
    assert not {0, 3} & {token for answer in answers for token in answer}


def test_nothing_more_is_asked_once_every_row_has_stopped(table_model):
    model = table_model()
    steps = max(len(by_hand(model, prompt, 40, stop={0, 3})) for prompt in PROMPTS)
    model.fed.clear()
    generate(model, PROMPTS, GREEDY, max_new_tokens=40, stop={0, 3})
    assert len(model.fed) == steps + 1


def test_each_id_is_taken_in_once(table_model):
    model = table_model(context=64)
    generate(model, PROMPTS, GREEDY, max_new_tokens=10)
    assert model.fed == [(3, 5)] + [(3, 1)] * 9


@pytest.mark.parametrize("context", [1, 2, 5, 8])
def test_a_full_context_forgets_its_older_half_row_by_row(table_model, context):
    model = table_model(context=context)
    answers = generate(model, PROMPTS, GREEDY, max_new_tokens=30)
    assert answers == [by_hand(model, prompt, 30) for prompt in PROMPTS]


@pytest.mark.parametrize("stop", [(), {0}])
def test_with_a_source_a_row_ends_where_its_context_is_full(table_model, stop):
    model = table_model(context=9)
    answers = generate(model, PROMPTS, GREEDY, max_new_tokens=30, source=SOURCE, stop=stop)
    assert answers == [
        by_hand(model, prompt, 30, source=row_of(SOURCE, row), slides=False, stop=stop)
        for row, prompt in enumerate(PROMPTS)
    ]
    if not stop:
        assert [len(answer) for answer in answers] == [9, 5, 8]


def test_samplers_see_the_text_so_far(table_model):
    seen = []

    def spy(logits, context):
        seen.append(context.history[0, : context.lengths[0]].tolist())
        return logits

    [answer] = generate(table_model(context=4), [[1, 2]], Chain((spy,)), max_new_tokens=6, seed=0)
    assert seen == [[1, 2, *answer[:n]] for n in range(6)]


def test_nobody_who_reads_a_stream_is_left_in_inference_mode(table_model):
    ids = stream(table_model(), [1], GREEDY, max_new_tokens=3)
    next(ids)
    assert not torch.is_inference_mode_enabled()


def test_no_prompts_are_no_answers(table_model):
    assert generate(table_model(), [], GREEDY, max_new_tokens=3) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompts": [[1], []]}, ConfigError, "prompt 1 is empty; begin with"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens=0 must be at least 1"),
        ({"source": SOURCE}, ShapeError, "3 sources for 1 prompts"),
        ({"prompts": [[1], [2]], "seed": [1]}, ConfigError, "1 seeds for 2 rows"),
        ({"chain": TWO}, ConfigError, "2 chains for 1 prompts"),
    ],
)
def test_what_cannot_be_continued_is_refused(table_model, arguments, error, message):
    given = {"prompts": [[1]], "max_new_tokens": 3, "chain": GREEDY} | arguments
    with pytest.raises(error, match=message):
        generate(table_model(), **given)


class Bytes:
    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class Words:
    def decode(self, ids):
        return " ".join("abcdef"[id] for id in ids)


class Scripted:
    """A model, and its own state, that says the same thing whatever it is told."""

    vocab_size, device, context = 256, torch.device("cpu"), None
    lengths = torch.zeros(1, dtype=torch.long)

    def __init__(self, ids):
        self.rest = iter(ids)

    def start(self, rows, capacity, source=None):
        return self

    def step(self, ids, state, *, counts=None, all_logits=False):
        logits = torch.full((1, 1, 256), -torch.inf)
        logits[0, 0, next(self.rest)] = 0.0
        return logits, self

    def select(self, rows):
        raise NotImplementedError

    def rewind(self, lengths):
        raise NotImplementedError


def pieces(text, **given):
    ids = list(text) if isinstance(text, bytes) else list(text.encode())
    prompt = [*b"> "]
    new_ids = stream(Scripted(ids), prompt, GREEDY, max_new_tokens=len(ids))
    return list(detokenize_stream(new_ids, Bytes(), prompt, **given))


def test_a_character_of_several_bytes_comes_in_one_piece():
    assert pieces("aé€😀z") == ["a", "é", "€", "😀", "z"]


def test_bytes_that_never_become_a_character_are_shown_in_the_end():
    assert "".join(pieces(b"a\xff\xe2\x82b")) == "a\ufffd\ufffdb"
    assert pieces(b"a\xe2\x82") == ["a", "\ufffd"]


def test_the_space_between_two_words_is_not_lost(table_model):
    model = table_model()
    [ids] = generate(model, [[0, 1]], GREEDY, max_new_tokens=12)
    new_ids = stream(model, [0, 1], GREEDY, max_new_tokens=12)
    text = "".join(detokenize_stream(new_ids, Words(), [0, 1]))
    assert "a b" + text == Words().decode([0, 1, *ids])


def small(**choices):
    from regard.models.transformer import Transformer, TransformerConfig

    torch.manual_seed(0)
    config = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 2, "context": 12} | choices
    return Transformer(TransformerConfig(**config)).double().eval()


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_a_transformer_continues_ragged_prompts_as_if_each_were_alone(position):
    model = small(position=position)
    answers = generate(model, PROMPTS, Chain(), max_new_tokens=30, seed=1)
    one_by_one = generate(model, PROMPTS[:1], Chain(), max_new_tokens=30, seed=1)
    assert answers[0] == one_by_one[0]
    assert generate(model, PROMPTS, GREEDY, max_new_tokens=30) == [
        by_hand(model, prompt, 30) for prompt in PROMPTS
    ]


def test_an_encoder_decoder_continues_from_its_source():
    model = small(architecture="encoder-decoder")
    answers = generate(model, PROMPTS, GREEDY, max_new_tokens=30, source=SOURCE)
    assert answers == [
        by_hand(model, prompt, 30, source=row_of(SOURCE, row), slides=False)
        for row, prompt in enumerate(PROMPTS)
    ]
