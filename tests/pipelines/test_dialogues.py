"""Instruction data: reading, templates, the mask, packing, training and chat."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.data.dialogues import from_json, is_dialogues
from regard.errors import ConfigError, DataError
from regard.hub.chat_template_file import read_chat_template
from regard.models.build import build_model, preset
from regard.nn.loss import IGNORE_INDEX
from regard.pipelines import open_data, prepare_training
from regard.pipelines.dialogues import DialoguesPipeline, encode, format_loss_mask, pack
from regard.tasks import Instruct
from regard.text import train_tokenizer
from regard.text.chat_encoding import chat_prompt_ids
from regard.text.chat_template import render, split_responses, turn_end
from regard.training.storage.initial_weights import run_template
from regard.training.storage.run_folder import RunFolder

JINJA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
TALK = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]


def lines(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_every_form_of_a_dialogue_is_read(tmp_path):
    roles = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    data = from_json(
        lines(
            tmp_path / "all.jsonl",
            {"messages": [*roles, {"role": "assistant", "content": "a"}]},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {"prompt": "q", "answer": "a"},
            {"instruction": "q", "input": "i", "output": "a", "system": "s"},
        )
    )
    assert data.rows == [
        (("system", "s"), ("user", "q"), ("assistant", "a")),
        (("user", "q"), ("assistant", "a")),
        (("user", "q"), ("assistant", "a")),
        (("system", "s"), ("user", "q\ni"), ("assistant", "a")),
    ]
    assert data.description == (
        "dialogues, 4 lines of JSONL, 4 responses; messages=messages or conversations, "
        "prompt=prompt or instruction and input, response=answer or output"
    )
    assert is_dialogues(tmp_path / "all.jsonl")
    assert not is_dialogues(lines(tmp_path / "x.jsonl", {"question": "q", "answer": "a"}))
    assert not is_dialogues(lines(tmp_path / "x.jsonl", {"prompt": "q", "label": "a"}))
    preference = {"prompt": "q", "completion": "a", "label": False}
    assert not is_dialogues(lines(tmp_path / "x.jsonl", preference))
    instruction = {"instruction": "q", "output": "a", "category": "open"}
    assert is_dialogues(lines(tmp_path / "x.jsonl", instruction))


def test_keys_that_are_not_part_of_a_dialogue_are_named(tmp_path):
    row = {"instruction": "q", "context": "c", "response": "a", "category": "open"}
    data = from_json(lines(tmp_path / "x.jsonl", row, {**row, "id": 1}))
    assert data.description.endswith("; left out: context, category, id")


ALPACA = [
    {"instruction": "Add.", "input": "1 + 1", "output": "2"},
    {"instruction": "Say yes.", "input": "", "output": "yes"},
    {"instruction": "Say nothing.", "input": "", "output": ""},
]


@pytest.mark.parametrize("form", ["array", "indented", "lines"])
def test_alpaca_records_are_dialogues(tmp_path, form):
    path = tmp_path / ("alpaca.jsonl" if form == "lines" else "alpaca.json")
    indent = 2 if form == "indented" else None
    content = (
        "\n".join(map(json.dumps, ALPACA)) if form == "lines" else json.dumps(ALPACA, indent=indent)
    )
    path.write_text(content)
    for kind in (None, "dialogues"):
        data = open_data(str(path), kind=kind)
        assert data.rows == [
            (("user", "Add.\n1 + 1"), ("assistant", "2")),
            (("user", "Say yes."), ("assistant", "yes")),
        ]
        unit, place = (
            ("lines of JSONL", "line") if form == "lines" else ("objects of a JSON array", "row")
        )
        assert data.description == (
            f"dialogues, 2 {unit}, 2 responses; prompt=instruction and input, response=output; "
            f"skipped: 1 with an empty response (the first is {place} 3)"
        )
    assert open_data(str(path), kind="pairs").kind == "pairs"


def test_an_array_of_conversations_is_dialogues_and_an_error_names_the_row(tmp_path):
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "1", "conversations": talk}] * 2))
    data = open_data(str(path))
    assert data.rows == [(("user", "q"), ("assistant", "a"))] * 2
    assert data.description.endswith("2 responses; messages=conversations; left out: id")
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    with pytest.raises(DataError, match=r"sharegpt.json, row 2: the dialogue has no response"):
        open_data(str(path))
    path.write_text(json.dumps([{"text": "a b", "label": n % 2} for n in range(8)]))
    assert open_data(str(path)).kind == "labels"


def test_prompts_and_responses_are_dialogues_unless_another_task_is_chosen(tmp_path):
    rows = [{"prompt": f"the word {n}", "response": f"it is {n}"} for n in range(8)]
    path = str(lines(tmp_path / "x.jsonl", *rows))
    data = open_data(path)
    assert data.kind == "dialogues"
    assert data.rows[1] == (("user", "the word 1"), ("assistant", "it is 1"))
    assert open_data(path, kind="dialogues").rows == data.rows
    for options in ({"kind": "pairs"}, {"source": "prompt", "target": "response"}):
        pairs = open_data(path, **options)
        assert pairs.kind == "pairs"
        assert list(pairs.rows())[1] == ("the word 1", "it is 1")
    assert open_data(path, kind="text", columns={"text": "response"}).kind == "text"
    with pytest.raises(ConfigError, match=r"data.source names a column of a table"):
        open_data(path, "prompt", "response", kind="dialogues")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "q"}]}, "has no response"),
        ({"messages": [{"role": "bird", "content": "q"}]}, "not 'bird'"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of a message is a text, not 3"),
        ({"messages": []}, "messages is a list"),
        ({"prompt": "q", "reply": "a"}, "no response; an object is .* this one has prompt, reply"),
        ([1], "a dialogue is an object"),
    ],
)
def test_an_error_names_the_file_and_the_line(row, message, tmp_path):
    path = lines(tmp_path / "bad.jsonl", {"prompt": "q", "answer": "a"}, row)
    with pytest.raises(DataError, match=message) as raised:
        from_json(path)
    assert f"{path}, line 2: " in str(raised.value)


def test_templates_give_the_answers_with_the_end_of_their_turn():
    assert split_responses("chatml", TALK)[2:] == [
        ("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", False),
        ("d<|im_end|>\n", True),
    ]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert split_responses(JINJA, TALK, tokens) == [
        ("<s>[INST] a [/INST]", False),
        (" b</s>", True),
        ("[INST] c [/INST]", False),
        (" d</s>", True),
    ]
    assert (turn_end("chatml"), turn_end(JINJA, tokens)) == ("<|im_end|>\n", "</s>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "refuses a dialogue: access to attribute '__class__'"),
        ("{{ raise_exception('no system') }}", "refuses a dialogue: no system"),
        (
            "{% for i in range(100000) %}{% for j in range(99999) %}xx{% endfor %}{% endfor %}",
            "^the chat template writes more",
        ),
        ("{{ messages | length }}{{ messages[-1].content }}", "changes the beginning"),
        ("{{ unclosed", "refuses a dialogue"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes"),
        ("{{ 9 ** (9 ** 9) }}", r"^the chat template takes more than 0\.3 seconds"),
        ("{{ ('x' * 10 ** 10) | length }}", "^the chat template needs more than 500 MB"),
        ("{{ '%9999999999d' % 1 }}", "needs more than 500 MB"),
        ("{{ 'x'.ljust(10 ** 10) }}", "needs more than 500 MB"),
        ("{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    ],
)
def test_a_template_runs_in_a_sandbox(template, message, monkeypatch):
    render(JINJA, TALK)  # the process has started
    if "takes" in message:
        monkeypatch.setattr("regard.text.chat_template.MAX_SECONDS", 0.3)
    with pytest.raises((DataError, ConfigError), match=message):
        split_responses(template, TALK)
    assert render(JINJA, TALK)


def test_the_template_of_a_tokenizer_is_found(tmp_path):
    assert read_chat_template(tmp_path) is None
    table = {
        "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(table))
    assert read_chat_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat_template(tmp_path) == "file"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Dialogues in which the answer is the question in capitals, and a run on them."""
    folder = tmp_path_factory.mktemp("dialogues")
    words = [a + b for a in "abcdef" for b in "ghijk"]
    rows = [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w.upper()}]}
        for w in words
    ]
    lines(folder / "talk.jsonl", *rows)
    model = {"preset": "tiny-decoder", "dim": 16, "layers": 1, "heads": 2, "context": 256}
    events = []
    options = {"tokenizer": "char", "steps": 3, "batch": 4, "quiet": True}
    run = regard.train(
        folder / "talk.jsonl", model=model, out=folder / "run", on_event=events.append, **options
    )
    return folder, run, events[0].description


