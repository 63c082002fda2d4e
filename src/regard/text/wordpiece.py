"""WordPiece, as in BERT."""

from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.special_tokens import SPECIAL_TOKENS
from regard.text.tokenizer import Tokenizer, check_size, check_text, special_tokens

MORE = "##"  # a piece that continues a word


def train(pieces: Iterable[str], *, size: int = 8000, lower: bool = False) -> Tokenizer:
    """Words are cut, from the left, into the longest pieces that the vocabulary has.

        embeddings   ->   em  ##bed  ##ding  ##s

    The pieces are found by joining frequent pairs, as in BPE. White space is not kept; a word
    with an unknown letter, or of more than 100 letters, is one `<unk>`. Unlike BERT's, `lower`
    leaves accents where they are. Schuster and Nakajima 2012; Devlin et al. 2019.
    """
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=MORE)

    # The trainer numbers the continuing letters in a random order, and ties between pairs go by
    # number (tokenizers 0.23). So a first round without joining collects them, and a second one
    # is given them in a fixed order.
    pieces = [check_text(piece) for piece in pieces]
    letters = _learn(library, pieces, size=0).keys() - SPECIAL_TOKENS
    check_size(size, len(letters), f"{len(letters)} letters that begin or continue words")
    continuing = sorted(token for token in letters if token.startswith(MORE))
    vocab = _learn(library, pieces, size=size, first=continuing)

    library.model = models.WordPiece(vocab, unk_token="<unk>")
    library.add_special_tokens(special_tokens())
    return Tokenizer(library)


def _learn(
    library: tokenizers.Tokenizer, pieces: list[str], *, size: int, first: Iterable[str] = ()
) -> dict[str, int]:
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*special_tokens(), *(AddedToken(token) for token in first)],
        continuing_subword_prefix=MORE,
        show_progress=False,
    )
    # A throwaway: training makes all that is given first into special tokens.
    scratch = tokenizers.Tokenizer.from_str(library.to_str())
    scratch.train_from_iterator(pieces, trainer)
    vocab: dict[str, int] = scratch.get_vocab()
    return vocab
