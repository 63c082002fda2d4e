"""The engine of the server: every answer is the answer to the request alone."""

from dataclasses import replace

import pytest
import torch

from contract.test_models import CASES, LANGUAGES, VOCAB, make
from regard.accel import pack
from regard.errors import ConfigError, RegardError
from regard.generate import generate, parse_chain
from regard.generate.sampling_state import SamplingState
from regard.models.build import build_model
from regard.models.presets import PRESETS
from regard.nn.state import Source
from regard.serve.engine import BatchEngine, EngineConfig, QueueFull
from regard.serve.request import Request
from regard.serve.rows import GraphRows
from regard.serve.sampling import sample_rows

STOP = {0}
SAMPLERS = [
    ["temperature=0.9", "top_p=0.9"],
    ["greedy"],
    ["repetition=1.3", "top_k=7", "xtc=0.5"],
    ["mirostat_2=2"],
]
CHAINS = [parse_chain(words) for words in SAMPLERS]
SERVED = [  # presets that read text, one of those that differ only in size
    case for case in LANGUAGES if case in PRESETS and not hasattr(CASES[case], "image_size")
]
QUICK = (
    *("modern", "gemma-2-2b", "glm-130b", "t5-small", "gru", "convolution", "ngram", "hmm"),
    "bahdanau",
)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    monkeypatch.setattr("regard.serve.prefix_cache.PAGE", 4)


def requests_for(subject, generator, count=9):
    """Prompts of different lengths; sources for an encoder-decoder."""
    for number in range(count):
        length = int(torch.randint(1, 13, (), generator=generator))
        source = None
        if subject.source is not None:
            size = int(torch.randint(1, 8, (), generator=generator))
            source = torch.randint(1, VOCAB, (size,), generator=generator).tolist()
        yield Request(
            torch.randint(1, VOCAB, (length,), generator=generator).tolist(),
            CHAINS[number % len(CHAINS)],
            max_new_tokens=int(torch.randint(1, 24, (), generator=generator)),
            seed=number,
            stop=STOP,
            n=1 + number % 3,
            source=source,
        )


def alone(model, request):
    source = None
    if request.source is not None:
        source = Source(torch.tensor([request.source]), torch.tensor([len(request.source)]))
    return [
        generate(
            model,
            [request.prompt],
            request.chain,
            max_new_tokens=request.max_new_tokens,
            stop=request.stop,
            seed=[request.seed + index],
            source=source,
        )[0]
        for index in range(request.n)
    ]


def serve(engine, requests, pauses):
    """Answers to requests that come while others are being answered."""
    answers = {request: [[] for _ in range(request.n)] for request in requests}
    waiting = list(requests)
    while waiting or engine.busy:
        for _ in range(next(pauses) if waiting else 0):
            if waiting:
                engine.submit(waiting.pop(0))
        events = engine.step()
        if isinstance(engine.rows, GraphRows):
            check_lengths(engine)
        for event in events:
            assert event.error is None
            if event.token is not None:
                answers[event.request][event.index].append(event.token)
    return list(answers.values())


def pauses(generator):
    while True:
        yield int(torch.randint(0, 3, (), generator=generator))


@pytest.fixture
def checked_indices(monkeypatch):
    """On a CPU torch refuses an index that is too large, but not all negative ones."""
    append, run = SamplingState.append, GraphRows._run

    def checked_append(self, ids):
        assert bool((self.lengths < self.history.shape[1]).all())
        assert bool(((ids >= 0) & (ids < VOCAB)).all())
        append(self, ids)

    def checked_run(self, bucket):
        lengths, last = self.lengths_buffer[:bucket], self.last_ids[:bucket]
        assert lengths[: len(self.lengths)].tolist() == self.lengths
        assert bool(((lengths >= 0) & (lengths < self.capacity)).all())
        assert bool(((last >= 0) & (last < VOCAB)).all())
        return run(self, bucket)

    monkeypatch.setattr(SamplingState, "append", checked_append)
    monkeypatch.setattr(GraphRows, "_run", checked_run)


