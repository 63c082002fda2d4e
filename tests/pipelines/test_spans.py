"""Runs on questions with answer spans: detection, windows, scores, predictions, refusals."""

import json

import numpy as np
import pytest
import torch

import regard
from cli.commands import command
from regard.config import RunConfig, build
from regard.data.spans import Question
from regard.errors import ConfigError, DataError
from regard.models.build import resolve
from regard.pipelines import open_data, prepare_training
from regard.pipelines.spans import SpanWindows
from regard.tasks.span import Span, score_answers
from regard.text import train_tokenizer

NAMES, TOWNS = ["ada", "bob", "eve", "kim", "lee"], ["rome", "paris", "lima", "oslo", "cairo"]
YEARS = ["1801", "1815", "1843", "1852"]
WARMUP = "train.schedule={kind='linear',warmup=5}"
TINY = ("model.dim=32", "model.layers=2", "model.heads=2", "model.context=40", "model.dropout=0")


def towns(count):
    """A paragraph each: who was where, and sometimes when; a question may have no answer."""
    paragraphs = []
    for n in range(count):
        name, town, year = NAMES[n % 5], TOWNS[n // 5 % 5], YEARS[n // 3 % 4]
        context = f"{name} was in {town} {'in ' + year if n % 3 else 'once'} ."
        qas = []
        for kind, answer in (("who", name), ("where", town), ("when", year if n % 3 else "")):
            qas.append({"id": f"{n}-{kind}", "question": f"{kind} ?", "answers": []})
            if answer:
                start = context.index(answer)
                qas[-1]["answers"].append({"text": answer, "answer_start": start})
        qas[-1]["is_impossible"] = not n % 3
        paragraphs.append({"context": context, "qas": qas})
    return {"version": "v2.0", "data": [{"title": "towns", "paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spans")
    (folder / "towns.json").write_text(json.dumps(towns(100)))
    settings = ("train.steps=150", "train.batch=32", "train.lr=3e-3", "data.tokenizer=word", WARMUP)
    return regard.train(str(folder / "towns.json"), *TINY, *settings, out=folder / "run")


def test_a_file_of_squad_is_learned_and_answers_are_predicted(run, tmp_path, capsys):
    metrics = run.evaluate()
    assert metrics["f1"] > 0.9
    assert {"exact_match", "f1_answerable", "exact_match_unanswerable"} <= set(metrics)
    assert run.metrics["f1"] == pytest.approx(metrics["f1"])
    context = "bob was in lima in 1852 ."
    ((best, second),) = run.predict(("where ?", context), top=2)
    assert best[0] == "lima"
    assert 0.5 < best[1] <= 1
    assert second[1] <= best[1]
    ((none,),) = run.predict(("when ?", "eve was in rome once ."), top=1)
    assert none[0] == ""
    folder = str(run.folder.path)
    assert command("predict", folder, "who ?", context, "-n", "1") == 0
    assert "bob" in capsys.readouterr().out
    pairs = ("where ?", context, "where ?", "eve was in rome once .")
    assert command("predict", folder, *pairs, "-n", "1", "--json") == 0
    answers = json.loads(capsys.readouterr().out)
    assert [(row["context"], row["prediction"]) for row in answers] == [
        (context, "lima"),
        (pairs[3], "rome"),
    ]
    assert command("predict", folder, "who ?", "bob", "where ?", context, "-n", "4") == 0
    short, long = capsys.readouterr().out.splitlines()  # a context of one word has fewer answers
    assert short.startswith("who ? | bob")
    assert len(short.split("%")) < len(long.split("%"))
    assert command("predict", folder, "who ?") == 2
    assert "give 2 texts per input (given: 1)" in capsys.readouterr().err
    table = tmp_path / "new.csv"
    rows = [f"{kind},{kind} ?,{context}\n" for kind in ("who", "when")]
    table.write_text("".join(["n,question,context\n", *rows]))
    rows = list(run.predict_file(table))
    assert [row["prediction"] for row in rows] == ["bob", "1852"]
    squad = run.predict_file(run.config.data.path)
    assert next(squad)["id"] == "0-who"
    with pytest.raises(ConfigError, match="a question and a text"):
        run.predict("where ?")
    with pytest.raises(ConfigError, match="give an input to predict from: question and context"):
        run.predict()
    (attention,) = run.explain(("where ?", context)).values()
    assert attention.rows[:4] == ["<cls>", "where", "?", "<sep>"]


def test_windows_hold_every_token_and_the_answer_where_it_is():
    context = " ".join(f"w{n}" for n in range(30))
    rows = [
        Question("0", "where is w20 ?", context, (("w20 w21", context.index("w20")),)),
        Question("1", "where ?", "w1 w2", ()),
    ]
    tokenizer = train_tokenizer("word", [context, "where is w20 ?"])
    model = resolve({"preset": "tiny-encoder", "segments": 2}, vocab_size=99, context=20)
    encoded = SpanWindows.encode(Span(stride=5), rows, tokenizer, model)
    (batch,) = encoded.batches(np.arange(len(encoded.store)))
    seen, answers = set(), []
    for row, window in enumerate(batch.window_indices.tolist()):
        begin, end = batch.context[row].tolist()
        assert batch.segments[row].tolist()[:begin] == [0] * begin
        assert all(batch.segments[row, begin : int(batch.lengths[row])])
        first, last = batch.targets[row].tolist()
        if encoded.windows.question_index[window] == 0:
            seen |= set(encoded.windows.text(window, begin, end - 1).split())
            answers += [encoded.windows.text(window, first, last)] if last else []
        else:
            assert (first, last) == (0, 0)
    assert seen == set(context.split())
    assert len(answers) > 1
    assert {*answers} == {"w20 w21"}


def test_the_best_span_is_that_of_all_windows_by_a_loop():
    rows = [Question(str(n), "who ?", f"a{n} b c d e f g h", ()) for n in range(3)]
    tokenizer = train_tokenizer("word", [row.context for row in rows])
    model = resolve({"preset": "tiny-encoder"}, vocab_size=99, context=9)
    task = Span(stride=2, max_answer_length=3, no_answer=True)
    encoded = SpanWindows.encode(task, rows, tokenizer, model)
    batches = list(encoded.batches(np.arange(len(encoded.store))))
    scored = [(batch, torch.randn(*batch.ids.shape, 2)) for batch in batches]
    best = encoded.task.best_answers(scored, top=3)
    for number, row in enumerate(rows):
        spans, nulls = {}, []
        for batch, logits in scored:
            for place, window in enumerate(batch.window_indices.tolist()):
                if encoded.windows.question_index[window] != number:
                    continue
                (begin, end), (s, e) = batch.context[place].tolist(), logits[place].double().T
                nulls.append(float(s[0] + e[0]))
                for i in range(begin, end):
                    for j in range(i, min(i + 3, end)):
                        text = encoded.windows.text(window, i, j)
                        spans.setdefault(text, []).append(float(s[i] + e[j]))
        total = np.exp([min(nulls), *(v for values in spans.values() for v in values)]).sum()
        expected = {text: np.exp(max(values)) / total for text, values in spans.items()}
        predicted = dict(best[number])
        null = predicted.pop("", None)
        assert null is None or null == pytest.approx(np.exp(min(nulls)) / total, rel=1e-4)
        for text, probability in predicted.items():
            assert probability == pytest.approx(expected[text], rel=1e-4), row
        assert next(iter(predicted)) == max(expected, key=expected.get)


def test_scores_are_those_of_the_official_scorer():
    # Computed with SQuAD's evaluate-v2.0.py on these answers and predictions.
    answers = {
        "a": ["the Duchy of Normandy", "Normandy"],
        "b": ["1066"],
        "c": [],
        "d": ["Denver Broncos"],
        "e": ["a"],
        "f": [],
        "g": ["François–Noël", "the cat's tail"],
    }
    predictions = {
        "a": "duchy of  Normandy!",
        "b": "in the year 1066",
        "c": "",
        "d": "the Broncos of Denver, Colorado",
        "e": "an",
        "f": "something",
        "g": "cats' tail, a",
    }
    questions = [
        Question(id, "?", "", tuple((text, 0) for text in texts)) for id, texts in answers.items()
    ]
    scores = score_answers(questions, predictions)
    assert scores == pytest.approx(
        {
            "exact_match": 4 / 7,
            "f1": (1 + 0.5 + 1 + 2 / 3 + 1 + 0 + 1) / 7,
            "exact_match_answerable": 3 / 5,
            "f1_answerable": (1 + 0.5 + 2 / 3 + 1 + 1) / 5,
            "exact_match_unanswerable": 0.5,
            "f1_unanswerable": 0.5,
        }
    )


def test_a_context_without_tokens_has_no_answer(monkeypatch):
    rows = [Question("0", "who ?", " ", ()), Question("1", "who ?", "ada", (("ada", 0),))]
    tokenizer = train_tokenizer("word", ["who ? ada"])
    model = resolve({"preset": "tiny-encoder"}, vocab_size=99, context=9)
    encoded = SpanWindows.encode(Span(no_answer=False), rows, tokenizer, model)
    monkeypatch.setattr(Span, "logits", lambda self, model, batch: torch.zeros(*batch.ids.shape, 2))
    metrics = encoded.task.metrics(torch.nn.Identity(), encoded.batches(np.arange(2)))
    assert metrics["exact_match"] == 1


def test_tables_of_questions_are_spans(tmp_path):
    rows = [
        {"id": str(n), "question": "who?", "context": f"{n} Ada", "answers": answers}
        for n, answers in enumerate(
            [{"text": ["Ada"], "answer_start": [2]}, {"text": [], "answer_start": []}]
        )
    ]
    (tmp_path / "hf.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_data(str(tmp_path / "hf.jsonl"))
    assert data.kind == "spans"
    assert [row.answers for row in data.rows] == [(("Ada", 2),), ()]
    (tmp_path / "plain.csv").write_text("question,context,answer\nwho,it was Ada,Ada\nwho,it is,\n")
    assert [row.answers for row in open_data(str(tmp_path / "plain.csv")).rows] == [
        (("Ada", 7),),
        (),
    ]


def broken(change):
    content = towns(3)
    change(content["data"][0]["paragraphs"][1])
    return content


def _lost(paragraph):
    paragraph["qas"][1]["answers"][0]["text"] = "atlantis"


def _no_question(paragraph):
    paragraph["qas"][0]["question"] = " "


def _start(paragraph):
    paragraph["qas"][0]["answers"][0]["answer_start"] = "x"


def _empty(paragraph):
    paragraph["qas"][0]["answers"][0]["text"] = ""


def _repeated(paragraph):
    paragraph["qas"][2]["id"] = "0-who"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _lost,
            r"paragraph 2, question 2 \(line 1, id 1-where\): the answer 'atlantis' is not in its",
        ),
        (_no_question, r"paragraph 2, question 1 \(line 1, id 1-who\) has no question"),
        (_start, "question 1 .*answer_start must be an integer, not 'x'"),
        (_empty, "question 1 .*an answer must be a text"),
        (_repeated, "paragraph 2, question 3 .*has the id '0-who' of article 1, paragraph 1, qu"),
        (lambda paragraph: paragraph.pop("qas"), "article 1, paragraph 2 has no list 'qas'"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path, change, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(broken(change)))
    with pytest.raises(DataError, match=message):
        open_data(str(path))


@pytest.mark.parametrize("ascii", [True, False])
def test_a_question_is_found_by_the_line_of_its_id(tmp_path, ascii):
    content = broken(_lost)
    content["data"][0]["paragraphs"][1]["qas"][1]["id"] = "où"
    path = tmp_path / "lines.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=ascii), encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if "o\\u00f9" in text or "où" in text)
    with pytest.raises(DataError, match=rf"question 2 \(line {line}, id où\): the answer"):
        open_data(str(path))


def test_a_wrong_start_is_corrected_and_said(tmp_path):
    content = towns(2)
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 1
    path = tmp_path / "moved.json"
    path.write_text(json.dumps(content))
    data = open_data(str(path))
    assert "1 answer is not where answer_start says" in data.description
    assert "paragraph 1, question 1" in data.description
    assert data.rows[0].context[data.rows[0].answers[0][1] :].startswith(data.rows[0].answers[0][0])


def test_whether_a_question_may_have_no_answer_is_told_by_the_training_data(tmp_path):
    content = towns(20)
    (tmp_path / "unanswered.json").write_text(json.dumps(content))
    for paragraph in content["data"][0]["paragraphs"]:
        paragraph["qas"] = paragraph["qas"][:2]
    (tmp_path / "answered.json").write_text(json.dumps(content))
    paths = {name: str(tmp_path / f"{name}.json") for name in ("answered", "unanswered")}
    for train, validation in (paths, reversed(paths)):
        data = {"path": paths[train], "validation": [paths[validation]], "tokenizer": "word"}
        model = {"preset": "tiny-encoder", "context": 40}
        table = {"name": "x", "task": "span", "data": data, "model": model}
        prepared = prepare_training(build(RunConfig, table))
        assert prepared.task.no_answer is (train == "unanswered")


def test_a_causal_model_is_refused(tmp_path):
    path = tmp_path / "towns.json"
    path.write_text(json.dumps(towns(5)))
    table = {"name": "x", "task": "span", "data": {"path": str(path)}}
    config = build(RunConfig, {**table, "model": {"preset": "tiny-decoder"}})
    with pytest.raises(ConfigError, match="needs a model of architecture 'encoder'"):
        prepare_training(config)


@pytest.mark.parametrize(
    ("null", "threshold", "texts"),
    [
        (5.0, 0.0, ["", "a", "b", "c"]),
        (2.5, 0.0, ["a", "", "b", "c"]),
        (1.5, 0.0, ["a", "b", "", "c"]),
        (0.0, 0.0, ["a", "b", "c", ""]),
        (5.0, 3.0, ["a", "", "b", "c"]),
    ],
)
def test_no_answer_is_ranked_by_its_score(null, threshold, texts):
    task = Span(no_answer=True, no_answer_threshold=threshold)
    ranked = task._rank({"b": 2.0, "a": 3.0, "c": 1.0}, [3.5], null)
    assert [text for text, _ in ranked] == texts


def test_windows_advance_even_where_the_context_has_room_for_two_tokens():
    tokenizer = train_tokenizer("word", ["who did it ada did it"])
    question = Question("1", "who", "ada did it", ((("ada"), 0),))
    for context, windows in ((5, 3), (6, 2)):
        model = resolve(
            {"preset": "tiny-encoder", "context": context, "head": "span"},
            vocab_size=tokenizer.vocab_size,
        )
        assert len(SpanWindows.encode(Span(), [question], tokenizer, model).store) == windows


def test_an_answer_that_is_a_number_is_refused(tmp_path):
    path = tmp_path / "number.jsonl"
    row = {"question": "when?", "context": "in 1801", "answer": 1801, "answer_start": 3}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="an answer must be a text"):
        open_data(str(path), kind="spans")
