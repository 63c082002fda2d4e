"""The cost of hook points without hooks, and of the attention maps of 8,192 tokens.

    python bench/hook_points.py

The first lines are the time and the peak memory of `attention_maps` for one head and for one row of
it. The next ones compare a forward pass and a training step of a small decoder with and without its
hook points, alternately, on one thread. The last one is the most unfavourable case, a forward pass
of one token of a tiny decoder: Python's overhead dominates it, as on a GPU that waits for Python.
"""

import resource
import statistics
import time

import torch

from regard.explain import attention_maps
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.hook_point import CarryHookPoint, HookPoint


def _identity(x):
    return x


def without_hook_points(model):
    """The same model, with plain functions in place of its hook points."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, HookPoint | CarryHookPoint):
                delattr(module, name)
                setattr(module, name, _identity)
    return model


def build(dim=128):
    """A decoder, by default of the size of the quick CPU recipes."""
    torch.manual_seed(0)
    return Transformer(TransformerConfig(vocab_size=65, dim=dim, layers=4, heads=4, context=64))


def synchronize(device):
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(step, repeats, device):
    """The median CPU time of a step, which other load does not affect; on a GPU, its duration."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times = []
    for _ in range(repeats):
        begin = clock()
        step()
        synchronize(device)
        times.append(clock() - begin)
    return statistics.median(times)


def compare_hook_points(device):
    """The times with and without hook points, and their ratio, of a forward and a training step."""
    torch.set_num_threads(1)
    ids = torch.randint(65, (12, 64), device=device)
    models = {
        "with hook points": build().to(device),
        "without hook points": without_hook_points(build()).to(device),
    }

    def train(model):
        model.zero_grad()
        model.head.loss(model(ids), ids).backward()

    def forward(model):
        with torch.no_grad():
            model(ids)

    for name, step in (("forward", forward), ("training step", train)):
        times = {variant: [] for variant in models}
        for number in range(16):
            for variant in sorted(models, reverse=bool(number % 2)):  # both are first equally often
                model = models[variant]
                times[variant].append(seconds(lambda m=model, s=step: s(m), 7, device))
        pairs = zip(times["with hook points"], times["without hook points"], strict=True)
        ratios = sorted(one / other for one, other in pairs)
        text = ", ".join(f"{n} {1e3 * statistics.median(t):.2f} ms" for n, t in times.items())
        yield (
            f"{name}: {text}, ratio {statistics.median(ratios):.3f} "
            f"(quartiles {ratios[4]:.3f} and {ratios[-5]:.3f})"
        )


@torch.no_grad()
def compare_one_token(repeats=4000):
    """The median times of a forward pass of one token with and without hook points."""
    torch.set_num_threads(1)
    ids = torch.randint(65, (1, 1))
    models = {"with": build(dim=16), "without": without_hook_points(build(dim=16))}
    times = {variant: [] for variant in models}
    for number in range(repeats):
        for variant in sorted(models, reverse=bool(number % 2)):
            begin = time.perf_counter()
            models[variant](ids)
            times[variant].append(time.perf_counter() - begin)
    medians = {variant: 1e6 * statistics.median(values) for variant, values in times.items()}
    count = sum(isinstance(m, HookPoint | CarryHookPoint) for m in models["with"].modules())
    difference = medians["with"] - medians["without"]
    return (
        f"one token: with {count} hook points {medians['with']:.1f} µs, without "
        f"{medians['without']:.1f} µs, {1e3 * difference / count:.0f} ns for each"
    )


def long_text():
    """Print the time and the memory of one head, and of one row of it, of 8,192 tokens."""
    torch.set_num_threads(1)  # threads that wait for each other count as CPU time
    config = TransformerConfig(
        vocab_size=65, dim=256, layers=2, heads=8, context=8192, position="rotary"
    )
    model = Transformer(config).eval()
    ids = torch.randint(65, (1, 8192))

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def measure(function):
        """Run a function; return its result, its time and its CPU time."""
        begin, cpu = time.perf_counter(), time.process_time()
        result = function()
        return result, time.perf_counter() - begin, time.process_time() - cpu

    def forward():
        with torch.no_grad():
            return model(ids)

    forward()
    _, wall, cpu = measure(forward)
    print(f"forward pass: {wall:.2f} s, CPU {cpu:.2f} s, peak {peak():.2f} GiB")
    pattern = "decoder.blocks.1.attention"
    for name, rows in (("one row of one head", [8000]), ("one head", None)):
        maps, more, more_cpu = measure(
            lambda rows=rows: attention_maps(model, forward, pattern=pattern, heads=[3], rows=rows)
        )
        (weights,) = maps.values()
        print(
            f"{name}, {tuple(weights.shape)}: {more - wall:.2f} s more, CPU {more_cpu - cpu:.2f} s "
            f"more, peak {peak():.2f} GiB"
        )


if __name__ == "__main__":
    long_text()
    for line in compare_hook_points(torch.device("cpu")):
        print(line)
    print(compare_one_token())
