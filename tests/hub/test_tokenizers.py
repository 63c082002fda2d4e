"""Tokenizers from a Hugging Face folder and back, opened there by their own library."""

import json
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from hub.runs import make_checkpoint, model_config
from regard.api import Run
from regard.config import RunConfig, build
from regard.errors import CheckpointError, ConfigError
from regard.hub.external_checkpoint import open_checkpoint
from regard.hub.tokenizer_files import check_tokenizers, read_tokenizers, write_tokenizers
from regard.models.build import preset
from regard.pipelines import prepare_training
from regard.pipelines.pairs import pair_task
from regard.tasks.seq2seq import Seq2Seq
from regard.text import (
    TOKENIZERS,
    PairTokenizers,
    SpecialTokens,
    Tokenizer,
    train_pair,
    train_tokenizer,
)
from training.runs import config as small_run

CORPUS = ["The cat sat on the mat.\n", "<start> été, naïve <pad> 日本語 12,000.5\r\n\t x  y\n"] * 4
SIZES = {"bpe": 330, "wordpiece": 120, "unigram": 90, "word": 40}
TEXTS = [*CORPUS[:2], "", " ", " the cat", "<pad><stop> a", "unseen Ж\n", "sat  on\n\n"]
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@cache
def learned(kind, lower=False):
    options = {"vocab_size": SIZES[kind]} if kind in SIZES else {}
    return train_tokenizer({"kind": kind, "lower": lower, **options}, CORPUS)


@cache
def pretrained(single="<s> $A", pair="<s> $A <s>:1 $B:1"):
    """Whole words, with special tokens of other names and something around every text."""
    tokens = ["<s>", "</s>", "<unk>", "[PAD]", "<|end|>", "the", "cat", "sat"]
    vocab = {token: id for id, token in enumerate(tokens)}
    library = Library(models.WordLevel(vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(tokens[:5])
    marks = [(token, vocab[token]) for token in ("<s>", "</s>")]
    library.post_processor = processors.TemplateProcessing(single, pair, marks)
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "[PAD]"}
    return Tokenizer(
        library, SpecialTokens(tokens=names, stop_tokens=("</s>", "<|end|>"), vocab_size=16)
    )


def bart():
    """As BART has it: <s> … </s> around a text, and </s> before what the decoder writes."""
    tokenizer = pretrained("<s> $A </s>", "<s> $A </s> </s> $B </s>")
    both = Tokenizer(
        tokenizer.backend,
        SpecialTokens(tokens=tokenizer.special_tokens.tokens, decoder_start="</s>"),
    )
    return PairTokenizers(both, both)


def written(tokenizers, folder, **config):
    """Write a folder as an export does, config.json included."""
    numbers = write_tokenizers(tokenizers, folder, config)
    (folder / "config.json").write_text(json.dumps(config | numbers))
    return config | numbers


def opened(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parity
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_kind_of_vocabulary_opens_in_transformers_with_the_same_ids(tmp_path, kind, lower):
    ours = learned(kind, lower)
    config = written(ours, tmp_path, model_type="llama", max_position_embeddings=77)
    theirs = opened(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert {key: getattr(theirs, key) for key in IDS} == IDS
    assert {key: config[key] for key in IDS} == IDS
    assert (theirs.mask_token_id, theirs.cls_token_id, theirs.sep_token_id) == (4, 5, 6)
    assert theirs.model_max_length == 77
    assert read_tokenizers(tmp_path, config).fingerprint() == ours.fingerprint()


FAMILIES = ["gpt2", "mistral", "qwen3", "gemma", "phi", "phi3", "gpt_neox", "opt", "bloom"]
FAMILIES += ["t5", "bart", "mbart", "marian"]
ENCODERS = ["roberta", "camembert", "distilbert", "albert", "deberta", "deberta-v2", "bert"]


@pytest.mark.parity
@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])
def test_a_vocabulary_learned_here_opens_whatever_model_reads_it(tmp_path, family):
    ours, reads = learned("char"), family in ENCODERS
    written(ours, tmp_path, model_type=family)
    theirs = opened(tmp_path)
    for text in TEXTS:
        ids = [5, *ours.encode(text), 6] if reads else ours.encode(text)
        assert theirs(text)["input_ids"] == ids


def test_a_family_whose_folders_transformers_reads_in_its_own_way_is_warned_of(tmp_path, caplog):
    written(learned("char"), tmp_path, model_type="qwen2")
    assert "open this one with PreTrainedTokenizerFast" in caplog.text


@pytest.mark.parity
def test_a_pretrained_vocabulary_goes_through_a_folder_unchanged(tmp_path):
    ours = pretrained()
    config = written(ours, tmp_path, model_type="llama", vocab_size=16)
    assert config["eos_token_id"] == [1, 4]
    theirs = opened(tmp_path)
    for text in ["the cat", "", "the dog sat"]:
        assert theirs(text)["input_ids"] == ours.with_special_tokens(ours.encode(text))[0]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 3)
    again = read_tokenizers(tmp_path, config)
    assert again.special_tokens == ours.special_tokens
    assert again.fingerprint() == ours.fingerprint()


