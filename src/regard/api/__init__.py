"""Everything that the command line can do, in Python.

One module per group of functions; each is imported when one of its names is first used, so that
`import regard` and `regard --help` do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api.comparison import Comparison, compare, run_names, takes_steps
    from regard.api.diagnosis import OPTIONAL_PACKAGES, Diagnosis, doctor
    from regard.api.dry_run import TrainingPreview, preview
    from regard.api.lecture_figures import LectureFigure, figures, show
    from regard.api.machine import driver_gpus
    from regard.api.model_info import ModelDiff, ModelInfo, diff, info, presets
    from regard.api.overrides import format_overrides
    from regard.api.planning import Plan, plan
    from regard.api.prediction import (
        BATCH_SIZE,
        OUT_SUFFIXES,
        input_lines,
        input_texts,
        predict_inputs,
        predict_rows,
        read_inputs,
        write_rows,
    )
    from regard.api.process import (
        device_of,
        process_start_time,
        rank,
        run_worker,
        stoppable,
        world_size,
    )
    from regard.api.run import Run, load
    from regard.api.run_figures import (
        by_length_curves,
        drawings_text,
        encode_drawings,
        encode_figure,
        history_curves,
    )
    from regard.api.settings_reference import (
        format_default,
        format_options,
        other_defaults,
        sentence,
        settings,
        settings_page,
        used_by,
    )
    from regard.api.training import (
        ImportedRun,
        RunSummary,
        Study,
        configure,
        edit,
        export,
        import_checkpoint,
        import_model,
        merge,
        open_study,
        require_new_folder,
        resume,
        resume_events,
        summarize,
        train,
        train_events,
    )
    from regard.explain.gradient import GradientFlow, draw_gradients
    from regard.explain.render.figure import FIGURE_SUFFIXES
    from regard.explain.token_map import AttentionMap
    from regard.generate import SAMPLERS, PromptLookup
    from regard.generate.traced_chain import TracedChain
    from regard.models.build import preset
    from regard.pipelines.base import Progress
    from regard.pipelines.by_length import MetricsByLength
    from regard.text import Tokenizer
    from regard.training.events import (
        Evaluated,
        Event,
        NGramBaselineEvaluated,
        RunFinished,
        RunStarted,
        SimpleBaselinesEvaluated,
        StepLogged,
        ThreadsChanged,
    )
    from regard.training.setup.configure import unused_overrides
    from regard.training.tracking.history import History

_NAMES = {
    "regard.api.comparison": ("Comparison", "compare", "run_names", "takes_steps"),
    "regard.api.diagnosis": ("OPTIONAL_PACKAGES", "Diagnosis", "doctor"),
    "regard.api.dry_run": ("TrainingPreview", "preview"),
    "regard.api.lecture_figures": ("LectureFigure", "figures", "show"),
    "regard.api.machine": ("driver_gpus",),
    "regard.api.model_info": ("ModelDiff", "ModelInfo", "diff", "info", "presets"),
    "regard.api.run_figures": (
        *("by_length_curves", "drawings_text", "encode_drawings", "encode_figure"),
        "history_curves",
    ),
    "regard.api.planning": ("Plan", "plan"),
    "regard.api.prediction": (
        *("BATCH_SIZE", "OUT_SUFFIXES", "input_lines", "input_texts", "predict_inputs"),
        *("predict_rows", "read_inputs", "write_rows"),
    ),
    "regard.api.process": (
        *("device_of", "process_start_time", "rank", "run_worker", "stoppable", "world_size"),
    ),
    "regard.api.run": ("Run", "load"),
    "regard.api.overrides": ("format_overrides",),
    "regard.api.settings_reference": (
        *("format_default", "format_options", "other_defaults", "sentence", "settings"),
        *("settings_page", "used_by"),
    ),
    "regard.api.training": (
        *("ImportedRun", "RunSummary", "Study", "configure", "edit", "export"),
        *(
            "import_checkpoint",
            "import_model",
            "merge",
            "open_study",
            "require_new_folder",
            "resume",
            "resume_events",
        ),
        *("summarize", "train", "train_events"),
    ),
    "regard.explain.token_map": ("AttentionMap",),
    "regard.explain.gradient": ("GradientFlow", "draw_gradients"),
    "regard.explain.render.figure": ("FIGURE_SUFFIXES",),
    "regard.generate": ("SAMPLERS", "PromptLookup"),
    "regard.generate.traced_chain": ("TracedChain",),
    "regard.models.build": ("preset",),
    "regard.pipelines.base": ("Progress",),
    "regard.pipelines.by_length": ("MetricsByLength",),
    "regard.text": ("Tokenizer",),
    "regard.training.events": (
        *("NGramBaselineEvaluated", "Evaluated", "Event", "RunFinished", "RunStarted"),
        *("SimpleBaselinesEvaluated", "StepLogged", "ThreadsChanged"),
    ),
    "regard.training.setup.configure": ("unused_overrides",),
    "regard.training.tracking.history": ("History",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "BATCH_SIZE",
    "FIGURE_SUFFIXES",
    "OPTIONAL_PACKAGES",
    "OUT_SUFFIXES",
    "SAMPLERS",
    "AttentionMap",
    "Comparison",
    "Diagnosis",
    "Evaluated",
    "Event",
    "GradientFlow",
    "History",
    "ImportedRun",
    "LectureFigure",
    "MetricsByLength",
    "ModelDiff",
    "ModelInfo",
    "NGramBaselineEvaluated",
    "Plan",
    "Progress",
    "PromptLookup",
    "Run",
    "RunFinished",
    "RunStarted",
    "RunSummary",
    "SimpleBaselinesEvaluated",
    "StepLogged",
    "Study",
    "ThreadsChanged",
    "Tokenizer",
    "TracedChain",
    "TrainingPreview",
    "by_length_curves",
    "compare",
    "configure",
    "device_of",
    "diff",
    "doctor",
    "draw_gradients",
    "drawings_text",
    "driver_gpus",
    "edit",
    "encode_drawings",
    "encode_figure",
    "export",
    "figures",
    "format_default",
    "format_options",
    "format_overrides",
    "history_curves",
    "import_checkpoint",
    "import_model",
    "info",
    "input_lines",
    "input_texts",
    "load",
    "merge",
    "open_study",
    "other_defaults",
    "plan",
    "predict_inputs",
    "predict_rows",
    "preset",
    "presets",
    "preview",
    "process_start_time",
    "rank",
    "read_inputs",
    "require_new_folder",
    "resume",
    "resume_events",
    "run_names",
    "run_worker",
    "sentence",
    "settings",
    "settings_page",
    "show",
    "stoppable",
    "summarize",
    "takes_steps",
    "train",
    "train_events",
    "unused_overrides",
    "used_by",
    "world_size",
    "write_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'regard.api' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
