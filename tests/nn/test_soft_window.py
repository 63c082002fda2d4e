import math

import torch

from regard.models.build import build_model, resolve
from regard.nn.soft_window import SoftWindow
from regard.nn.state import Source


def test_the_window_is_that_of_the_formula():
    torch.manual_seed(0)
    window = SoftWindow(4, components=2).double()
    h, kappa = torch.randn(2, 4).double(), torch.rand(2, 2).double()
    text, lengths = torch.randn(2, 5, 3).double(), torch.tensor([5, 3])
    w, after = window(h, kappa, text, lengths)
    for row in range(2):
        a, b, d = window.out(h[row]).exp().view(3, 2).tolist()
        moved = [k + step for k, step in zip(kappa[row].tolist(), d, strict=True)]
        assert all(math.isclose(x, y) for x, y in zip(after[row].tolist(), moved, strict=True))
        expected = torch.zeros(3).double()
        for u in range(int(lengths[row])):
            components = zip(a, b, moved, strict=True)
            phi = sum(x * math.exp(-y * (k - u) ** 2) for x, y, k in components)
            expected += phi * text[row, u]
        torch.testing.assert_close(w[row], expected, rtol=0, atol=1e-12)


def test_steps_and_padding_change_nothing_and_the_future_is_not_seen():
    torch.manual_seed(0)
    table = {"family": "soft_window", "dim": 6, "layers": 3, "components": 3, "vocab_size": 4}
    model = build_model(resolve(table)).eval()
    points, source = (
        torch.randn(2, 6, 5),
        Source(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([3, 1])),
    )
    whole = model.head(model(points, source=source))
    state = model.start(2, 6, source)
    for first, last in ((0, 2), (2, 3), (3, 6)):
        part, state = model.step(points[:, first:last], state)
        torch.testing.assert_close(part[:, 0], whole[:, last - 1])
    changed = points.clone()
    changed[:, 4:] += 1
    assert torch.equal(model(changed, source=source)[:, :4], model(points, source=source)[:, :4])
    short = Source(torch.tensor([[3]]), torch.tensor([1]))
    torch.testing.assert_close(model(points[1:], source=short), model(points, source=source)[1:])
    model(points, source=source).sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0
        for n, p in model.named_parameters()
        if "head" not in n
    )