def test_the_mask_is_shown_and_the_answers_alone_are_scored(world, capsys):
    folder, run, description = world
    assert any(
        line.startswith("loss mask ") and "assistant⏎⟦AG<|im_end|>⏎⟧" in line
        for line in description
    )
    with pytest.raises(SystemExit):
        main(["train", str(folder / "talk.jsonl"), "--dry-run", "--out", str(folder / "never")])
    assert "⟦AG<|im_end|>⏎⟧" in capsys.readouterr().out
    config = regard.load(folder / "run").config
    data = prepare_training(config, run.tokenizers)
    batch = data.batch(0)
    scored = batch.targets[batch.targets != IGNORE_INDEX].tolist()
    text = run.tokenizer.decode(scored)
    assert "<|im_start|>" not in text.replace("<|im_end|>", "")
    assert text.count("<|im_end|>") == int(batch.documents.max(1).values.sum())
    assert int(batch.documents.max()) > 1  # several dialogues share a row


def test_a_template_may_add_to_the_text_of_a_special_token():
    tokenizer = train_tokenizer("char", ["abcd ![]/INST"])
    task = Instruct(chat_template=JINJA.replace("{{ bos_token }}", "{{ bos_token + '!' }}"))
    start = tokenizer.piece(tokenizer.bos_id)
    assert format_loss_mask(task, tokenizer, TALK).startswith(f"{start}![INST] a [/INST]⟦ b")
    assert format_loss_mask(task, None, TALK).startswith("![INST] a [/INST]⟦ b⟧")