def check_lengths(engine):
    """The KV cache and the history of a row have the ids of its sequence, and a step in flight."""
    flying = [sequence for step in engine.in_flight for sequence in step.sequences]
    lengths = engine.sampling.lengths.tolist() if engine.sequences else []
    rows = zip(engine.sequences, lengths, engine.rows.lengths, strict=True)
    for sequence, length, in_cache in rows:
        started = sequence in flying
        assert in_cache == len(sequence.window) - 1 + started
        assert length == len(sequence.request.prompt) + sequence.new_tokens + started


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in SERVED],
)
def test_every_model_answers_as_it_does_alone(case, checked_indices):
    """Contexts of 16 tokens overflow; four rows are fewer than there are sequences."""
    subject, generator = make(case), torch.Generator().manual_seed(1)
    subject.model.double()  # rounding decides nothing
    requests = list(requests_for(subject, generator))
    expected = [alone(subject.model, request) for request in requests]
    config = EngineConfig(max_sequences=4, prefill_chunk=5, time_slice=6)
    engine = BatchEngine(pack(subject.model), config, stop=sorted(STOP))
    assert serve(engine, requests, pauses(generator)) == expected
    assert not engine.busy
    # not a number of rows that graphs are made for
    config = EngineConfig(max_sequences=5, prefill_chunk=5, time_slice=6)
    engine = BatchEngine(subject.model, config, stop=sorted(STOP), capture=True)
    assert serve(engine, requests, pauses(generator)) == expected


def test_a_step_in_flight_at_the_end_has_room(checked_indices):
    """The longest sequence ends while a step for it is in flight; the context is far away."""
    torch.manual_seed(0)
    model = build_model(replace(CASES["tiny-decoder"], context=64)).double().eval()
    requests = [request(n, max_new_tokens=8 + 3 * n) for n in range(1, 7)]
    expected = [alone(model, each) for each in requests]
    engine = BatchEngine(model, EngineConfig(max_sequences=8), stop=sorted(STOP), capture=True)
    assert serve(engine, requests, iter([1] * 99)) == expected


def decoder(**config):
    """The same small decoder each time, in float64, so that rounding decides nothing."""
    torch.manual_seed(0)
    subject = make("tiny-decoder")
    subject.model.double()
    return BatchEngine(pack(subject.model), EngineConfig(**config), stop=sorted(STOP))


def request(length=3, **options):
    options = {"max_new_tokens": 8, "seed": 3, **options}
    prompt = torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length))
    return Request(prompt.tolist(), options.pop("chain", CHAINS[0]), **options)


def test_a_cancelled_request_leaves_before_the_next_step():
    engine = decoder(max_sequences=2)
    running, reading, waiting = (request(n=1), request(4), request(5))
    for each in (running, reading, waiting):
        engine.submit(each)
    engine.step()
    assert len(engine.sequences) == 2
    assert len(engine.waiting) == 1
    running.cancelled = waiting.cancelled = True
    finished = {
        event.request: event.finish_reason for event in engine.step() if event.finish_reason
    }
    assert finished == {running: "cancelled", waiting: "cancelled"}
    assert [text.request for text in engine.sequences] == [reading]
    assert engine.counters.cancelled == 2
    while engine.busy:
        engine.step()
    assert engine.rows.lengths == []
    assert engine.counters.finished == 1


def test_the_queue_is_bounded():
    """As many wait as the queue has places, beside those that get a row at the next step."""
    engine = decoder(max_sequences=3, max_queue=2)
    for n in (2, 1, 1, 1):
        engine.submit(request(n=n))
    for _ in range(2):
        with pytest.raises(QueueFull, match=r"the queue is full \(at most 2 waiting\)"):
            engine.submit(request())
        engine.step()  # two of them have their rows now
    while engine.sequences:
        engine.step()
    engine.submit(request())
    with pytest.raises(RegardError, match="n=4 must be at most 3"):
        engine.submit(request(n=4))


