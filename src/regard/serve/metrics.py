"""The counters and gauges of a server, in the text format of Prometheus."""

from collections import Counter
from collections.abc import Callable, Mapping

from regard.serve.engine import BatchEngine
from regard.serve.models import Models

HELP = {  # of each metric; those that end in _total are counters, the others gauges
    "up": "1 if the engine works, else 0",
    "open_requests": "requests in progress",
    "requests_total": "requests that were queued",
    "finished_total": "sequences that were completed",
    "cancelled_total": "sequences that were cancelled, as when the client disconnects",
    "failed_total": "sequences that failed",
    "prompt_tokens_total": "prompt tokens prefilled",
    "generation_tokens_total": "tokens that were generated",
    "steps_total": "steps of the engine",
    "preempted_total": "sequences that were preempted",
    "prefix_lookup_tokens_total": "prompt tokens that were looked up in the prefix cache",
    "prefix_hit_tokens_total": "prompt tokens whose keys and values were in the prefix cache",
    "running": "sequences that are being decoded",
    "waiting": "requests that wait for a row of the batch",
    "prefix_bytes": "bytes of the prefix cache",
    "http_responses_total": "HTTP responses by status code",
}
ENGINE_COUNTERS = (
    *("requests", "finished", "cancelled", "failed", "prompt_tokens", "generation_tokens", "steps"),
    *("preempted", "prefix_lookup_tokens", "prefix_hit_tokens"),
)
ENGINE_GAUGES: Mapping[str, Callable[[BatchEngine], int]] = {
    "running": lambda engine: len(engine.sequences),
    "waiting": lambda engine: len(engine.waiting) + len(engine.inbox),
    "prefix_bytes": lambda engine: engine.prefix_cache.bytes if engine.prefix_cache else 0,
}


class Metrics:
    """The HTTP responses by status, and the counters of the engines."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()  # by their status

    def count(self, status: int) -> None:
        """Count a response."""
        self.responses[status] += 1

    def text(self, models: Models, healthy: bool, open_requests: int) -> str:
        """All metrics in the text format."""
        engines = {_label(name): engine for name, engine in models.engines().items()}
        totals = {_label(name): counts for name, counts in models.totals().items()}
        lines = [*_metric("up", {"": int(healthy)}), *_metric("open_requests", {"": open_requests})]
        for name in ENGINE_COUNTERS:
            lines += _metric(f"{name}_total", {label: c[name] for label, c in totals.items()})
        for name, value in ENGINE_GAUGES.items():
            lines += _metric(name, {label: value(engine) for label, engine in engines.items()})
        statuses = {f'{{status="{code}"}}': n for code, n in sorted(self.responses.items())}
        lines += _metric("http_responses_total", statuses)
        return "\n".join([*lines, ""])


def _metric(name: str, values: Mapping[str, int]) -> list[str]:
    """The lines of a metric; `values` are its values by their labels."""
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP regard_{name} {HELP[name]}", f"# TYPE regard_{name} {kind}"]
    return [*lines, *(f"regard_{name}{label} {value}" for label, value in values.items())]


def _label(model: str) -> str:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{model="{escaped}"}}'
