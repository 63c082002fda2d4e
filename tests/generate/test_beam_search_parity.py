"""Beam search finds what `transformers` finds in the same weights: the texts and their scores."""

import pytest
import torch

from hub import small, small_encoders
from regard.generate import BeamSearch
from regard.hub.external_checkpoint import open_checkpoint
from regard.nn.state import Source

pytestmark = pytest.mark.parity

NEAR = 1e-5  # the order of float32 sums differs
EARLY = {"never": "never", "heuristic": False, "full": True}
TOKENS = 12
SETTINGS = [(2, 1.0, "never"), (4, 0.6, "heuristic"), (5, 1.0, "full"), (5, 2.0, "heuristic")]
SETTINGS += [(3, 0.0, "never"), (3, -0.5, "heuristic"), (4, 1.5, "never"), (4, 0.0, "full")]
each_setting = pytest.mark.parametrize(("width", "power", "early_stopping"), SETTINGS)


@pytest.fixture(scope="module", params=["gpt2", "t5", "marian", "bart"])
def pair(request, tmp_path_factory):
    """Their model and ours, with their weights."""
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    if name == "gpt2":
        theirs = small.small(name)
    else:
        theirs = small_encoders.small(name, dict(small_encoders.WRITERS)[name])
    theirs.save_pretrained(folder)
    return theirs, open_checkpoint(folder).load().eval()


def ask(theirs, ours, width, power, early_stopping):
    """Three prompts, or three sources of different lengths: what they find and what we find."""
    generator = torch.Generator().manual_seed(width)
    ids = torch.randint(3, 50, (3, 6), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    source, prompts = None, ids.tolist()
    if theirs.config.is_encoder_decoder:
        lengths = torch.tensor([6, 3, 5])
        real = torch.arange(6) < lengths.unsqueeze(1)
        ids = ids.masked_fill(~real, theirs.config.pad_token_id)
        inputs = {"input_ids": ids, "attention_mask": real.long()}
        start = theirs.config.decoder_start_token_id
        source, prompts = Source(ids, lengths), [[start]] * 3
    likely = BeamSearch(1)(ours, prompts, max_new_tokens=5, source=source)
    stop = sorted({text.ids[-1] for (text,) in likely})  # ids that texts do come to
    expected = theirs.generate(
        **inputs,
        num_beams=width,
        num_return_sequences=2,
        length_penalty=power,
        early_stopping=EARLY[early_stopping],
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=theirs.config.pad_token_id,
        forced_eos_token_id=None,
        use_cache=False,  # transformers 5.22 makes it for as many layers as the encoder has
        return_dict_in_generate=True,
        output_scores=True,
    )
    search = BeamSearch(width, power, early_stopping=early_stopping, n_best=2)
    results = search(ours, prompts, max_new_tokens=TOKENS, stop=stop, source=source)
    texts = []
    for row in expected.sequences[:, len(prompts[0]) :].tolist():
        ends = [at for at, token in enumerate(row) if token in stop]
        texts.append(row[: ends[0]] if ends else row)
    return texts, expected.sequences_scores, [hypothesis for row in results for hypothesis in row]


@each_setting
def test_texts_and_scores_are_those_of_transformers(pair, width, power, early_stopping):
    texts, scores, results = ask(*pair, width, power, early_stopping)
    assert [hypothesis.ids for hypothesis in results] == texts
    ours = torch.tensor([hypothesis.score for hypothesis in results])
    torch.testing.assert_close(ours, scores, rtol=NEAR, atol=NEAR)
    assert power > 1 or any(len(hypothesis.ids) < TOKENS for hypothesis in results)
