"""Dialogues of JSON files: keys beside the messages."""

import json

from regard.data.dialogues import from_json

TALK = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
ROWS = (("user", "q"), ("assistant", "a"))


def test_a_system_prompt_beside_the_messages_is_their_first(tmp_path):
    path = tmp_path / "sharegpt.json"
    own = {"from": "system", "value": "Be brief."}
    for talk, system in (
        (TALK, "Be brief."),
        ([own, *TALK], "Be brief."),  # twice the same
        ([own, *TALK], ""),
    ):
        path.write_text(json.dumps([{"conversations": talk, "system": system}]))
        assert from_json(path).rows == [(("system", "Be brief."), *ROWS)]


def test_keys_beside_the_messages_are_left_out_although_they_are_those_of_a_prompt(tmp_path):
    path = tmp_path / "ultrachat.json"
    path.write_text(json.dumps([{"prompt": "q", "input": "i", "messages": TALK}]))
    data = from_json(path)
    assert data.rows == [ROWS]
    assert data.description.endswith("1 responses; left out: prompt, input")


def test_a_key_whose_value_is_null_is_as_if_it_were_missing(tmp_path):
    path = tmp_path / "nulls.jsonl"
    for talk in (
        {"messages": None, "conversations": TALK},
        {"messages": None, "prompt": None, "instruction": "q", "answer": None, "response": "a"},
    ):
        path.write_text(json.dumps(talk))
        assert from_json(path).rows == [ROWS]
