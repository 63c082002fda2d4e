"""The counters of a server, in the text format of Prometheus."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields

from regard.serve.engine import BatchEngine
from regard.serve.models import Models
from regard.serve.sequences import Counters

HELP = {
    "requests": "requests that were queued",
    "finished": "sequences that were completed",
    "cancelled": "sequences whose client disconnected",
    "failed": "sequences that failed",
    "prompt_tokens": "prompt tokens prefilled",
    "tokens": "tokens that were generated",
    "steps": "steps of the engine",
    "preempted": "sequences that were preempted",
}


class Metrics:
    """What the server counts itself; the engines count the rest."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()  # by their status

    def count(self, status: int) -> None:
        """Count a response."""
        self.responses[status] += 1

    def text(self, models: Models, healthy: bool, open_requests: int) -> str:
        """All metrics."""
        lines = ["# TYPE regard_up gauge", f"regard_up {int(healthy)}"]
        lines += ["# TYPE regard_open_requests gauge", f"regard_open_requests {open_requests}"]
        engines = {
            name: model.engine for name, model in models.loaded.items() if model.engine is not None
        }
        for counter in fields(Counters):
            name = f"regard_{counter.name}_total"
            lines += [f"# HELP {name} {HELP[counter.name]}", f"# TYPE {name} counter"]
            for model, engine in engines.items():
                lines.append(
                    f'{name}{{model="{_escape(model)}"}} {getattr(engine.counters, counter.name)}'
                )
        gauges: dict[str, Callable[[BatchEngine], int]] = {
            "running": lambda engine: len(engine.sequences),
            "waiting": lambda engine: len(engine.waiting) + len(engine.inbox),
            "prefix_bytes": lambda engine: engine.prefixes.bytes if engine.prefixes else 0,
            "prefix_hit_tokens": lambda engine: engine.prefixes.hits if engine.prefixes else 0,
        }
        for gauge, value in gauges.items():
            lines.append(f"# TYPE regard_{gauge} gauge")
            lines += [
                f'regard_{gauge}{{model="{_escape(model)}"}} {value(engine)}'
                for model, engine in engines.items()
            ]
        lines.append("# TYPE regard_http_responses_total counter")
        lines += [
            f'regard_http_responses_total{{status="{status}"}} {count}'
            for status, count in sorted(self.responses.items())
        ]
        return "\n".join([*lines, ""])


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
