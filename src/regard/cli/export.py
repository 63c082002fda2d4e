"""`regard export`."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from regard import api
from regard.cli.arguments import Folder, Json
from regard.cli.output import print_json, spinner


def export(
    run: Folder,
    folder: Annotated[
        Path,
        Argument(
            metavar="FOLDER",
            help="The folder to write; it must not exist.",
            show_default=False,
        ),
    ],
    model_type: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The model_type of transformers, such as llama; by default the first that "
            "supports the settings of the model.",
        ),
    ] = None,
    format: Annotated[
        Literal["transformers", "onnx", "gguf"],
        Option(
            help="transformers: config.json and safetensors; onnx: model.onnx; gguf: model.gguf "
            "for llama.cpp and Ollama."
        ),
    ] = "transformers",
    type: Annotated[
        Literal["f32", "f16", "q8_0", "q4_k"] | None,
        Option(help="Type of the weights of a GGUF file; by default f32.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a run for transformers, ONNX Runtime or llama.cpp.

    \b
    regard export runs/my exported/my
    regard export runs/my exported/my --model-type mistral
    regard export runs/my exported/my --format onnx
    regard export runs/my exported/my --format gguf --type q8_0
    """
    with spinner(f"exporting {run}"):
        result = api.export(run, folder, model_type=model_type, format=format, type=type)
    if as_json:
        print_json(
            {
                "folder": str(result.path),
                "model_type": result.model_type,
                "class": result.architecture,
                "engine": result.engine,
                "difference": result.difference,
                "unchecked": result.unchecked,
            }
        )
        return
    print(f"{result.path}: {result.model_type}, {result.architecture}")
    if result.difference is None:
        print(f"not verified: {result.unchecked}")
        return
    if result.unchecked:
        print(result.unchecked)
    if result.engine == "gguf":
        print(
            "read again: a weight in the file differs from that of the run by at most "
            f"{result.difference:.1e} times the largest weight of its tensor"
        )
        print("not run by llama.cpp: llama-cpp-python is not installed")
    elif result.engine == "llama.cpp" and result.architecture != "f32":
        print(
            f"verified as f32; as {result.architecture}, outputs in llama.cpp differ by at most "
            f"{result.difference:.1e}"
        )
    else:
        print(f"verified: outputs in {result.engine} differ by at most {result.difference:.1e}")