def test_a_request_counts_while_its_prompt_is_prefilled(monkeypatch):
    """Other threads submit requests and ask whether the engine is busy at any moment of a step."""
    engine = decoder(max_sequences=1, max_queue=1)
    first, second = request(), request(4)
    step = engine.language.step

    def step_and_look(*args, **options):
        assert engine.busy
        assert engine.requests() == [first, second]
        with pytest.raises(QueueFull, match="at most 1 waiting"):
            engine.submit(request(5))
        return step(*args, **options)

    engine.submit(first)
    engine.submit(second)
    monkeypatch.setattr(engine.language, "step", step_and_look)
    engine.step()
    assert engine.sequences  # it was prefilled
    monkeypatch.undo()
    while engine.busy:
        engine.step()
    assert engine.requests() == []
    assert engine.counters.finished == 2


def test_a_request_that_fails_does_not_harm_the_others():
    engine = decoder()
    bad = request(chain=parse_chain([f"allow={list(range(1, 4))}", "ban=[1,2,3]"]))
    good, expected = request(4), engine.run([request(4)])
    engine.submit(good)
    events = engine.step()
    engine.submit(bad)
    while engine.busy:
        events += engine.step()
    tokens = [event.token for event in events if event.request is good and not event.finish_reason]
    errors = [str(event.error) for event in events if event.error]
    assert [[tokens]] == expected
    assert len(errors) == 1
    assert "no token is left to sample: ban" in errors[0]


class Refusing:
    """A constraint that allows all tokens in its mask, but takes only one."""

    taken = 0

    def mask(self, logits):
        return logits

    def append(self, token):
        self.taken += 1
        if self.taken > 1:
            raise RegardError("the token was refused")


def test_a_token_that_a_constraint_refuses_fails_its_text():
    engine = decoder()
    engine.submit(request(constraints=[Refusing()]))
    events = []
    while engine.busy:
        events += engine.step()
    assert [str(event.error or event.finish_reason) for event in events] == [
        "None",
        "the token was refused",
    ]


def test_a_model_that_raises_fails_the_rows_of_this_step_only(monkeypatch):
    engine = decoder()
    expected = engine.run([request()])
    engine.submit(request())
    engine.step()

    def broken(last):
        raise ValueError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine.rows, "step", broken)
        (event,) = engine.step()
    assert (event.finish_reason, str(event.error)) == ("error", "the device is gone")
    assert engine.run([request()]) == expected


def test_a_prompt_that_fails_does_not_repeat_those_read_before_it(monkeypatch):
    """They are read one by one, since one has a known beginning and the other a long rest."""
    engine = decoder()
    known, bad = [Request(list(ids), CHAINS[0], 2, 0) for ids in (range(1, 15), range(3, 16))]
    expected = engine.run([Request(known.prompt, CHAINS[0], 2, 0)])
    step = engine.language.step

    def broken(ids, *args, **options):
        if ids.shape == (1, 13):
            raise ValueError("no")
        return step(ids, *args, **options)

    monkeypatch.setattr(engine.language, "step", broken)
    engine.submit(known)
    engine.submit(bad)
    events = []
    while engine.busy:
        events += engine.step()
    assert [[[event.token for event in events if event.token is not None]]] == expected
    assert [str(event.error) for event in events if event.request is bad] == ["no"]


def test_out_of_memory_halves_the_rows(monkeypatch):
    engine = decoder(max_sequences=4)
    expected = decoder(max_sequences=4).run([request(n) for n in range(1, 5)])
    step, calls = engine.rows.step, []

    def scarce(last):
        calls.append(len(last))
        if len(last) > 2:
            raise torch.OutOfMemoryError("no memory")
        return step(last)

    monkeypatch.setattr(engine.rows, "step", scarce)
    assert engine.run([request(n) for n in range(1, 5)]) == expected
    assert max(calls[1:]) == 2
    assert engine.max_rows == 4  # again, when all are answered


