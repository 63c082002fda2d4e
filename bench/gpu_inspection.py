"""Inspection on a GPU: each measure is compared with its value on the CPU; prints a line for each.

    python bench/gpu_inspection.py [--device cuda]

Trains two small runs (a decoder with the compiled, captured training step, and an LSTM), then reads
and replaces activations in compiled models and in generation, which then must not use a CUDA graph.
The last lines are the cost of hook points and of one head of 8,192 tokens. Exit code 1 if a line
begins with FAIL.
"""

import argparse
import copy
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import hook_points
import torch

import regard
from regard.errors import RegardError
from regard.explain import (
    AttentionMap,
    ablate,
    attention_maps,
    attention_rollout,
    direct_logit_attribution,
    find_heads,
    gradient_flow,
    gradient_times_attention,
    head_effects,
    integrated_gradients,
    logit_lens,
    position_similarity,
    probe,
    steer,
    token_score,
    trace,
    tsne,
    tune_lens,
)
from regard.models.seq2seq import RecurrentEncoderDecoder, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import repeat_kv_heads
from regard.nn.recurrent import Recurrent
from regard.nn.state import Source

TEXT = "the 7th cat sat on it, the mat"
FAILED = []
SCHEMES = {
    "rotary, grouped heads": {"position": "rotary", "kv_heads": 2},
    "alibi": {"position": "alibi"},
    "t5, encoder": {"position": "t5", "architecture": "encoder"},
    "learned, window": {"position": "learned", "window": 8},
    "additive score": {"position": "sinusoidal", "score": "additive"},
    "soft cap": {"position": "rotary", "score": {"kind": "scaled_dot", "cap": 20.0}},
}


def check(name):
    """A decorator that runs a check and prints its result, or its error, in one line."""

    def run(function):
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                line = f"ok    {name}: {function()}"
        except Exception as error:
            FAILED.append(name)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            line = f"FAIL  {name}: {type(error).__name__}: {error} ({where})"
        print(f"{line} [{time.perf_counter() - begin:.1f} s]", flush=True)

    return run


def max_difference(one, other, tolerance):
    """The largest difference of two tensors; raises if it exceeds the tolerance."""
    one, other = (x.detach().double().cpu() for x in (one, other))
    difference = (one - other).abs().max().item()
    assert difference <= tolerance, f"differs by {difference:.2g}, allowed {tolerance:g}"
    return difference