def test_a_model_that_writes_what_it_read_gets_two_sides(tmp_path):
    config = written(bart(), tmp_path, model_type="bart")
    assert (config["decoder_start_token_id"], config["bos_token_id"]) == (1, 0)
    pair = read_tokenizers(tmp_path, config)
    assert pair.joint
    assert pair.target.bos_id == 1
    assert pair.target.special_tokens == bart().target.special_tokens
    config["architectures"] = ["T5EncoderModel"]
    assert isinstance(read_tokenizers(tmp_path, config), Tokenizer)


def test_sides_that_share_ids_but_not_pieces_come_back(tmp_path):
    source, target = pretrained(), pretrained()
    hiding = json.loads(source.backend.to_str())
    hiding["model"]["vocab"]["\uffffsat"] = hiding["model"]["vocab"].pop("sat")
    source = Tokenizer(Library.from_str(json.dumps(hiding)), source.special_tokens)
    config = written(PairTokenizers(source, target), tmp_path, model_type="marian")
    pair = read_tokenizers(tmp_path, config)
    assert (pair.joint, pair.shares_ids) == (False, True)
    assert pair.source.encode("sat") == [2]
    assert pair.target.encode("sat") == [7]


@pytest.mark.parity
def test_sources_of_our_own_end_in_stop_in_transformers_too(tmp_path):
    pair = train_pair("char", lambda: iter([("ab", "cd")]))
    config = written(pair, tmp_path, model_type="marian")
    task = pair_task(build(RunConfig, {"name": "x", "task": "seq2seq"}), pair)
    source = task.source([pair.source.encode("ab")]).ids[0].tolist()
    assert opened(tmp_path)("ab")["input_ids"] == source
    again = read_tokenizers(tmp_path, config)
    assert (again.source.encode("ab"), again.target.bos_id) == (pair.source.encode("ab"), 1)
    assert config["decoder_start_token_id"] == 1


def test_two_vocabularies_of_their_own_are_refused(tmp_path):
    pair = train_pair({"kind": "char", "shared": False}, lambda: iter([("ab", "cd")]))
    with pytest.raises(ConfigError, match="separate vocabularies"):
        write_tokenizers(pair, tmp_path, {"model_type": "marian"})


def test_no_tokenizer_is_none_and_a_folder_that_cannot_be_written_is_named(tmp_path):
    assert read_tokenizers(tmp_path, {"model_type": "vit"}) is None
    with pytest.raises(CheckpointError, match="cannot write"):
        write_tokenizers(learned("char"), tmp_path / "none", {})


# Whether a tokenizer is that of its model


def beside(folder, library, **config):
    """A model of 280 ids, and a tokenizer beside it."""
    make_checkpoint(folder, model_config(**config))
    (folder / "tokenizer.json").write_text(library.to_str())
    return open_checkpoint(folder)


def of_size(size, ids=(0,), added=()):
    vocab = {"<s>": 0, "<unk>": 1} | {f"w{id}": id for id in range(2, size)}
    library = Library(models.WordLevel(vocab, unk_token="<unk>"))
    library.add_special_tokens(["<s>", *added])
    mark = {"id": "<s>", "ids": list(ids), "tokens": ["<s>"] * len(ids)}
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [mark])
    return library


