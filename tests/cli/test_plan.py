"""`regard plan`: what fits, how to shard it, how long it takes, and what that rests on."""

import json

import pytest

import regard
from regard.errors import ConfigError


def test_a_plan_shows_memory_speed_and_assumptions(regard):
    completed = regard("plan", "llama-7b", "--gpus", 8, "--memory", 80)
    assert (completed.code, completed.err) == (0, "")
    for title in ("memory per GPU", "training", "best", "generation", "assumptions"):
        assert f"\n{title}" in completed.out
    assert "FSDP: 5 sequences per GPU" in completed.out
    assert "host memory: 215.6 GB per machine" in completed.out  # 8 ranks, 4 bytes a parameter
    assert "20 per parameter (Chinchilla)" in completed.out
    assert max(map(len, completed.out.splitlines())) <= 80


@pytest.mark.parametrize("words", [["gpt2"], ["vit-b16", "--gpus", 4], ["t5-small", "--gpus", 99]])
def test_every_kind_is_planned_in_eighty_columns(regard, words):
    completed = regard("plan", *words)
    assert completed.code == 0
    assert max(map(len, completed.out.splitlines())) <= 80


def test_activation_checkpointing_is_named_in_full_on_several_lines(regard):
    lines = regard("plan", "llama-7b", "--gpus", 2).out.splitlines()
    assert "  FSDP + activation checkpointing: 11 sequences per GPU and 45.1 k tokens per" in lines
    assert "  FSDP + activation" in lines
    assert max(len(line) for line in lines if "torchrun" not in line) <= 80  # a command is one line


def test_every_assumption_can_be_changed(regard):
    words = [
        "--gpu-type",
        "a100",
        "--memory",
        40,
        "--peak",
        100,
        "--utilization",
        0.5,
        "--link",
        10,
    ]
    output = json.loads(
        regard("plan", "gpt2", *words, "--gpus", 2, "--tokens", "1e9", "--json").out
    )
    assert output["host_bytes"] == 2 * 4 * output["parameters"]
    assert output["cluster"]["memory"] == 40e9
    assert output["cluster"]["peak"] == 100e12
    assert output["cluster"]["utilization"] == 0.5
    assert output["cluster"]["link"] == 10e9
    assert output["tokens"] == 1e9
    plan = next(plan for plan in output["plans"] if plan["name"] == output["best"])
    assert plan["days"] == pytest.approx(1e9 / plan["tokens_per_second"] / 86_400)
    assert plan["tokens_per_second_per_gpu"] == plan["tokens_per_second"] / 2


def test_settings_and_rows_change_the_plan(regard):
    plain, changed = (
        json.loads(regard("plan", "gpt2", *words, "--json").out)
        for words in ([], ["model.context=2048", "--sequences", 4])
    )
    assert (plain["context"], changed["context"]) == (1024, 2048)
    assert changed["plans"][0]["sequences"] == 4
    assert plain["plans"][0]["sequences"] > 100


def test_a_run_can_be_planned(regard, text_run):
    assert regard("plan", text_run).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gtp2"], "did you mean 'gpt2'"),
        (["gpt2", "--gpus", 0], "gpus=0 must be a number above 0"),
        (["gpt2", "--memory", "nan"], "memory=nan must be a number above 0"),
        (["gpt2", "--peak", "inf"], "peak=inf must be a number above 0"),
        (["gpt2", "--tokens", "inf"], "tokens=inf must be a number above 0"),
        (["gpt2", "--gpu-type", "h1000"], "did you mean 'h100'"),
        (["gpt2", "--tokens", -1], "tokens=-1"),
        (["gpt2", "--sequences", 10**6], "at most"),
        (["ngram"], "FLOPs determine the time of a step"),
        (["llama-65b", "--gpus", 4, "--memory", 240], "it fits on 11 GPUs"),
        (["llama-65b", "--gpus", 64], "and gathers 130.6 GB of weights for an evaluation"),
        (["llama-65b"], "a sequence of 2,048 tokens"),
        (["llama-3.1-8b", "--gpus", 64], "smaller model.context"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(regard, words, message):
    completed = regard("plan", *words)
    assert (completed.code, completed.out) == (2, "")
    assert message in completed.err
    assert len(completed.err.splitlines()) <= 5


def test_the_number_of_gpus_is_an_integer():
    with pytest.raises(ConfigError, match=r"gpus=1\.5 must be an integer"):
        regard.plan("gpt2", gpus=1.5)
