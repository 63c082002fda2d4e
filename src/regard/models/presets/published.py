"""Published parameter counts of the presets; tests compare them with `count_parameters`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A parameter count, its source, and the reason for a difference from `count_parameters`.

    An exact count is that of the released weights and must be equal; a rounded one is from a paper
    and must agree within 1 %.
    """

    count: int
    source: str
    reason: str = ""

    @property
    def exact(self) -> bool:
        """Whether the count is not rounded."""
        return self.count % 100_000 != 0


M, B = 1_000_000, 1_000_000_000
RELEASED = "released weights"
COUNTED = "counted by transformers from the released configuration"
LOGITS_BIAS = "the bias of the logits is a parameter here, a buffer in transformers"
SINUSOIDS = f"the released weights also store the sinusoidal positions; {LOGITS_BIAS}"

PUBLISHED: dict[str, Published] = {
    "gpt1": Published(116_534_784, f"{RELEASED}, openai-gpt; 117 M in Radford et al. 2019"),
    "gpt2": Published(124_439_808, f"{RELEASED}, gpt2"),
    "gpt2-medium": Published(354_823_168, f"{RELEASED}, gpt2-medium"),
    "gpt2-large": Published(774_030_080, f"{RELEASED}, gpt2-large"),
    "gpt2-xl": Published(1_557_611_200, f"{RELEASED}, gpt2-xl"),
    "sutskever": Published(384 * M, "Sutskever et al. 2014, section 3.4"),
    "transformer-base": Published(
        65 * M,
        "Vaswani et al. 2017, table 3",
        "the sizes in the table with 37 k shared subwords give 63.1 M; the big model agrees",
    ),
    "transformer-big": Published(213 * M, "Vaswani et al. 2017, table 3"),
    "bert-base": Published(
        109_514_298, f"{RELEASED}, bert-base-uncased, without the next-sentence head"
    ),
    "bert-large": Published(
        335_174_458, f"{RELEASED}, bert-large-uncased, without the next-sentence head"
    ),
    "roberta-base": Published(124_697_433, f"{RELEASED}, roberta-base"),
    "roberta-large": Published(355_412_057, f"{RELEASED}, roberta-large"),
    "mbert": Published(177_974_523, f"{COUNTED}, bert-base-multilingual-cased"),
    "camembert-base": Published(110_655_493, f"{COUNTED}, almanach/camembert-base"),
    "camembert-large": Published(336_695_557, f"{COUNTED}, almanach/camembert-large"),
    "deberta-base": Published(139_244_121, f"{COUNTED}, microsoft/deberta-base"),
    "deberta-large": Published(406_264_921, f"{COUNTED}, microsoft/deberta-large"),
    "deberta-v3-xsmall": Published(70_958_820, f"{COUNTED}, microsoft/deberta-v3-xsmall"),
    "deberta-v3-small": Published(142_024_548, f"{COUNTED}, microsoft/deberta-v3-small"),
    "deberta-v3-base": Published(184_551_780, f"{COUNTED}, microsoft/deberta-v3-base"),
    "deberta-v3-large": Published(435_191_908, f"{COUNTED}, microsoft/deberta-v3-large"),
    "distilbert": Published(66_985_530, f"{RELEASED}, distilbert-base-uncased"),
    "albert-base": Published(11_221_680, f"{RELEASED}, albert-base-v2"),
    "albert-large": Published(16_795_824, f"{COUNTED}, albert-large-v2"),
    "albert-xlarge": Published(54_821_040, f"{COUNTED}, albert-xlarge-v2"),
    "albert-xxlarge": Published(206_368_944, f"{COUNTED}, albert-xxlarge-v2"),
    "vit-b16": Published(86_567_656, f"{RELEASED}, google/vit-base-patch16-224; 86 M in table 1"),
    "vit-l16": Published(
        304_326_632, f"{RELEASED}, google/vit-large-patch16-224; 307 M in table 1"
    ),
    "vit-h14": Published(632 * M, "Dosovitskiy et al. 2020, table 1"),
    "t5-small": Published(60_506_624, f"{RELEASED}, t5-small"),
    "t5-base": Published(222_903_552, f"{RELEASED}, t5-base"),
    "t5-large": Published(737_668_096, f"{RELEASED}, t5-large"),
    "t5-3b": Published(2_851_598_336, f"{RELEASED}, t5-3b"),
    "t5-11b": Published(11_307_321_344, f"{RELEASED}, t5-11b"),
    "t5-v1.1-small": Published(76_961_152, f"{RELEASED}, google/t5-v1_1-small"),
    "t5-v1.1-base": Published(247_577_856, f"{RELEASED}, google/t5-v1_1-base"),
    "t5-v1.1-large": Published(783_150_080, f"{RELEASED}, google/t5-v1_1-large"),
    "t5-v1.1-xl": Published(2_849_757_184, f"{RELEASED}, google/t5-v1_1-xl"),
    "t5-v1.1-xxl": Published(11_135_332_352, f"{RELEASED}, google/t5-v1_1-xxl"),
    "bart-base": Published(139_420_416, f"{RELEASED}, facebook/bart-base", LOGITS_BIAS),
    "bart-large": Published(406_291_456, f"{RELEASED}, facebook/bart-large", LOGITS_BIAS),
    "barthez": Published(
        139_221_504,
        "counted by transformers, as an mBART with the sizes of Kamal Eddine et al. 2021",
        LOGITS_BIAS,
    ),
    "marian-en-de": Published(74_410_496, f"{COUNTED}, Helsinki-NLP/opus-mt-en-de", SINUSOIDS),
    "marian-en-fr": Published(75_133_952, f"{COUNTED}, Helsinki-NLP/opus-mt-en-fr", SINUSOIDS),
    "gpt-neox-20b": Published(20_554_567_680, "Black et al. 2022, table 1"),
    "pythia-70m": Published(70_426_624, "Biderman et al. 2023, table 1"),
    "pythia-160m": Published(162_322_944, "Biderman et al. 2023, table 1"),
    "pythia-410m": Published(405_334_016, "Biderman et al. 2023, table 1"),
    "pythia-1b": Published(1_011_781_632, "Biderman et al. 2023, table 1"),
    "pythia-1.4b": Published(1_414_647_808, "Biderman et al. 2023, table 1"),
    "pythia-2.8b": Published(2_775_208_960, "Biderman et al. 2023, table 1"),
    "pythia-6.9b": Published(6_857_302_016, "Biderman et al. 2023, table 1"),
    "pythia-12b": Published(11_846_072_320, "Biderman et al. 2023, table 1"),
    "opt-125m": Published(125_239_296, f"{RELEASED}, facebook/opt-125m"),
    "opt-350m": Published(331_196_416, f"{RELEASED}, facebook/opt-350m"),
    "opt-1.3b": Published(1_315_758_080, f"{RELEASED}, facebook/opt-1.3b"),
    "opt-2.7b": Published(2_651_596_800, f"{RELEASED}, facebook/opt-2.7b"),
    "opt-6.7b": Published(6_658_473_984, f"{RELEASED}, facebook/opt-6.7b"),
    "opt-13b": Published(12_853_473_280, f"{RELEASED}, facebook/opt-13b"),
    "opt-30b": Published(29_974_540_288, f"{RELEASED}, facebook/opt-30b"),
    "opt-66b": Published(66 * B, "Zhang et al. 2022, table 1"),
    "opt-175b": Published(175 * B, "Zhang et al. 2022, table 1"),
    "bloom-560m": Published(559_214_592, "BigScience 2022, model card"),
    "bloom-1b1": Published(1_065_314_304, "BigScience 2022, model card"),
    "bloom-1b7": Published(1_722_408_960, "BigScience 2022, model card"),
    "bloom-3b": Published(3_002_557_440, "BigScience 2022, model card"),
    "bloom-7b1": Published(7_069_016_064, "BigScience 2022, model card"),
    "bloom-176b": Published(176_247_271_424, "BigScience 2022, model card"),
    "llama-7b": Published(6_738_415_616, f"{RELEASED}; 6.7 B in Touvron et al. 2023a, table 2"),
    "llama-13b": Published(13_015_864_320, f"{RELEASED}; 13.0 B in Touvron et al. 2023a, table 2"),
    "llama-33b": Published(32_528_943_616, f"{RELEASED}; 32.5 B in Touvron et al. 2023a, table 2"),
    "llama-65b": Published(65_285_660_672, f"{RELEASED}; 65.2 B in Touvron et al. 2023a, table 2"),
    "llama-2-7b": Published(6_738_415_616, f"{RELEASED}, meta-llama/Llama-2-7b-hf"),
    "llama-2-13b": Published(13_015_864_320, f"{RELEASED}, meta-llama/Llama-2-13b-hf"),
    "llama-2-70b": Published(68_976_648_192, f"{RELEASED}, meta-llama/Llama-2-70b-hf"),
    "llama-3-8b": Published(8_030_261_248, f"{RELEASED}, meta-llama/Meta-Llama-3-8B"),
    "llama-3-70b": Published(70_553_706_496, f"{RELEASED}, meta-llama/Meta-Llama-3-70B"),
    "llama-3.1-8b": Published(8_030_261_248, f"{RELEASED}, meta-llama/Llama-3.1-8B"),
    "llama-3.2-1b": Published(1_235_814_400, f"{RELEASED}, meta-llama/Llama-3.2-1B"),
    "llama-3.2-3b": Published(3_212_749_824, f"{RELEASED}, meta-llama/Llama-3.2-3B"),
    "tinyllama": Published(
        1_100_048_384, f"{RELEASED}, TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
    ),
    "mistral-7b": Published(7_241_732_096, f"{RELEASED}, mistralai/Mistral-7B-v0.1"),
    "qwen2-0.5b": Published(494_032_768, f"{RELEASED}, Qwen/Qwen2-0.5B"),
    "qwen2-1.5b": Published(1_543_714_304, f"{RELEASED}, Qwen/Qwen2-1.5B"),
    "qwen2-7b": Published(7_615_616_512, f"{RELEASED}, Qwen/Qwen2-7B"),
    "qwen2-72b": Published(72_706_203_648, f"{RELEASED}, Qwen/Qwen2-72B"),
    "qwen3-0.6b": Published(596_049_920, f"{RELEASED}, Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": Published(1_720_574_976, f"{RELEASED}, Qwen/Qwen3-1.7B"),
    "qwen3-4b": Published(4_022_468_096, f"{RELEASED}, Qwen/Qwen3-4B"),
    "qwen3-8b": Published(8_190_735_360, f"{RELEASED}, Qwen/Qwen3-8B"),
    "qwen3-14b": Published(14_768_307_200, f"{RELEASED}, Qwen/Qwen3-14B"),
    "qwen3-32b": Published(32_762_123_264, f"{RELEASED}, Qwen/Qwen3-32B"),
    "gemma-2b": Published(2_506_172_416, f"{RELEASED}, google/gemma-2b"),
    "gemma-7b": Published(8_537_680_896, f"{RELEASED}, google/gemma-7b"),
    "gemma-2-2b": Published(2_614_341_888, f"{RELEASED}, google/gemma-2-2b"),
    "gemma-2-9b": Published(9_241_705_984, f"{RELEASED}, google/gemma-2-9b"),
    "gemma-2-27b": Published(27_227_128_320, f"{RELEASED}, google/gemma-2-27b"),
    "phi-1": Published(1_418_270_720, f"{RELEASED}, microsoft/phi-1"),
    "phi-1.5": Published(1_418_270_720, f"{RELEASED}, microsoft/phi-1_5"),
    "phi-2": Published(2_779_683_840, f"{RELEASED}, microsoft/phi-2"),
    "phi-3-mini": Published(3_821_079_552, f"{RELEASED}, microsoft/Phi-3-mini-4k-instruct"),
    "glm-4-9b": Published(9_399_951_360, f"{RELEASED}, THUDM/glm-4-9b"),
    "gpt3-175b": Published(175 * B, "Brown et al. 2020, table 2.1"),
    "pangu-alpha-207b": Published(207 * B, "Zeng et al. 2021, table 1"),
    "palm-540b": Published(540_350_000_000, "Chowdhery et al. 2022, table 1"),
    "mt-nlg-530b": Published(530 * B, "Smith et al. 2022"),
    "gopher-280b": Published(280 * B, "Rae et al. 2021, table 1"),
    "chinchilla-70b": Published(70 * B, "Hoffmann et al. 2022, table 4"),
    "galactica-120b": Published(
        120 * B,
        "Taylor et al. 2022, table 5",
        "a rounded name: the layers alone have 120.8 B, the embedding tables 0.5 B",
    ),
    "lamda-137b": Published(137 * B, "Thoppilan et al. 2022, section 3, without embeddings"),
    "jurassic-1-178b": Published(178 * B, "Lieber et al. 2021, table 1"),
    "glm-130b": Published(
        130 * B,
        "Zeng et al. 2022",
        "a rounded name: the paper's sizes, with tied embeddings, give 128.7 B",
    ),
}
