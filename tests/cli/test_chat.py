"""`regard chat`; its dialogues are tested in tests/pipelines/test_dialogues.py."""


def test_a_run_without_a_template_is_refused_before_any_message(regard, text_run, stdin):
    stdin(b"")
    refused = regard("chat", text_run)
    assert (refused.code, "has no chat template" in refused.err) == (2, True)