def test_the_mask_shows_the_ids_that_the_model_reads():
    for kind in ("char", "word", {"kind": "bpe", "vocab_size": 300}):
        tokenizer = train_tokenizer(kind, [render("chatml", TALK)])
        assert format_loss_mask(Instruct(), tokenizer, TALK).startswith(
            "<|im_start|>user⏎a<|im_end|>⏎" if kind != "word" else "<|im_start|>user"
        )
    tokenizer = train_tokenizer("char", ["abcd user"])
    assert format_loss_mask(Instruct(chat_template=JINJA), tokenizer, TALK[:2]) == (
        "<start><unk><unk><unk><unk><unk><unk> a <unk><unk><unk><unk><unk><unk><unk>⟦ b<stop>⟧"
    )


def test_unknown_tokens_are_counted_and_an_unknown_template_is_refused(world, capsys):
    folder, _, _ = world
    text = folder / "small.txt"
    text.write_text("abcdefghijk ABCDEFGHIJ " * 40)
    model = {"preset": "tiny-decoder", "dim": 8, "layers": 1, "heads": 2, "context": 64}
    options = {"steps": 1, "batch": 2, "quiet": True}
    base = folder / "characters"
    regard.train(text, tokenizer="char", model=model, out=base, **options)
    arguments = ["train", str(folder / "talk.jsonl"), f"train.start={base}", "train.steps=1"]
    for more in (["--out", str(folder / "refused")], ["--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *more])
        assert ended.value.code == 2
        message = capsys.readouterr().err
        assert "the chat template has '<', '|', 'm', '_', 's', 't', 'r', '>'" in message
    template = message.partition("'task.chat_template=")[2].partition("'")[0]
    assert "<sep>" in template
    events = []
    run = regard.train(
        folder / "talk.jsonl",
        f"task.chat_template={template}",
        out=folder / "separated",
        train={"start": str(base)},
        on_event=events.append,
        **options,
    )
    description = events[0].description
    (line,) = (line for line in description if line.startswith("unknown "))
    assert "tokens for training and" in line  # K
    assert "loss mask  ag<sep>⟦AG<sep>⟧" in description
    assert "".join(run.chat("ag", max_new_tokens=3, seed=1)) is not None


def test_a_run_with_an_unknown_template_of_an_earlier_version_is_resumed(world, monkeypatch):
    folder, _, _ = world
    text = folder / "few.txt"
    text.write_text("abcdefghijk ABCDEFGHIJ " * 40)
    model = {"preset": "tiny-decoder", "dim": 8, "layers": 1, "heads": 2, "context": 64}
    options = {"batch": 2, "quiet": True}
    base = regard.train(text, tokenizer="char", model=model, out=folder / "old", steps=1, **options)
    with monkeypatch.context() as patch:
        patch.setattr(DialoguesPipeline, "check_tokenizers", lambda *_: None)
        start = {"start": str(base.folder.path)}
        run = regard.train(
            folder / "talk.jsonl", out=folder / "older", train=start, steps=1, **options
        )
    resumed = regard.resume(run.folder.path, "train.steps=2", quiet=True)
    assert resumed.config.train.steps == 2


def test_a_template_may_write_nothing_after_an_answer_but_not_change_what_was_read(world):
    _, run, _ = world
    data = prepare_training(run.config, run.tokenizers)
    endless = replace(data, task=Instruct(chat_template=JINJA.replace("{{ eos_token }}", "")))
    assert "= " in DialoguesPipeline().sample(endless, run.model, 1)
    last = "{% if messages[-1]['role'] == 'user' and messages | length > 2 %}!{% endif %}"
    with pytest.raises(ConfigError, match="changes the beginning"):
        encode(Instruct(chat_template=last + JINJA), run.tokenizer, TALK)
    assert chat_prompt_ids(run.tokenizer, last + JINJA, TALK[:3])  # to answer is possible


def test_packed_dialogues_have_the_loss_of_single_ones():
    """No token attends to another dialogue, and positions begin at 0 in each."""
    tokenizer = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz<|>_/\n"])
    task = Instruct()
    config = preset(
        "tiny-decoder", vocab_size=tokenizer.vocab_size, dim=16, layers=2, heads=2, context=300
    )
    model = build_model(config).eval()
    rows = [TALK, [("user", "xyz"), ("assistant", "z")], [("user", "m"), ("assistant", "no")]]
    data = from_rows(rows)
    together = pack(data, task, tokenizer, config)
    assert len(together.rows) == 1
    encoded = [encode(task, tokenizer, row) for row in rows]
    batch = task.collate((together.rows, 300), torch.Generator())
    single = sum(
        task.loss(model, task.collate(([[one]], 300), torch.Generator())) for one in encoded
    )
    torch.testing.assert_close(task.loss(model, batch), single, rtol=1e-5, atol=1e-4)
    assert task.count(batch) == sum(scored.sum() for _, scored in encoded)
    ids, scored = encoded[0]
    last = int(np.flatnonzero(~scored)[-1]) + 1
    assert chat_prompt_ids(tokenizer, task.chat_template, TALK[:3]) == ids[:last].tolist()
    lengths = [len(ids) for ids, _ in encoded]
    short = preset("tiny-decoder", vocab_size=9, context=min(lengths))
    long = from_rows([*rows, [("user", "a" * 300), ("assistant", "b")]])
    packed = pack(long, task, tokenizer, short)
    assert (packed.truncated, packed.dropped) == (sum(n > min(lengths) + 1 for n in lengths), 1)
    assert 0.9 < packed.fill_ratio(min(lengths)) <= 1
    with pytest.raises(DataError, match="no prompt leaves room"):
        pack(data, task, tokenizer, preset("tiny-decoder", vocab_size=9, context=8))


def from_rows(rows):
    from regard.data.dialogues import Dialogues

    return Dialogues("talk", "dialogues", [tuple(row) for row in rows])


def test_chat_remembers_the_dialogue_and_works_through_a_pipe(world, capsys, monkeypatch):
    folder, run, _ = world
    seen = []
    monkeypatch.setattr(
        "regard.api.generation.stream",
        lambda model, ids, chain, **options: seen.append(ids) or iter([]),
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ag\n\nbh\n/new\nci\n")))
    with pytest.raises(SystemExit) as ended:
        main(["chat", str(folder / "run"), "--seed", "1"])
    assert not ended.value.code
    texts = [run.tokenizer.decode(ids) for ids in seen]
    assert [text.count("<|im_start|>user") for text in texts] == [1, 2, 1]
    answer = "".join(run.chat("ag", max_new_tokens=9, seed=1))
    assert answer == ""  # of the replaced stream
    long = [("user", "a" * 30), ("assistant", "b" * 30)] * 3 + [("user", "cg")]
    list(run.chat(long, max_new_tokens=20))
    assert len(seen[-1]) <= 256 - 20
    assert run.tokenizer.decode(seen[-1]).endswith("cg<|im_end|>\n<|im_start|>assistant\n")
    list(run.chat("a" * 170))  # less than a quarter of the context is left, but some of it
    assert 256 * 3 / 4 < len(seen[-1]) < 256
    with pytest.raises(ConfigError, match="no room for a response"):
        run.chat("a" * 230)
    for wrong in ([], ["ag"], [("user", "ag", "x")]):
        with pytest.raises(ConfigError, match=r"pair of a role and a text|no message"):
            run.chat(wrong)
    assert render("chatml", [("user", "x")]).endswith("<|im_end|>\n")


def test_a_special_token_at_the_end_of_a_turn_stops_the_answer(world, monkeypatch):
    """Special ids are not decoded, so that their text is never found in an answer."""
    _, run, _ = world
    tokenizer, stops = run.tokenizer, []
    special = next(id for id in tokenizer.special_ids if id not in tokenizer.stop_ids)
    template = JINJA.replace("{{ eos_token }}", tokenizer.piece(special))
    monkeypatch.setattr("regard.api.generation.run_template", lambda *_: template)
    monkeypatch.setattr(
        "regard.api.generation.stream", lambda *_, stop, **options: stops.append(stop) or iter([])
    )
    list(run.chat("ag", max_new_tokens=3))
    assert stops == [{*tokenizer.stop_ids, special}]
    pytest.importorskip("fastapi")
    from regard.serve.engine_request import chat_prompt, prepare
    from regard.serve.schema import Sampling

    monkeypatch.setattr("regard.serve.engine_request.run_template", lambda *_: template)
    engine = SimpleNamespace(language=SimpleNamespace(vocab_size=tokenizer.vocab_size))
    served = SimpleNamespace(
        run=run,
        tokenizer=tokenizer,
        engine=engine,
        takes_source=False,
        context=None,
        chain=lambda *_: None,
    )
    monkeypatch.setattr(type(run), "_normalize", lambda _, text: text.lower())
    prompt, ends = chat_prompt(served, [("user", "AG")])
    body = Sampling(model="m")
    ready = prepare(served, prompt, body, max_new_tokens=3, n=1, logprobs=None, stop_strings=ends)
    assert ready.request.stop == {*tokenizer.stop_ids, special}
    assert ready.request.prompt == chat_prompt_ids(tokenizer, template, [("user", "ag")])


def test_an_adapter_of_dialogues_brings_its_template_and_needs_the_tokenizer_of_its_base(world):
    folder, _, _ = world
    (folder / "plain.txt").write_text((folder / "talk.jsonl").read_text() + "<|im_start|>\n" * 9)
    model = {"preset": "tiny-decoder", "dim": 8, "layers": 1, "heads": 2, "context": 64}
    options = {"steps": 1, "batch": 2, "quiet": True}
    base, adapter = folder / "base", folder / "adapter"
    regard.train(folder / "plain.txt", tokenizer="char", model=model, out=base, **options)
    settings = {"start": str(base), "tune": {"kind": "lora", "rank": 1}}
    regard.train(folder / "talk.jsonl", out=adapter, train=settings, **options)
    assert run_template(RunFolder(base), regard.load(base).config) is None
    adapted = regard.load(base, adapter=adapter)
    assert run_template(adapted.folder, adapted.config) == "chatml"
    assert "chat" in adapted.methods
    regard.merge(base, folder / "whole", adapter=adapter)
    assert "chat" in regard.load(folder / "whole").methods
    with pytest.raises(ConfigError, match=r"base, whose tokenizer is not that of .*run;"):
        regard.load(folder / "run", adapter=adapter)
