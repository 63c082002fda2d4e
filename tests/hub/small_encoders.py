"""Small random models of the families with an encoder, as `transformers` makes them."""

import torch

from regard.nn.attention import Mask
from regard.nn.head import ClassificationHead
from regard.nn.state import Source

ENCODER = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
}
PAIR = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 32,
}
DEBERTA_V2 = ENCODER | {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "position_buckets": 4,
    "max_relative_positions": 12,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
DEBERTA_V1 = ENCODER | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "max_relative_positions": 6,
    "position_biased_input": False,
}
T5 = {
    "vocab_size": 61,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
MARIAN = PAIR | {"pad_token_id": 60, "decoder_start_token_id": 60, "scale_embedding": True}

REQUIRED = {  # settings of config.json whose default is not supported, by model_type
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
}
SETTINGS = {  # a name of ours: the family, and what differs from the family's defaults
    "bert": ("bert", ENCODER),
    "bert-tanh": ("bert", ENCODER | {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "roberta": ("roberta", ENCODER | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": (
        "distilbert",
        {
            "vocab_size": 61,
            "dim": 24,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 40,
            "max_position_embeddings": 32,
        },
    ),
    "camembert": ("camembert", ENCODER | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "albert": ("albert", ENCODER | {"embedding_size": 10}),
    "deberta": ("deberta-v2", DEBERTA_V2),
    "deberta-wide": (
        "deberta-v2",
        DEBERTA_V2
        | {"position_buckets": -1, "norm_rel_ebd": "none", "position_biased_input": True},
    ),
    "deberta-1": ("deberta", DEBERTA_V1),
    "deberta-1-positions": ("deberta", DEBERTA_V1 | {"position_biased_input": True}),
    "t5": ("t5", T5),
    "t5-gated": ("t5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", PAIR),
    "bart-scaled": ("bart", PAIR | {"scale_embedding": True, "activation_function": "relu"}),
    "bart-unequal": (
        "bart",
        PAIR | {"encoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 20},
    ),
    "mbart": ("mbart", PAIR | {"decoder_start_token_id": 2}),
    "marian": ("marian", MARIAN | {"activation_function": "swish"}),
    "marian-two": (
        "marian",
        MARIAN
        | {
            "decoder_vocab_size": 53,
            "share_encoder_decoder_embeddings": False,
            "pad_token_id": 52,
            "decoder_start_token_id": 52,
        },
    ),
}
HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
ENCODERS = [
    *[("bert", f"BertFor{head}") for head in ("PreTraining", "NextSentencePrediction", *HEADS)],
    ("bert", "BertModel"),
    ("bert-tanh", "BertForMaskedLM"),
    *[("roberta", f"RobertaFor{head}") for head in HEADS],
    ("roberta", "RobertaModel"),
    ("camembert", "CamembertForMaskedLM"),
    *[("deberta", f"DebertaV2For{head}") for head in HEADS],
    ("deberta", "DebertaV2Model"),
    ("deberta-wide", "DebertaV2ForMaskedLM"),
    *[("deberta-1", f"DebertaFor{head}") for head in HEADS],
    ("deberta-1", "DebertaModel"),
    ("deberta-1-positions", "DebertaForMaskedLM"),
    *[("distilbert", f"DistilBertFor{head}") for head in HEADS],
    ("distilbert", "DistilBertModel"),
    *[("albert", f"AlbertFor{head}") for head in ("PreTraining", *HEADS)],
    ("albert", "AlbertModel"),
    ("t5", "T5EncoderModel"),
]
WRITERS = [  # encoder–decoders that write tokens
    ("t5", "T5ForConditionalGeneration"),
    ("t5-gated", "T5ForConditionalGeneration"),
    ("bart", "BartForConditionalGeneration"),
    ("bart-scaled", "BartForConditionalGeneration"),
    ("bart-unequal", "BartForConditionalGeneration"),
    ("mbart", "MBartForConditionalGeneration"),
    ("marian", "MarianMTModel"),
    ("marian-two", "MarianMTModel"),
]
READERS = [  # encoder–decoders that do not
    ("t5", "T5Model"),
    ("bart", "BartModel"),
    ("bart", "BartForSequenceClassification"),
    ("bart", "BartForQuestionAnswering"),
    ("marian", "MarianModel"),
]


def small(name, architecture):
    """A model of `transformers` in which no two tensors are alike, norms and biases included."""
    import transformers

    family, settings = SETTINGS[name]
    config = transformers.AutoConfig.for_model(family, **settings)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for part, values in model.state_dict(keep_vars=True).items():
            if family != "marian" or "embed_positions" not in part:  # those are sines
                norm = "norm" in part.lower() and part.endswith("weight")
                values.normal_(1.0 if norm else 0.0, 0.2)
        if name == "t5-gated":  # what the published files hold, though the library ties by default
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 5)
    return model


LENGTHS = torch.tensor([9, 4, 7])
REAL = torch.arange(9) < LENGTHS.unsqueeze(1)
READINGS = {  # what they call a result, and how ours is read off the hidden states x
    "logits": lambda head, x: head(x, LENGTHS) if isinstance(head, ClassificationHead) else head(x),
    "prediction_logits": lambda head, x: head(x),
    "seq_relationship_logits": lambda head, x: head.next_sentence(x),
    "sop_logits": lambda head, x: head.next_sentence(x),
    "start_logits": lambda head, x: head(x)[..., 0],
    "end_logits": lambda head, x: head(x)[..., 1],
    "last_hidden_state": lambda head, x: x,
    "pooler_output": lambda head, x: head(x),
}


def rows(config, seed):
    """Right-padded ids, the last real one of each row the usual end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, REAL.shape, generator=generator)
    ids[torch.arange(len(ids)), LENGTHS - 1] = 2
    return ids.masked_fill(~REAL, config.pad_token_id)


def pair(config):
    """What their encoder–decoder is given, and the same for ours."""
    source, target = rows(config, 1), rows(config, 2)
    given = {"input_ids": source, "attention_mask": REAL.long(), "decoder_input_ids": target}
    return given, target, Source(source, LENGTHS)


def results(theirs, ours):
    """What they compute for a padded batch, and what we do: of all real tokens, for all results."""
    real, config = REAL, theirs.config
    if ours.config.architecture == "encoder-decoder":
        given, target, source = pair(config)
        x = ours(target, source=source)
        real = torch.ones_like(REAL)  # nobody looks ahead, so what follows the end is compared too
    else:
        ids, segments = rows(config, 1), None
        given = {"input_ids": ids, "attention_mask": REAL.long()}
        if ours.config.segments:
            segments = torch.arange(ids.numel()).view_as(ids) % ours.config.segments
            given["token_type_ids"] = segments
        x = ours(ids, mask=Mask.lengths(LENGTHS), segments=segments)
    computed = theirs(**given)
    for name in computed.keys() & READINGS.keys():
        wanted, actual = computed[name], READINGS[name](ours.head, x)
        by_token = wanted.shape[:2] == real.shape
        yield name, *((wanted[real], actual[real]) if by_token else (wanted, actual))