def decoder(**choices):
    """A decoder in float32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "dim": 64, "layers": 3, "heads": 4, "context": 64}
    return Transformer(TransformerConfig(**(sizes | choices))).eval()


def on_both(model, device, function, tolerance=1e-4):
    """The largest difference between the results on the CPU and on the device."""
    cpu = function(model, torch.device("cpu"))
    other = function(copy.deepcopy(model).to(device), device)
    return f"CPU and {device.type} differ by {max_difference(cpu, other, tolerance):.1g}"


def check_compiled(device):
    """Trace a compiled model: read and replace activations."""
    model = decoder(position="rotary").to(device)
    compiled = torch.compile(model)
    ids = torch.arange(32, device=device).view(2, 16)
    edit = {"decoder.blocks.1.attention.heads_hook": ablate(heads=[0, 2])}

    @check("trace of a compiled model")
    @torch.no_grad()
    def _():
        before = compiled(ids)
        with trace(model, "*.out_hook", edit=edit) as plain:
            expected = model(ids)
        with trace(compiled, "*.out_hook", edit=edit) as seen:
            edited = compiled(ids)
        assert list(seen) == list(plain), list(seen)
        difference = max_difference(edited, expected, 1e-5)
        assert (edited - before).abs().max() > 1e-3, "the edit changed nothing"
        assert torch.equal(compiled(ids), before), "the compiled model changed"
        return f"equals eager to {difference:.1g}; before and after, the compiled graph runs"

    @check("maps and lens of a compiled model")
    @torch.no_grad()
    def _():
        maps = attention_maps(compiled, lambda: compiled(ids))
        expected = attention_maps(model, lambda: model(ids))
        difference = max(max_difference(maps[name], expected[name], 1e-5) for name in expected)
        lens = max_difference(logit_lens(compiled, ids), logit_lens(model, ids), 1e-4)
        return f"equal eager to {difference:.1g} and {lens:.1g}"


def check_maps(device):
    """Recomputed attention weights against the output of the kernel."""
    for name, choices in SCHEMES.items():
        model = decoder(**choices).to(device)
        ids = torch.randint(40, (2, 48), device=device)

        @check(f"maps, {name}")
        @torch.no_grad()
        def _(model=model, ids=ids):
            run = {}

            def forward():
                with trace(model, ["*.v_hook", "*.heads_hook"]) as run["activations"]:
                    model(ids)

            maps = attention_maps(model, forward)
            differences = []
            for path, weights in maps.items():
                v = repeat_kv_heads(run["activations"][f"{path}.v_hook"], weights.shape[1])
                differences.append(
                    max_difference(weights @ v, run["activations"][f"{path}.heads_hook"], 1e-5)
                )
            row = attention_maps(model, forward, heads=[3], rows=[40])
            path = next(iter(maps))
            max_difference(row[path][:, 0, 0], maps[path][:, 3, 40], 1e-6)
            return f"weights times values equal the output of the kernel to {max(differences):.1g}"


def check_measures(device):
    """Every measure on the device and on the CPU."""
    model, ids = decoder(position="learned", norm="rms"), torch.randint(40, (1, 24))

    def ig(model, device):
        score = token_score(model, 7)
        values, missing = integrated_gradients(model, ids.to(device), score, steps=32)
        return torch.cat([values, values.new_tensor([missing])])

    def effects(model, device):
        def loss():
            return model.head.loss(model(ids.to(device)), ids.to(device))

        return torch.stack(list(head_effects(model, loss).values()))

    def gradients(model, device):
        def score():
            return model.head(model(ids.to(device)))[0, -1, 7]

        return torch.cat(list(gradient_times_attention(model, score).values()))

    def logit_attribution(model, device):
        return torch.tensor(list(direct_logit_attribution(model, ids.to(device), 7).values()))

    def tuned_lens(model, device):
        lens = tune_lens(model, [ids.to(device)] * 3)
        return logit_lens(model, ids.to(device), lens=lens)

    def rollout_weights(model, device):
        maps = attention_maps(model, lambda: model(ids.to(device)))
        return attention_rollout([weights[0] for weights in maps.values()])

    def flow(model, device):
        def loss():
            return model.head(model(ids.to(device)))[0, -1, 7]

        return torch.cat(list(gradient_flow(model, loss).values()))

    def heads(model, device):
        return torch.stack(list(find_heads(model).scores.values()))

    measures = {
        "integrated gradients": ig,
        "logit lens": lambda model, device: logit_lens(model, ids.to(device)),
        "tuned lens": tuned_lens,
        "direct logit attribution": logit_attribution,
        "ablation of each head": effects,
        "gradient times attention": gradients,
        "rollout": rollout_weights,
        "gradient flow": flow,
        "find_heads": heads,
        "position_similarity": lambda model, _: position_similarity(model.decoder.position, 16),
    }
    for name, function in measures.items():
        check(name)(lambda function=function: on_both(model, device, function))

    @check("probe, t-SNE and a page of maps, given tensors on the device")
    def _():
        x, labels = torch.randn(60, 8, device=device), torch.arange(60) % 3
        accuracy = probe(x, labels).accuracy
        assert tsne(x, steps=20).device.type == device.type
        weights = torch.rand(2, 3, 3, device=device)
        page = AttentionMap(list("abc"), list("abc"), weights)._repr_html_()
        return f"accuracy {accuracy:.2f} on random labels, a page of {len(page)} characters"


def check_recurrent(device):
    """Gates, states and alignments, read and replaced."""
    for cell in ("elman", "gru", "lstm"):

        def states(layer, device):
            x = torch.linspace(-1, 1, 2 * 9 * 6, device=device).view(2, 9, 6)
            gate = f"0.{layer[0].hook_names[0]}_hook" if layer[0].hook_names else "0.state_hook"
            edit = {gate: ablate(units=[1], positions=[3])}
            with torch.no_grad(), trace(layer, "*", edit=edit) as activations:
                y, _ = layer(x)
            return torch.stack([*activations.values(), y])

        torch.manual_seed(0)
        layer = Recurrent(cell, 6, 6, 2).eval()
        check(f"gates of {cell}, one replaced")(
            lambda layer=layer, states=states: on_both(layer, device, states, 1e-5)
        )
    for placement in ("luong", "bahdanau"):

        def decoder_outputs(model, device):
            lengths = torch.tensor([5, 3], device=device)
            source = Source(torch.arange(10, device=device).view(2, 5), lengths)
            edit = {"attention.*.weights_hook": ablate(units=[0])}
            with torch.no_grad(), trace(model, "attention.*", edit=edit):
                return model(torch.ones(2, 6, dtype=torch.long, device=device), source=source)

        torch.manual_seed(0)
        config = Seq2SeqConfig(
            vocab_size=12, dim=16, score="additive", attention_placement=placement
        )
        model = RecurrentEncoderDecoder(config).eval()
        check(f"alignment of {placement}, replaced")(
            lambda model=model, decoder_outputs=decoder_outputs: on_both(
                model, device, decoder_outputs, 1e-5
            )
        )


def check_runs(device, folder):
    """Runs: generation inside `trace`, where no CUDA graph may decode, and figures."""
    text = folder / "cats.txt"
    text.write_text("".join(f"the {n}th cat sat on it, the mat\n" for n in range(200)))
    runs = {}
    for name, preset in (("decoder", "tiny-decoder"), ("lstm", "lstm")):

        @check(f"train {name}")
        def _(name=name, preset=preset):
            model = regard.preset(preset, dim=64, layers=2)
            runs[name] = regard.train(
                text,
                f"device={device.type}",
                model=model,
                tokenizer="char",
                steps=60,
                out=folder / name,
                quiet=True,
            )
            return f"loss {runs[name].metrics['loss']:.2f}"

    for name, run in runs.items():
        hook_point = "decoder.blocks.0.out_hook" if name == "decoder" else "layers.0.state_hook"

        @check(f"generate of {name} inside trace")
        def _(run=run, hook_point=hook_point):
            def generate():
                return run.generate("the ", max_new_tokens=30, sampler=["temperature=0"])

            generate()
            plain = generate()
            with trace(run.model, hook_point) as seen:
                traced = generate()
            assert traced == plain, f"{traced!r} is not {plain!r}"
            torch.manual_seed(0)
            edit = {hook_point: steer(5 * torch.randn(64))}
            with trace(run.model, (), edit=edit):
                steered = generate()
            assert steered != plain, "steering changed nothing: a captured graph ran"
            assert generate() == plain, "the trace outlived its context"
            on_cpu = regard.load(run.folder.path, device="cpu")
            with trace(on_cpu.model, (), edit=edit):
                expected = on_cpu.generate("the ", max_new_tokens=30, sampler=["temperature=0"])
            same = sum(a == b for a, b in zip(steered, expected, strict=False))
            return (
                f"traced equals captured; steered equals the CPU in {same} of {len(expected)} "
                f"characters; last activation {tuple(seen[hook_point].shape)}"
            )

    figures = [
        ("next-token", "decoder", (TEXT,)),
        ("next-token", "lstm", (TEXT,)),
        ("shuffled-words", "decoder", (TEXT,)),
        ("gates", "lstm", (TEXT,)),
        ("gradient-flow", "decoder", (TEXT,)),
        ("gradient-flow", "lstm", (TEXT,)),
        ("score-variance", "decoder", (TEXT,)),
        ("positions", "decoder", ()),
        ("beam-tree", "decoder", (TEXT,)),
        ("temperature", "decoder", (TEXT,)),
        ("samplers", "decoder", (TEXT,)),
        ("loss-landscape", "decoder", (TEXT * 8,)),
        ("word-vectors", "decoder", ()),
        (
            "pronoun",
            "decoder",
            ("the 3th cat sat on it, the mat", "the 7th cat sat on it, the mat"),
        ),
    ]

    @check("regard show")
    def _():
        drawn = []
        for figure, name, texts in figures:
            try:
                str(regard.show(figure, str(runs[name].folder.path), *texts))
            except RegardError as error:
                drawn.append(f"{figure} refused ({str(error).splitlines()[0]})")
            else:
                drawn.append(figure)
        return ", ".join(drawn)

    @check("methods of a run")
    def _():
        run = runs["decoder"]
        results = [
            run.attention(TEXT),
            run.logit_lens(TEXT),
            run.attribution(TEXT),
            run.find_heads(),
        ]
        results += [run.gradients(TEXT), runs["lstm"].states(TEXT)]
        pages = [result._repr_html_() for result in results]
        run.head_effects(TEXT)
        return f"{len(pages)} displays"


def check_long(device):
    """One head and one row of 8,192 tokens."""
    sizes = {"dim": 256, "layers": 2, "heads": 8, "context": 8192, "position": "rotary"}
    model = decoder(vocab_size=65, **sizes).to(device)
    ids = torch.randint(65, (1, 8192), device=device)
    for name, rows in (("one row of one head", [8000]), ("one head", None)):

        @check(f"{name} of 8,192 tokens")
        @torch.no_grad()
        def _(rows=rows):
            def maps():
                attention_maps(
                    model,
                    lambda: model(ids),
                    pattern="decoder.blocks.1.attention",
                    heads=[3],
                    rows=rows,
                )
                hook_points.synchronize(device)

            maps()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            maps()
            seconds = time.perf_counter() - begin
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            return f"{seconds:.3f} s with the forward pass, {peak:.2f} GiB on the GPU"


def main():
    """All checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    torch.backends.cudnn.allow_tf32 = False  # cuDNN's recurrent layers round to TF32 by default
    check_measures(device)
    check_maps(device)
    check_recurrent(device)
    check_long(device)
    with tempfile.TemporaryDirectory() as folder:
        check_runs(device, Path(folder))
    check_compiled(device)
    check("hook points without hooks")(lambda: "; ".join(hook_points.compare_hook_points(device)))
    raise SystemExit(f"{len(FAILED)} failed: {', '.join(FAILED)}" if FAILED else 0)


if __name__ == "__main__":
    main()
