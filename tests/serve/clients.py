"""Clients that were written for others' servers, unchanged: run by a Python that has them.

python clients.py openai|langchain|lm-eval ADDRESS [FOLDER]; prints one JSON object.
"""

import json
import sys
from pathlib import Path

TASK = """\
task: documents
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{first}}}}"
doc_to_target: "{{{{rest}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity}}]
"""


def use_openai(address):
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    given = {"model": "cats", "prompt": "the cat", "max_tokens": 20, "seed": 3}
    extra = {"extra_body": {"min_p": 0.1}}
    answer = client.completions.create(**given, **extra)
    pieces = client.completions.create(**given, **extra, stream=True)
    messages = [{"role": "user", "content": "the cat"}]
    chat = {"model": "cats", "messages": messages, "max_tokens": 20, "seed": 3}
    spoken = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
    deltas = client.chat.completions.create(**chat, stream=True)
    given = {"model": "cats", "input": "the cat", "max_output_tokens": 20}
    response = client.responses.create(**given, extra_body={"seed": 3})
    events = client.responses.create(**given, extra_body={"seed": 3}, stream=True)
    vector = client.embeddings.create(model="cats", input="the cat").data[0].embedding
    errors = []
    for wrong in ({"n": 99}, {"model": "nobody"}):
        try:
            client.completions.create(**{"model": "cats", "prompt": "a", **wrong})
        except openai.APIStatusError as error:
            errors.append([type(error).__name__, error.param, error.code])
    return {
        "models": [model.id for model in client.models.list()],
        "completion": answer.choices[0].text,
        "streamed": "".join(piece.choices[0].text for piece in pieces),
        "chat": spoken.choices[0].message.content,
        "logprobs": len(spoken.choices[0].logprobs.content),
        "used": spoken.usage.completion_tokens,
        "chat streamed": "".join(delta.choices[0].delta.content or "" for delta in deltas),
        "response": response.output_text,
        "response streamed": "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        ),
        "embedding": len(vector),
        "errors": errors,
    }


def use_langchain(address):
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    base = {"base_url": f"{address}/v1", "api_key": "any", "model": "cats"}
    chat = ChatOpenAI(**base, max_tokens=20, seed=3)
    embeddings = OpenAIEmbeddings(**base, check_embedding_ctx_length=False)
    return {
        "completion": OpenAI(**base, max_tokens=20, seed=3, temperature=0.5).invoke("the cat"),
        "chat": chat.invoke("the cat").content,
        "chat streamed": "".join(piece.content for piece in chat.stream("the cat")),
        "embedding": len(embeddings.embed_query("the cat")),
    }


def use_lm_eval(address, folder):
    import lm_eval

    (folder / "task.yaml").write_text(TASK.format(file=folder / "documents.jsonl"))
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{address}/v1/completions",
            "model": "cats",
            "tokenizer_backend": "remote",
            "max_length": 64,
            "num_concurrent": 4,
        },
        tasks=["documents"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder)),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["documents"], key=lambda sample: sample["doc_id"])
    return {"log_likelihoods": [float(sample["resps"][0][0][0]) for sample in samples]}


if __name__ == "__main__":
    name, address, *folder = sys.argv[1:]
    use = {"openai": use_openai, "langchain": use_langchain, "lm-eval": use_lm_eval}[name]
    sys.stdout.write("\n" + json.dumps(use(address, *map(Path, folder))) + "\n")
