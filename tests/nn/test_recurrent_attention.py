"""Recurrent attention: soft, straight-through and sampled."""

import torch

from regard.nn.recurrent_attention import RecurrentAttention, reinforce


def test_straight_through_attention_has_the_gradient_of_soft_attention():
    soft, hard = (
        RecurrentAttention(8, context=5, score="dot", hard=hard)
        for hard in (None, "straight_through")
    )
    s, h = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 5, 8)
    allowed, upstream = torch.ones(2, 1, 1, 5, dtype=torch.bool), torch.randn(2, 3, 8)
    gradients = []
    for attention in (soft, hard):
        output = attention(s, *attention.keys_values(h), allowed)
        gradients.append(torch.autograd.grad((output.context_vectors * upstream).sum(), s)[0])
    torch.testing.assert_close(*gradients)


def test_hard_attention_is_sampled_by_the_weights_with_their_log_probability():
    attention = RecurrentAttention(4, context=3, score="dot", hard="reinforce").train()
    s, h = torch.randn(1, 1, 4).expand(1, 4000, 4), torch.randn(1, 3, 4)
    allowed = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    output = attention(s, *attention.keys_values(h), allowed)
    soft = RecurrentAttention(4, context=3, score="dot")(
        s, *attention.keys_values(h), allowed
    ).weights[0, 0, 0]
    frequency = output.weights[0, 0].mean(0)
    torch.testing.assert_close(frequency, soft, rtol=0, atol=0.03)  # of 4,000 draws
    sampled = output.weights[0, 0].argmax(-1)
    torch.testing.assert_close(output.log_prob[0], soft[sampled].log())
    attention.eval()
    output = attention(s, *attention.keys_values(h), allowed)
    assert output.log_prob is None
    assert output.weights[0, 0, 0].argmax() == soft.argmax()


def test_reinforce_gives_the_gradient_of_the_expected_return():
    # two draws, of which the first also decides what the second costs; the expectation is a sum
    first, second = (torch.randn(3, requires_grad=True) for _ in range(2))
    once, twice = torch.randn(3), 3 * torch.randn(3, 3)
    p, q = first.softmax(-1), second.softmax(-1)
    exact = torch.autograd.grad(
        (p * once).sum() + p @ twice @ q, (first, second), create_graph=True
    )

    rows = 40_000
    a, b = (chances.detach().multinomial(rows, replacement=True) for chances in (p, q))
    log_prob = torch.stack([p[a].log(), q[b].log(), p[a].log()], 1)
    cost = torch.stack([once[a], twice[a, b], torch.full((rows,), 100.0)], 1)
    scored = torch.tensor([[True, True, False]]).expand(rows, -1)  # the third is padding
    estimate = torch.autograd.grad(reinforce(log_prob, cost, scored) / rows, (first, second))
    for ours, expected in zip(estimate, exact, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0.05)  # of 40,000 draws
