"""The figures of the lectures: numbers that theory knows, and that every one can be drawn."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import torch

import regard
from regard.api.lecture_figures import _model_of_run, _untrained_run
from regard.errors import RegardError
from regard.explain.figures import FIGURES
from regard.explain.figures.cost import (
    SlidingWindowAttention,
    _layers,
    exponent,
    flops,
    saved_bytes,
)
from regard.explain.figures.landscape import direction
from regard.explain.figures.language import entropy, ngram_counts
from regard.explain.figures.panels import (
    Bars,
    FigureData,
    Heatmap,
    Network,
    Scatter,
    Surface,
    Table,
)
from regard.explain.figures.positions import KINDS
from regard.explain.figures.sampling import beam_tree
from regard.explain.figures.tokens import merge, merge_steps, word_counts
from regard.explain.gradient import GradientFlow
from regard.explain.projection import position_similarity, tsne
from regard.explain.render.panel_layout import CHARACTER_WIDTH, label_offsets, overlap, scatter_axes
from regard.explain.render.panel_text import TEXT, text
from regard.explain.render.panels import DRAW, draw
from regard.explain.render.token_text import display_width
from regard.models.ngram import NGram, NGramConfig
from regard.models.seq2seq import RecurrentEncoderDecoder, Seq2SeqConfig
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.convolution import CausalConvolution
from regard.nn.position import Rotary, Sinusoidal
from regard.text import TOKENIZERS, train_tokenizer

SENTENCE = "the cat sat on the mat while the dog slept"
BE = "To be, or not to be, that is the question"
CORPUS = "the cat sat on the mat and a dog slept near some old log of wood\n" * 3
# What each figure is made from here, small enough to be quick.
SMALL = {
    "bag-of-words": ((), {}),
    "bpe-merges": ((CORPUS,), {"merges": 4}),
    "token-boundaries": (("the cats sat", CORPUS), {}),
    "rare-words": ((CORPUS,), {}),
    "word-vectors": (("cbow", SENTENCE), {}),
    "next-token": (("tiny-decoder", BE), {}),
    "shannon": ((CORPUS,), {"orders": 2}),
    "receptive-field": ((), {"layers": 3}),
    "gates": (("lstm", "a b c"), {"units": 4}),
    "gradient-flow": (("elman", "lstm", SENTENCE), {}),
    "permutation": ((), {}),
    "path-lengths": ((), {"positions": 3, "layers": 1}),
    "cost": ((), {"lengths": (4, 8), "repeats": 1}),
    "parameter-count": ((), {}),
    "loss-landscape": ((CORPUS,), {"grid": 3, "steps": 1}),
    "beam-tree": (("tiny-decoder", BE), {"max_new_tokens": 3}),
    "temperature": ((), {}),
    "samplers": ((), {}),
    "pronoun": (("tiny-encoder",), {}),
    "score-variance": ((), {"dims": (4, 64), "vectors": 128}),
    "shuffled-words": (("tiny-decoder", BE), {"shuffles": 2}),
    "positions": ((), {"kinds": ("sinusoidal", "alibi"), "length": 12, "dim": 8, "heads": 2}),
}


@pytest.fixture(scope="module")
def shown():
    made = {}

    def show(name):
        if name not in made:
            what, options = SMALL[name]
            made[name] = regard.show(name, *what, **options)
        return made[name]

    return show


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_data_text_and_a_picture(name, shown, tmp_path):
    figure = shown(name)
    table = json.loads(json.dumps(figure.to_dict()))
    assert table["figure"] == name
    assert len(table["panels"]) == len(figure.data.panels) > 0
    for width in (50, 80, 120):
        for colour in (False, True):
            text = re.sub(r"\x1b\[[\d;]*m", "", figure.text(width, colour=colour))
            assert figure.data.title in " ".join(text.split())
            assert max(map(display_width, text.splitlines())) <= width
    axes = [axis for axis in figure.figure().axes if axis.get_visible()]
    titles = [axis.get_title(loc="left") for axis in axes]
    assert {panel.title for panel in figure.data.panels} <= {*titles, ""}
    for panel in figure.data.panels:
        assert type(panel) in DRAW
        assert type(panel) in TEXT


def lines_of(*panels, width=80, colour=False):
    """The lines of the panels of a figure, without its title and caption."""
    data = FigureData(title="title", caption="caption", panels=panels)
    return text(data, width=width, colour=colour).splitlines()[2:-2]


def test_a_table_that_is_too_wide_shows_every_column_below_each_other():
    names = [f"name {n}" for n in range(5)]
    table = Table(header=["layer", *names], rows=[["a", 1, 2, 3, 4, 5], ["b", *[7.5] * 5]])
    assert lines_of(table, width=24) == [
        "       name  name  name",
        "layer     0     1     2",
        "a         1     2     3",
        "b       7.5   7.5   7.5",
        "",
        "       name  name",
        "layer     3     4",
        "a         4     5",
        "b       7.5   7.5",
    ]


def test_a_long_text_in_a_table_is_wrapped_and_not_cut():
    words = " ".join(f"word{n}" for n in range(15))
    lines = lines_of(Table(header=["n", "text"], rows=[[1, words]]), width=40)
    assert " ".join(" ".join(lines[1:]).split()) == f"1 {words}"
    assert "…" not in "".join(lines)


def test_a_surface_has_the_scale_of_its_panel_and_grows_upwards():
    surface = Surface(
        x=[0, 1], y=[0, 1], values=[[6.0, 6.1], [9.9, 10]], low=6, high=10, scale_label="loss"
    )
    lines = [line.rstrip() for line in lines_of(surface)]
    assert lines[-4:-2] == ["1.00 ████", "0.00"]
    assert lines[-2].startswith("░░ 6.80  ▒▒ 7.60  ▓▓ 8.40  ██ 9.20")
    assert lines[-1] == "shades: loss"


def test_values_above_zero_have_signed_colours_where_a_panel_says_so():
    plain, signed = (
        Heatmap(rows=["a"], columns=["b"], values=[[1.0]], signed=signed)
        for signed in (False, True)
    )
    assert not any("-0.20" in line for line in lines_of(plain))
    assert any("-0.20" in line for line in lines_of(signed))
    for name in ("sinusoidal", "rotary"):
        panels = regard.show("positions", kinds=(name,), length=4, dim=8, heads=2).data.panels
        assert all(panel.signed for panel in panels)
        assert all("RdBu" in axes.images[0].get_cmap().name for axes in drawn_maps(*panels))


def drawn_maps(*panels):
    figure = draw(FigureData(title="t", caption="c", panels=panels))
    return [axes for axes in figure.axes if axes.images]


def test_labels_and_bars_that_do_not_fit_are_counted_or_left_out():
    points = Scatter(labels=["one", "two", "far"], points=[(0, 0), (0, 0), (9, 9)])
    assert lines_of(points)[-1] == "… 1 of 3 labels not shown: they would cover others"
    bars = Bars(labels=["a"], series={"first": [1.0], "second": [2.0]}, y_label="value")
    assert lines_of(bars)[1:] == ["   first  second  second", "a      1       2  " + "█" * 30]
    assert lines_of(bars, width=20)[1:] == ["   first  second", "a      1       2"]


def test_positions_of_a_wide_network_read_downwards():
    network = Network(
        layers=["input", "layer 1"],
        positions=[str(n - 29) for n in range(30)],
        marks=[["•"] * 30, [*[""] * 29, "•"]],
        edges=[],
    )
    top, bottom, *places = lines_of(network, width=70)
    assert top == "layer 1 " + " ·" * 29 + " •"
    assert bottom == "input   " + " •" * 30
    assert [line[9] for line in places] == ["-", "2", "9"]


def test_labels_of_points_do_not_overlap():
    points = [(0.01 * (n % 5), 0.01 * (n // 5)) for n in range(40)] + [(1.0, 1.0)]
    panel = Scatter(labels=[f"word{n}" for n in range(41)], points=points)
    offsets = label_offsets(panel)
    width, height = scatter_axes(panel)
    boxes = [
        (width / 1.16 * x + across, height / 1.16 * y + up, CHARACTER_WIDTH * 5, 0.14)
        for (x, y), (across, up) in zip(points, offsets, strict=True)
    ]
    assert not any(overlap(*pair) for pair in combinations(boxes, 2))


def test_a_page_and_a_png_are_written(shown, tmp_path):
    figure = shown("bag-of-words")
    assert "<svg" in figure._repr_html_()
    figure.save(tmp_path / "bag.html")
    page = (tmp_path / "bag.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "://" not in page.replace("http://www.w3.org", "")
    figure.save(tmp_path / "bag.png")
    assert (tmp_path / "bag.png").read_bytes().startswith(b"\x89PNG")


def test_the_bag_of_the_lecture():
    (table,) = regard.show("bag-of-words").data.panels
    words, *columns = zip(*table.rows, strict=True)
    assert " ".join(words) == ", bananas for have no say we yes"
    assert ["".join(map(str, column)) for column in columns] == ["11011011", "01100101", "11001110"]


def test_the_log_probability_of_a_text_is_the_sum_of_its_tokens():
    figure = regard.show("next-token", "tiny-decoder", BE).data
    (table,) = figure.panels
    scores = [row[2] for row in table.rows]
    assert figure.numbers["log P of the text"] == pytest.approx(sum(scores))
    vocabulary = 8 + len(set(BE.replace(",", " ,").split()))
    assert figure.numbers["perplexity"] == pytest.approx(vocabulary, rel=0.6)  # untrained
    first = table.rows[0]
    assert first[0] == "'be'"
    assert float(first[1].rstrip(" %")) == pytest.approx(100 * math.exp(first[2]), abs=0.01)


def test_punctuation_marks_with_other_spaces_are_told_apart():
    text = 'model.dim is good. He said "yes, so" there'
    (table,) = regard.show("next-token", "tiny-decoder", text).data.panels
    tokens = ["'.'", "'dim'", "'is'", "'good'", "'. '", "'He'", "'said'", "' \"'", "'yes'", "', '"]
    assert [row[0] for row in table.rows][:10] == tokens


def test_shannon_counts_and_entropies():
    symbols = list("abab") + list("aabb")
    assert ngram_counts(symbols, 2)[("a",)] == {"b": 3, "a": 1}
    assert sum(ngram_counts(symbols, 3)[("b", "a")].values()) == 3  # the end meets the beginning
    assert entropy(ngram_counts(symbols, 0)) == pytest.approx(1.0)
    assert entropy(ngram_counts(symbols, 1)) == pytest.approx(1.0)
    expected = -2 * (3 * math.log2(3 / 4) + math.log2(1 / 4)) / 8
    assert entropy(ngram_counts(symbols, 2)) == pytest.approx(expected)
    (table,) = regard.show("shannon", "abcd" * 20, orders=3, length=30).data.panels
    assert [round(row[1], 9) for row in table.rows] == [2, 2, 0, 0]
    assert table.rows[2][2] in "abcd" * 20  # of order 2 the text repeats itself


def test_a_text_may_be_shorter_than_the_order_of_shannon():
    counts = ngram_counts("ab", 4)
    assert counts == {("a", "b", "a"): Counter("b"), ("b", "a", "b"): Counter("a")}
    (table,) = regard.show("shannon", "ab", orders=6, length=8).data.panels
    assert all(row[2] in ("abababab", "babababa") for row in table.rows[2:])


def test_gradients_of_zero_and_infinity_are_not_drawn():
    norms = torch.tensor([torch.inf, 2.0, 0.0])
    flow = GradientFlow(list("abc"), {"layers.0": norms})
    run = _untrained_run("tiny-decoder", {"preset": "tiny-decoder"}, [BE])
    model = replace(_model_of_run(run, "d", trained=False), gradients=lambda text: flow)
    data = FIGURES["gradient-flow"].compute(models=[model], text=BE)
    assert data.panels[0].series == {"d": [(1, 2.0)]}
    assert not data.numbers  # the ratio to the last norm, which is 0
    draw(data)


def test_the_variance_of_scores_is_d_and_1():
    numbers = regard.show("score-variance", dims=(16, 256)).data.numbers
    for dim in (16, 256):
        # 256 queries and keys: the standard error of the variance is about 5 %
        assert numbers[f"variance at d = {dim}, q · k"] == pytest.approx(dim, rel=0.15)
        assert numbers[f"variance at d = {dim}, q · k / √d"] == pytest.approx(1, rel=0.15)


def test_the_variance_of_the_scores_of_a_run_is_that_of_its_queries_and_keys():
    (table,) = regard.show("score-variance", "tiny-decoder", BE).data.panels
    assert [row[0] for row in table.rows] == [f"decoder.blocks.{n}.attention" for n in range(4)]
    for _, dim, variance, scaled in table.rows:
        assert scaled == pytest.approx(variance / dim)


def test_dot_products_of_positions_depend_on_their_distance():
    for encoding in (Sinusoidal(32), Rotary(32)):
        pairs = position_similarity(encoding, 20, normalize=False)[0].double()
        assert torch.allclose(pairs, pairs.T, atol=1e-5)
        for distance in range(20):
            diagonal = pairs.diagonal(distance)
            assert torch.allclose(diagonal, diagonal[:1], atol=1e-4)  # float32 sums of 32
    frequencies = 10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    expected = (3 * frequencies).cos().mean().item()
    assert position_similarity(Rotary(32), 8)[0, 0, 3].item() == pytest.approx(expected, abs=1e-5)


def test_positions_of_a_model_are_its_own():
    first, _ = regard.show("positions", "tiny-decoder", length=6).data.panels
    assert "Rotary" in first.title
    assert len(first.columns) == 16
    state = torch.get_rng_state()
    assert len(regard.show("positions", length=4, dim=4, heads=2).data.panels) == 2 * len(KINDS)
    assert torch.equal(torch.get_rng_state(), state)


def test_merges_are_those_of_the_most_frequent_pair():
    text = "low low low lower lowest newer newest wider\n" * 5
    tokenizer = train_tokenizer({"kind": "bpe", "vocab_size": 280}, [text])
    words = {tuple(word): count for word, count in word_counts(tokenizer, text).items()}
    for pair, count, after in merge_steps(tokenizer, text):
        pairs = Counter()
        for word, times in words.items():
            for each in pairwise(word):
                pairs[each] += times
        assert count == pairs[pair] == max(pairs.values())
        words = {tuple(merge(list(word), pair)): times for word, times in words.items()}
        assert after == sum(len(word) * times for word, times in words.items())
    # the merges of the library, applied one by one, end at its tokens
    ids = tokenizer.encode(text)
    assert sum(len(word) * times for word, times in words.items()) == len(ids)


def test_boundaries_are_the_tokens_of_each_tokenizer():
    (panel,) = regard.show("token-boundaries", "the zebra sat", CORPUS).data.panels
    by_kind = dict(zip((name.split()[0] for name in panel.labels), panel.pieces, strict=True))
    assert by_kind.keys() == TOKENIZERS.keys()
    assert by_kind["word"] == ["the", "<unk>", "sat"]
    assert "".join(by_kind["bpe"]) == "the zebra sat"


def test_a_rare_word_becomes_more_tokens():
    tokens, unknown, _ = regard.show("rare-words", CORPUS + "unseen zebras").data.panels
    assert unknown.series["word"][0] == 1.0  # words that are not in the training text
    assert unknown.series["word"][-1] == unknown.series["bpe"][0] == 0.0
    assert tokens.series["bpe"][0] > tokens.series["bpe"][-1]


def test_words_are_counted_without_the_punctuation_beside_them():
    _, unknown, table = regard.show(
        "rare-words", CORPUS + "punctuated, " * 90 + "punctuated"
    ).data.panels
    occurrences = {row[0]: row[1] for row in table.rows}
    assert "punctuated" not in occurrences  # one of the most frequent words
    assert unknown.series["word"] == [0.0] * len(unknown.labels)


def test_the_example_of_merges_shows_its_space():
    (table, _) = regard.show(
        "bpe-merges", "lower lowest slower", merges=3, word=" lower"
    ).data.panels
    assert table.rows[0][-1].startswith("␣ l")


def test_temperature_is_a_power_of_the_probabilities():
    figure = regard.show("temperature", values=(0.5, 1.0, 4.0)).data
    series = figure.panels[0].series
    powers = [p**2 for p in series["T = 1"]]
    assert series["T = 0.5"] == pytest.approx([p / sum(powers) for p in powers])
    bits = list(figure.numbers.values())
    assert bits == sorted(bits)


def test_word_vectors_are_placed_by_pca_or_tsne():
    run = _untrained_run("cbow", {"preset": "cbow"}, [SENTENCE])
    by_pca, by_tsne = (
        regard.show("word-vectors", run, SENTENCE, projection=name).data for name in ("pca", "tsne")
    )
    (pca_panel,), (tsne_panel,) = by_pca.panels, by_tsne.panels
    assert pca_panel.labels == tsne_panel.labels == list(dict.fromkeys(SENTENCE.split()))
    vectors = torch.nn.functional.normalize(run.model.embed.weight, dim=-1)
    ids = [run.tokenizer.encode(word)[0] for word in tsne_panel.labels]
    expected = tsne(vectors[ids].detach().double())
    assert torch.allclose(torch.tensor(tsne_panel.points, dtype=torch.float64), expected)
    assert "t-SNE" in by_tsne.caption
    with pytest.raises(RegardError, match=r"unknown value 'umap'; known: pca, tsne"):
        regard.show("word-vectors", run, SENTENCE, projection="umap")


def test_tokens_that_only_a_sampler_makes_likely_are_shown():
    data = regard.show("samplers", samplers=("allow=[10, 11]",), top=3).data
    (panel,) = data.panels
    assert panel.labels == ["the", "of", "qua"]
    assert panel.series["after"] == pytest.approx([0, 2 / 3, 1 / 3])
    run = _untrained_run("tiny-decoder", {"preset": "tiny-decoder"}, [BE])
    (panel,) = regard.show("samplers", run, "To be", samplers=("min_new_tokens=2",)).data.panels
    assert "tokens left" in panel.title


def test_samplers_act_in_the_order_given():
    def kept(*samplers):
        last = regard.show("samplers", samplers=samplers).data.panels[-1]
        return sum(p > 0 for p in last.series["after"])

    first, second = (
        kept("top_p=0.9", "temperature=3.0"),
        kept("temperature=3.0", "top_p=0.9"),
    )
    assert first == 7  # 0.32 + 0.2 + ... + 0.05 = 0.92
    assert second > first


def test_the_tree_of_a_beam_search_is_that_of_the_library():
    run = _untrained_run("tiny-decoder", {"preset": "tiny-decoder"}, [BE])
    characters = replace(
        _model_of_run(run, "", trained=False), tokenizer=train_tokenizer("char", ["a b"])
    )
    blank = beam_tree(characters, "  ", width=2, max_new_tokens=1)
    assert blank.panels[0].nodes[0].label == " "
    figure = regard.show("beam-tree", run, BE, width=3, max_new_tokens=4).data
    ((best, score),) = run.search(BE, max_new_tokens=4, search="beam=3")
    nodes = figure.panels[0].nodes
    path = [node.label for node in nodes if node.best]
    assert " ".join(path) == best.strip()
    assert figure.numbers["score of the best"] == pytest.approx(score)
    depths = Counter()
    for node in nodes[1:]:
        depth, parent = 1, node.parent
        while nodes[parent].parent is not None:
            depth, parent = depth + 1, nodes[parent].parent
        depths[depth] += node.kept
        assert node.value <= nodes[node.parent].value
    assert list(depths) == [1, 2, 3, 4]
    assert min(depths.values()) >= 3  # the width, and beams that ended


def test_attention_without_positions_is_equivariant():
    numbers = regard.show("permutation").data.numbers
    assert numbers["largest change without positions"] < 1e-12
    assert numbers["largest change with sinusoidal positions"] > 1e-3


def test_the_receptive_field_is_that_of_the_gradient():
    for width, dilations in ((2, (1, 2, 4)), (3, (1, 3)), (2, (1, 1, 1))):
        figure = regard.show("receptive-field", kernel_size=width, dilations=dilations).data
        field = figure.numbers["receptive field"]
        assert field == 1 + (width - 1) * sum(dilations)
        x = torch.randn(1, 2 * field, 2, requires_grad=True)
        y = x
        for dilation in dilations:
            y = CausalConvolution(2, width, dilation)(y)
        y[0, -1].sum().backward()
        seen = x.grad[0].abs().sum(-1) > 0
        assert seen[-field:].any()
        assert not seen[:-field].any()
        marks = figure.panels[0].marks[0]
        assert [bool(mark) for mark in marks] == seen[-field:].tolist()


def test_path_lengths_are_those_of_the_table():
    curves = regard.show("path-lengths", kernel_size=4, window=8).data.panels[2].series
    for n, _ in curves["recurrence"]:
        lengths = {name: dict(points)[n] for name, points in curves.items()}
        assert lengths["recurrence"] == n - 1
        assert lengths["self-attention"] == 1
        assert lengths["convolution, kernel size 4"] == math.ceil((n - 1) / 3)
        assert lengths["convolution, kernel size 4, dilated"] == math.ceil(math.log(n, 4) - 1e-9)
        assert lengths["sliding-window attention, size 8"] == math.ceil((n - 1) / 7)


def test_parameters_of_a_dense_layer_grow_with_the_square_of_the_length():
    numbers = regard.show("parameter-count", dim=8, lengths=(4, 16)).data.numbers
    assert numbers["dense layer at n = 16"] == (16 * 8) ** 2 + 16 * 8
    assert numbers["self-attention at n = 16"] == 4 * 8**2


def test_operations_grow_with_the_square_of_the_length_or_with_the_length():
    layers = _layers(8, 1, 8, 3)
    exponents = {}
    for name, layer in layers.items():
        points = [(n, flops(layer, torch.zeros(1, n, 8))) for n in (128, 256, 512)]
        exponents[name.split(",")[0]] = exponent(points)
    assert 1.9 < exponents.pop("self-attention") < 2.0
    assert all(value == pytest.approx(1.0, abs=1e-9) for value in exponents.values())


def test_stored_memory_is_that_of_the_attention_weights():
    attend = _layers(8, 1, 8, 3)["self-attention"]
    stored = [saved_bytes(attend, torch.zeros(1, n, 8)) for n in (64, 128, 256)]
    assert exponent(list(zip((64, 128, 256), stored, strict=True))) > 1.8


def test_windowed_attention_equals_attention_with_a_mask():
    torch.manual_seed(0)
    windowed = SlidingWindowAttention(8, 2, 4).double()
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    inputs = AttentionInputs.of(Mask.causal() & Mask.window(4), torch.arange(11)[None])
    assert torch.allclose(windowed(x), Attention.forward(windowed, x, inputs=inputs), atol=1e-12)


def test_the_landscape_is_the_loss_in_the_middle_and_leaves_the_weights():
    run = _untrained_run("tiny-decoder", {"preset": "tiny-decoder"}, [SENTENCE])
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    figure = regard.show("loss-landscape", run, SENTENCE, grid=3)
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    ids = torch.tensor([run.tokenizer.encode(SENTENCE)])
    with torch.no_grad():
        logits = run.model.head(run.model(ids[:, :-1]))[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    (surface,) = figure.data.panels
    assert surface.values[1][1] == pytest.approx(loss, abs=1e-5)
    weight = torch.randn(3, 4)
    moved = direction(weight, torch.Generator().manual_seed(0))
    assert torch.allclose(moved.norm(dim=1), weight.norm(dim=1))


def test_the_gates_are_those_of_the_cell():
    panels = regard.show("gates", "lstm", "a b c", units=3).data.panels
    values = {panel.title.split(",")[0]: torch.tensor(panel.values) for panel in panels}
    assert {"input gate", "forget gate", "output gate", "cell", "state"} <= values.keys()
    assert torch.allclose(values["cell"][:, 0], (values["input gate"] * values["candidate"])[:, 0])
    cell = values["forget gate"][:, 1:] * values["cell"][:, :-1]
    cell += (values["input gate"] * values["candidate"])[:, 1:]
    assert torch.allclose(values["cell"][:, 1:], cell, atol=1e-6)
    assert torch.allclose(values["state"], values["output gate"] * values["cell"].tanh(), atol=1e-6)


def test_gradients_vanish_in_an_elman_network_and_not_in_attention():
    figure = regard.show("gradient-flow", "elman", "tiny-decoder", SENTENCE)
    elman, decoder = figure.data.numbers.values()
    assert elman < 0.1 * decoder


def test_the_pronoun_of_a_decoder_cannot_see_what_comes_later():
    decoder = regard.show("pronoun", "tiny-decoder").data
    assert decoder.numbers["largest change of a weight"] < 1e-6
    assert "is a decoder" in decoder.caption
    encoder = regard.show("pronoun", "tiny-encoder").data
    assert encoder.numbers["largest change of a weight"] > 1e-4
    first, second, _ = encoder.panels
    assert [a for a, b in zip(first.columns, second.columns, strict=True) if a != b] == ["tired"]
    assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in first.values)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (("nextt",), {}, "did you mean 'next-token'"),
        (("next-token", "a b"), {}, "needs a run or preset: regard show next-token RUN TEXT"),
        (("next-token", "tiny-decoder"), {}, "needs a text"),
        (("next-token", "tiny-decoder", "lstm", "a b"), {}, "takes one run or preset, not 2"),
        (
            ("next-token", "tiny-encoder", "a b"),
            {},
            "predicts the next token; tiny-encoder supports",
        ),
        (("next-token", "tiny-decoder", "a"), {}, "1 tokens; next-token needs at least 2"),
        (("next-token", "tiny-decoder", "a " * 70), {}, "70 tokens, and the context of"),
        (("next-token", "ngram", "a b"), {}, "cannot be shown untrained"),
        (("next-token", "llama-7b", "a b"), {}, "such as tiny-decoder"),
        (("shannon", "runs/none"), {}, "neither a run, nor a text file, nor a preset"),
        (("shannon", "none.txt"), {}, "none.txt is neither a run, nor a text file, nor a preset"),
        (("shannon", "tiny-decoder", "a b"), {}, "takes no run or preset"),
        (("shannon", "ab"), {"order": 2}, "did you mean 'orders'"),
        (("shannon", "ab"), {"orders": "x"}, "orders must be an integer"),
        (("positions",), {"kinds": ["rotery"]}, "did you mean 'rotary'"),
        (("positions", "lstm"), {}, "lstm has no position encoding"),
        (("positions", "tiny-decoder"), {"dim": 8}, "dim applies only without a run or preset"),
        (("score-variance", "lstm", "a b"), {}, "lstm has no attention"),
        (("pronoun", "tiny-encoder", "a b", "a c"), {}, "'it' is not a word of 'a b'"),
        (("pronoun", "tiny-encoder", "a it"), {}, "compares two sentences, not 1"),
        (("gates", "elman", "a b"), {}, "no cell with gates"),
        (("gates", "lstm", "a b"), {"layer": 2}, "has 2 cells, 0 to 1"),
        (("receptive-field", "lstm"), {}, "lstm has no convolution"),
        (("token-boundaries", "lstm", "a b"), {}, "the preset lstm has no tokenizer"),
        (("bpe-merges", "lstm", "a b a b"), {}, "has a word tokenizer, which has no merges"),
        (("bpe-merges", "ab"), {}, "no pair of characters occurs twice"),
        (("temperature",), {"values": (0.0,)}, "must be temperatures above 0"),
        (("temperature",), {"values": (1.0, math.nan)}, "must be temperatures above 0"),
        (("temperature",), {"top": 0}, "top=0 must be at least 1"),
        (("samplers",), {"top": -1}, "top=-1 must be at least 1"),
        (("permutation",), {"heads": 0}, "heads=0 must be at least 1"),
        (("positions",), {"kinds": ()}, "kinds=[] is empty; give some of sinusoidal"),
        (("receptive-field",), {"layers": 0}, "layers=0 must be at least 1"),
        (("receptive-field",), {"dilations": ()}, "dilations=[] one or more numbers"),
        (("cost",), {"lengths": (8, 8)}, "must be two or more different numbers"),
        (("cost",), {"heads": 0}, "heads=0 must be at least 1"),
        (("cost",), {"kernel_size": 0}, "kernel_size=0 must be at least 1"),
        (("loss-landscape", "a b c"), {"span": math.nan}, "span=nan finite and above 0"),
        (("word-vectors", "cbow", "a b c d"), {"words": -1}, "words=-1 must be at least 1"),
        (("temperature", "a b"), {}, "needs a run or a preset as well"),
        (("samplers", "lstm"), {}, "needs a text as well"),
        (("samplers",), {"samplers": ("topp=1",)}, "did you mean 'top_p'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(what, options, message):
    with pytest.raises(RegardError) as refused:
        regard.show(*what, **options)
    assert message in str(refused.value)
    assert str(refused.value).count("\n") == 0


def test_images_states_and_counts_are_refused_by_figures_of_texts_and_weights():
    run = _untrained_run("tiny-decoder", {"preset": "tiny-decoder"}, [BE])
    decoder = _model_of_run(run, "d", trained=False)
    counted = replace(decoder, module=NGram(NGramConfig(vocab_size=9, order=2)))
    sizes = {"vocab_size": 9, "dim": 8, "score": "dot"}
    recurrent = replace(
        decoder, module=RecurrentEncoderDecoder(Seq2SeqConfig(**sizes)), attention=len
    )
    for name, arguments, message in (
        ("pronoun", {"model": replace(decoder, tokenizer=None)}, "d reads no text"),
        ("score-variance", {"model": recurrent, "text": BE}, "attends with its states"),
        ("loss-landscape", {"models": [counted], "text": BE}, "fitted without gradients"),
    ):
        with pytest.raises(RegardError, match=message):
            FIGURES[name].compute(**arguments)


def test_two_figures_of_a_page_share_no_id_and_keep_their_texts():
    first, second = (
        regard.show("bag-of-words", f'id="a" url(#b) {word}')._repr_html_() for word in "xy"
    )
    ids = [
        {element.get("id") for element in ElementTree.fromstring(page).iter()} - {None}
        for page in (first, second)
    ]
    assert all(ids)
    assert not ids[0] & ids[1]
    for page, own in zip((first, second), ids, strict=True):
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', page)) - {"b"} == own
        assert 'id="a" url(#b)' in page  # a text, not an attribute