@pytest.mark.parametrize("overlaps", [False, True])
def test_out_of_memory_after_a_step_loses_no_token(overlaps, monkeypatch):
    def engine():
        torch.manual_seed(0)
        model = make("tiny-decoder").model.double()
        return BatchEngine(
            model, EngineConfig(max_sequences=4), stop=sorted(STOP), capture=overlaps
        )

    def requests():
        return [request(n, chain=CHAINS[n % len(CHAINS)]) for n in range(1, 5)]

    expected, scarce = engine().run(requests()), engine()
    compute, left = scarce._launch if overlaps else sample_rows, [1]

    def after_sampling(*args):
        out = compute(*args)
        if len(scarce.sequences) == 4 and left:
            left.clear()
            raise torch.OutOfMemoryError("no memory")
        return out

    if overlaps:
        monkeypatch.setattr(scarce, "_launch", after_sampling)
    else:
        monkeypatch.setattr("regard.serve.engine.sample_rows", after_sampling)
    assert scarce.run(requests()) == expected
    assert not left


def test_texts_that_get_no_row_wait_and_have_each_token_once(monkeypatch):
    engine, requests = decoder(max_sequences=4), [request(n) for n in range(1, 5)]
    expected, left = decoder(max_sequences=4).run([request(n) for n in range(1, 5)]), [1]
    join = engine.rows.join

    def scarce(*args):
        if engine.sequences and left:
            left.clear()
            raise torch.OutOfMemoryError("no memory")
        join(*args)

    monkeypatch.setattr(engine.rows, "join", scarce)
    assert serve(engine, requests, iter([1] * 9)) == expected
    assert not left


def test_a_broken_device_ends_the_engine(monkeypatch):
    """Every later call would fail too; /health tells by the end of the thread."""
    engine = decoder()
    engine.submit(request())

    def broken(*args, **options):
        raise torch.AcceleratorError("device-side assert triggered", 710)

    monkeypatch.setattr(engine.language, "step", broken)
    with pytest.raises(torch.AcceleratorError):
        engine.step()
    engine, errors = decoder(), [RuntimeError("of all prompts together")]
    engine.submit(request(1))
    engine.submit(request(2))
    monkeypatch.setattr(
        engine.prefiller,
        "_prefill_together",
        lambda group: broken() if not errors else fail(errors),
    )
    with pytest.raises(torch.AcceleratorError):  # when each is tried alone
        engine.step()
    assert not errors


def fail(errors):
    raise errors.pop()


@pytest.mark.parametrize("capture", [False, True])
def test_the_kv_memory_is_that_of_the_buffers_and_of_prompts(capture):
    torch.manual_seed(0)
    engine = BatchEngine(
        make("tiny-decoder").model, EngineConfig(max_sequences=64), capture=capture
    )
    context, size = engine.language.context, engine.rows.bytes_per_token
    rows = type(engine.rows)(engine.language, 7 * context * size, *([64] if capture else []))
    assert rows.fits(5, context, 2 * context) == (not capture)
    assert rows.fits(5, context, context)
    assert not rows.fits(6, context, 2 * context)
    assert not rows.fits(7, context, 1)
    rows.join(engine.language.start(5, 1), range(5), [1] * 5, context)
    made = sum(cache.keys.nbytes + cache.values.nbytes for cache in rows.caches)
    assert made <= 6 * context * size


def test_what_never_fits_is_refused_and_the_next_is_answered():
    engine = decoder(max_sequences=64)
    engine.rows.budget = 3 * 64 * engine.rows.bytes_per_token  # three rows
    expected = decoder().run([request(4)])
    for each in (request(n=20), request(4)):
        engine.submit(each)
    events = []
    while engine.busy:
        events += engine.step()
    assert {str(event.error)[:17] for event in events if event.error} == {"n=20 sequences of"}
    assert [[[event.token for event in events if event.token is not None]]] == expected


def test_equal_beginnings_are_read_once():
    engine = decoder()
    for last, read in ((14, 14), (14, 2), (15, 2)):
        before, expected = engine.counters.prompt_tokens, decoder()
        prompt = [*range(1, 14), last]
        answer = engine.run([Request(prompt, CHAINS[0], max_new_tokens=2, seed=0)])
        assert answer == expected.run([Request(prompt, CHAINS[0], max_new_tokens=2, seed=0)])
        assert engine.counters.prompt_tokens - before == read  # pages of 4 ids
    engine.prefix_cache.budget = engine.prefix_cache.bytes
    engine.run([Request([*range(3, 17)], CHAINS[0], max_new_tokens=2, seed=0)])
    assert 0 < engine.prefix_cache.bytes <= engine.prefix_cache.budget
    assert len(engine.prefix_cache.pages) == 3  # of the newest prompt


