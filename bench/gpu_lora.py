"""LoRA of the LLaMA-3-8B shape on one GPU, compared with PEFT and transformers in one run.

    python bench/gpu_lora.py [--layers 32] [--rows 4] [--time 2048] [--targets all|qv] [--steps 10]
    python bench/gpu_lora.py --device cpu --dim 64 --layers 2 --time 32    (a smoke test)

Random frozen weights in bfloat16, adapters in float32, autocast, AdamW, the same batch of random
ids; activation checkpointing of every block in both. regard runs as `regard train` does, compiled;
the peer runs as PEFT's users do, with PyTorch's fused attention, and with --compile-peer compiled.
Prints tokens per second (the median step) and the peak memory of the steps. The two are timed one
after the other, regard first and, with --repeat, again.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from regard.data.batch import TextBatch
from regard.models.build import build_model, preset
from regard.tasks import Causal
from regard.training.fine_tuning import LoRA, cast_frozen_weights
from regard.training.loop import Objective, SingleProcess, train
from regard.training.optim import optimizers
from regard.training.setup.device import checkpoint_activations

Step = Callable[[], float]  # takes a step and returns its loss
TARGETS = {
    "all": (["*"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "qv": (["*.query", "*.value"], ["q_proj", "v_proj"]),
}


def regard_step(args: Any, ids: torch.Tensor) -> tuple[Step, int]:
    """A step of `training.loop.train`, as `regard train … train.tune.kind=lora` runs it."""
    sizes = {"ffn_dim": args.dim * 7 // 2} if args.dim != 4096 else {}
    config = preset("llama-3-8b", dim=args.dim, layers=args.layers, **sizes)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = build_model(config)
    torch.set_default_dtype(torch.float32)
    LoRA(rank=args.rank, alpha=2 * args.rank, targets=TARGETS[args.targets][0]).prepare(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    cast_frozen_weights(model, torch.bfloat16)
    checkpoint_activations(model)
    objective = Objective(model, Causal())
    strategy = SingleProcess(objective)
    if args.device == "cuda":
        strategy.compile()
    steps = train(
        objective,
        iter(lambda: TextBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), None),
        optimizers("adamw", model, 1e-4),
        lambda number: 1e-4,
        autocast=lambda: torch.autocast(args.device, torch.bfloat16),
        strategy=strategy,
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return lambda: float(next(steps).loss), trained


def peft_step(args: Any, ids: torch.Tensor) -> tuple[Step, int]:
    """The same with transformers and PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=args.dim,
        intermediate_size=args.dim * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        use_cache=False,
    )
    with torch.device(args.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=TARGETS[args.targets][1],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    run = torch.compile(model) if args.compile_peer else model
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> float:
        with torch.autocast(args.device, torch.bfloat16):
            # labels are shifted already, so that both predict the same tokens
            loss = run(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, sum(p.numel() for p in trained)


def measure(name: str, make: Callable[..., tuple[Step, int]], args: Any) -> tuple[float, float]:
    """Tokens per second and the peak memory in GB of the steps after the first ones."""
    cuda = args.device == "cuda"
    torch.manual_seed(1)
    ids = torch.randint(10, 128_256, (args.rows, args.time + 1), device=args.device)
    step, trained = make(args, ids)
    static = torch.cuda.memory_allocated() / 1e9 if cuda else 0.0
    began = time.perf_counter()
    first = step()
    for _ in range(args.warmup - 1):
        step()
    warm_up = time.perf_counter() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    last = first
    for _ in range(args.steps):
        began = time.perf_counter()
        last = step()  # reading the loss synchronizes
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    speed = args.rows * args.time / statistics.median(seconds)
    print(
        f"{name:<22}{speed:>10,.0f} tokens/s{peak:>9.2f} GB peak{static:>9.2f} GB weights"
        f"{trained:>14,} trained   loss {first:.4f} to {last:.4f}   warm-up {warm_up:.0f} s",
        flush=True,
    )
    del step
    gc.collect()
    torch._dynamo.reset()
    if cuda:
        torch.cuda.empty_cache()
    return speed, peak


def main() -> None:
    """Measure both and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--time", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=TARGETS, default="all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--compile-peer", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    print(f"LoRA rank {args.rank} on {args.targets}, {args.rows} x {args.time} tokens")
    peer = "PEFT, compiled" if args.compile_peer else "PEFT"
    for _ in range(args.repeat):
        speed, peak = measure("regard", regard_step, args)
        peer_speed, peer_peak = measure(peer, peft_step, args)
        print(f"regard / {peer}: speed {speed / peer_speed:.3f}", end="")
        print(f", memory {peak / peer_peak:.3f}" if peer_peak else "", flush=True)


if __name__ == "__main__":
    main()