def test_a_tokenizer_of_as_many_ids_as_the_model_is_read_and_an_added_pad_may_lie_above(tmp_path):
    assert beside(tmp_path / "all", of_size(280)).tokenizers.max_id == 279
    found = beside(tmp_path / "pad", of_size(280, added=["[PAD]"]))
    assert (found.tokenizers.vocab_size, found.tokenizers.max_id) == (281, 279)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (of_size(281), "it returns id 280, and the model has 280"),
        (of_size(280, [0, 5000]), r"id 5000 is not one of the 280 ids \(0 to 279\)"),
    ],
    ids=["text", "template"],
)
def test_a_tokenizer_of_another_model_is_refused(tmp_path, library, message):
    with pytest.raises(CheckpointError, match=message):
        beside(tmp_path / "theirs", library)


def test_each_side_of_a_pair_is_held_against_its_own_table(tmp_path):
    small, large = (Tokenizer(of_size(size)) for size in (20, 30))
    config = preset("transformer-base", vocab_size=20, source_vocab_size=30)
    assert check_tokenizers(PairTokenizers(large, small), config, tmp_path)
    for source, target in ((small, large), (large, large)):
        with pytest.raises(CheckpointError, match="it returns id 29, and the model has 20"):
            check_tokenizers(PairTokenizers(source, target), config, tmp_path)


# What models are handed


def run_of(tokenizers, task="causal"):
    config = build(RunConfig, {"name": "x", "task": task})
    return Run(None, config, torch.nn.Identity(), tokenizers, torch.device("cpu"))


def test_a_prompt_begins_as_the_vocabulary_says_and_never_ends():
    assert run_of(pretrained())._prompt("the cat") == [0, 5, 6]
    assert run_of(pretrained())._prompt("") == [0]
    assert run_of(pretrained("$A </s>", "$A $B </s>"))._prompt("the cat") == [5, 6]
    assert run_of(pretrained("$A </s>", "$A $B </s>"))._prompt("") == [0]


def test_a_prompt_of_a_vocabulary_learned_here_is_its_text_alone():
    ours = learned("char")
    assert run_of(ours)._prompt("the") == ours.encode("the")
    assert run_of(ours)._prompt("") == ours.encode("\n")


def test_sources_and_targets_are_what_bart_was_trained_on():
    task = pair_task(build(RunConfig, {"name": "x", "task": "seq2seq"}), bart())
    assert isinstance(task, Seq2Seq)
    generator = torch.Generator()
    batch = task.collate(([[5, 6], [5]], [[7], [6, 5]], 3), generator)
    assert batch.source.ids.tolist() == [[0, 5, 6, 1], [0, 5, 1, 0]]
    assert batch.source.lengths.tolist() == [4, 3]
    assert batch.ids.tolist() == [[1, 0, 7, 0], [1, 0, 6, 5]]
    assert batch.targets.tolist() == [[0, 7, 1, -1], [0, 6, 5, 1]]
    assert task.prompt == [1, 0]
    assert Seq2Seq(source_prefix_ids=(9,)).source([[5]]).ids.tolist() == [[9, 5, 2]]


def test_openings_take_their_places_from_the_context_and_shared_ids_need_one_table(tmp_path):
    path = tmp_path / "pairs.tsv"
    rows = [(n, m) for n in range(1, 9) for m in range(1, 10)]  # too many values for classes
    path.write_text("".join(f"{'the ' * n}cat\t{'sat ' * m}cat\n" for n, m in rows))
    config = small_run(path, {"model": {"context": 6}})
    material = prepare_training(config, bart())
    batches = [*material.all_batches(), *material.validation_batches(None)]
    longest = max(int(batch.source.lengths.max()) for batch in batches)
    assert (longest, max(batch.ids.shape[1] for batch in batches)) == (6, 6)
    assert any("longer than" in line for line in material.description)
    hiding = json.loads(bart().source.backend.to_str())
    hiding["model"]["vocab"]["\uffffsat"] = hiding["model"]["vocab"].pop("sat")
    source = Tokenizer(Library.from_str(json.dumps(hiding)), bart().source.special_tokens)
    apart = prepare_training(config, PairTokenizers(source, bart().target))
    assert apart.model.source_vocab_size is None