def test_log_probabilities_are_those_of_the_model():
    engine = decoder(prefill_chunk=3)
    scored = request(7, logprobs=2, prompt_logprobs=1, max_new_tokens=3)
    engine.submit(scored)
    events = []
    while engine.busy:
        events += [event for event in engine.step() if event.token is not None]
    ids = [*scored.prompt, *(event.token for event in events)]
    model = engine.language.model
    with torch.inference_mode():
        log_probs = model.head(model(torch.tensor([ids])))[0].log_softmax(-1)
    chosen = log_probs[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
    logprobs = [*scored.prompt_token_logprobs, *(event.logprobs for event in events)]
    assert [each.token for each in logprobs] == ids[1:]
    assert [each.logprob for each in logprobs] == pytest.approx(chosen)
    best = log_probs[:-1].topk(2)
    for position, each in enumerate(logprobs):
        ids, values = zip(*each.top, strict=True)
        assert [*ids] == best.indices[position, : len(ids)].tolist()
        assert [*values] == pytest.approx(best.values[position, : len(ids)].tolist())


def test_each_request_has_as_many_log_probabilities_as_it_asks_for():
    engine = decoder()
    requests = [request(n, logprobs=top, max_new_tokens=3) for n, top in ((3, 0), (4, 2), (5, 5))]
    for each in requests:
        engine.submit(each)
    tops = {each: set() for each in requests}
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                tops[event.request].add(len(event.logprobs.top))
    assert list(tops.values()) == [{0}, {2}, {5}]


def test_a_prompt_that_runs_out_of_memory_has_each_log_probability_once(monkeypatch):
    engine = decoder(prefill_chunk=3)
    scored = request(7, prompt_logprobs=1, max_new_tokens=1)
    engine.submit(request(2, max_new_tokens=30, stop=()))
    while not engine.sequences:
        engine.step()
    step, calls = engine.language.step, []

    def scarce(ids, *args, **options):
        if options.get("all_logits"):
            calls.append(ids)
            if len(calls) == 2:  # after a chunk of the prompt
                raise torch.OutOfMemoryError("no memory")
        return step(ids, *args, **options)

    monkeypatch.setattr(engine.language, "step", scarce)
    engine.submit(scored)
    while engine.busy:
        engine.step()
    assert len(calls) > 3
    assert [each.token for each in scored.prompt_token_logprobs] == scored.prompt[1:]


def test_a_continuation_that_a_stop_string_has_ended_counts_as_finished():
    engine = decoder()
    both = request(n=2, stop=())
    engine.submit(both)
    engine.step()
    both.ended.add(0)
    both.cancelled = True  # the other one
    reasons = {event.index: event.finish_reason for event in engine.step() if event.finish_reason}
    assert reasons == {0: "stop", 1: "cancelled"}
    assert (engine.counters.finished, engine.counters.cancelled) == (1, 1)


def test_a_long_text_does_not_hold_up_short_ones():
    engine = decoder(max_sequences=1, time_slice=5)
    long, short = request(2, max_new_tokens=40), request(3, max_new_tokens=2)
    expected = [
        decoder().run([each])[0][0]
        for each in (request(2, max_new_tokens=40), request(3, max_new_tokens=2))
    ]
    engine.submit(long)
    engine.submit(short)
    tokens, steps = {long: [], short: []}, {}
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                tokens[event.request].append(event.token)
            if event.finish_reason:
                steps[event.request] = engine.counters.steps
    assert list(tokens.values()) == expected
    assert steps[short] < 15 < steps[long]


def test_a_prefix_lm_has_no_log_probabilities_of_its_prompt():
    engine = BatchEngine(make("glm-130b").model)
    with pytest.raises(ConfigError, match="echo: a prefix LM"):
        engine.submit(request(prompt_logprobs=0))
