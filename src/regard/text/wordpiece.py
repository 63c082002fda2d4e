"""WordPiece tokenizer, as in BERT."""

from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.special_tokens import SPECIAL_TOKENS
from regard.text.tokenizer import Tokenizer, added_special_tokens, check_text, check_vocab_size

CONTINUATION = "##"  # prefix of a piece that continues a word


def train(texts: Iterable[str], *, vocab_size: int = 8000, lower: bool = False) -> Tokenizer:
    """Train a tokenizer that splits words greedily, from the left, into the longest known pieces.

        embeddings   ->   em  ##bed  ##ding  ##s

    The vocabulary is trained by merging frequent pairs, as in BPE. Whitespace is not restored; a
    word with an unknown character, or of more than 100 characters, is one `<unk>`. Unlike in BERT,
    `lower` does not strip accents. Schuster and Nakajima 2012; Devlin et al. 2018.
    """
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)

    # The trainer (tokenizers 0.23) numbers the characters that continue words in a random order,
    # and breaks ties between pairs by id. So a first training without merges collects these
    # characters, and a second one gets them in a fixed order.
    texts = [check_text(text) for text in texts]
    characters = _train(backend, texts, vocab_size=0).keys() - SPECIAL_TOKENS
    check_vocab_size(
        vocab_size, len(characters), f"{len(characters)} characters that begin or continue words"
    )
    continuations = sorted(token for token in characters if token.startswith(CONTINUATION))
    vocab = _train(backend, texts, vocab_size=vocab_size, initial_tokens=continuations)

    backend.model = models.WordPiece(vocab, unk_token="<unk>")
    backend.add_special_tokens(added_special_tokens())
    return Tokenizer(backend)


def _train(
    backend: tokenizers.Tokenizer,
    texts: list[str],
    *,
    vocab_size: int,
    initial_tokens: Iterable[str] = (),
) -> dict[str, int]:
    """Train a copy of `backend` and return its vocabulary."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*added_special_tokens(), *map(AddedToken, initial_tokens)],
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    # Training turns the initial tokens into special tokens, hence the copy.
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.train_from_iterator(texts, trainer)
    vocab: dict[str, int] = copy.get_vocab()
    return vocab
