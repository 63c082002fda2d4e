"""`regard chat`; its dialogues are tested in tests/pipelines/test_dialogues.py."""

import sys

from regard.cli.chat import chat


def test_a_run_without_a_template_is_refused_before_any_message(regard, text_run, stdin):
    stdin(b"")
    refused = regard("chat", text_run)
    assert (refused.code, "has no chat template" in refused.err) == (2, True)


def test_control_characters_of_a_response_do_not_reach_a_terminal(capsys, monkeypatch, stdin):
    class Talker:
        def chat(self, history, **options):
            return iter(["\x1b[2J", "hello"])

        def limit_threads(self):
            pass

    monkeypatch.setattr("regard.api.load", lambda run, adapter: Talker())
    monkeypatch.setattr("regard.api.generation.require_template", lambda run: "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    stdin(b"hi\n")
    chat("run")
    assert capsys.readouterr().out == "[2Jhello\n"
