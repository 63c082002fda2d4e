"""`regard serve`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from regard.cli.output import print_status
from regard.errors import ConfigError


def serve(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN", help="Run folders, or folders of runs.", show_default=False),
    ],
    host: Annotated[
        str,
        Option(
            metavar="ADDRESS",
            help="Address to listen on; --api-key is needed unless it is localhost.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(metavar="N", min=0, max=65535, help="Port; 0: any free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        Option(
            metavar="KEY",
            envvar="REGARD_API_KEY",
            help="API key that clients must send.",
            show_envvar=True,
        ),
    ] = None,
    max_sequences: Annotated[
        int, Option(metavar="N", min=1, max=1024, help="Sequences that are decoded together.")
    ] = 64,
    max_queue: Annotated[
        int,
        Option(
            metavar="N",
            min=1,
            max=4096,
            help="Requests that may wait; further ones get status 429.",
        ),
    ] = 64,
    idle: Annotated[
        float | None,
        Option(
            metavar="SECONDS", min=1.0, help="Unload a model after this time without a request."
        ),
    ] = None,
    adapter: Annotated[
        list[str],
        Option(
            metavar="NAME=PATH",
            help="Serve the first run with this LoRA adapter too, as RUN:NAME; for another run, "
            "RUN:NAME=PATH.",
        ),
    ] = [],  # noqa: B006 -- typer copies it
    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, mps or auto.")] = "auto",
) -> None:
    """Serve models over HTTP, with OpenAI's API.

    \b
    regard serve runs/my
    regard serve runs --port 9000 --idle 600
    regard serve runs/my --adapter polite=runs/polite
    regard serve runs/my --host 0.0.0.0 --api-key SECRET

    The first model is loaded at once, others when a request names them by the name of their
    folder; adapters in the folder `adapters` of a run are called RUN:ADAPTER. Ctrl-C or SIGTERM
    stops the server after the running requests finish.
    """
    require_packages("serve")
    from regard.serve.engine import EngineConfig
    from regard.serve.server import make_server, run_server

    server = make_server(
        runs,
        host=host,
        port=port,
        api_key=api_key,
        config=EngineConfig(max_sequences=max_sequences, max_queue=max_queue),
        device=device,
        idle=idle,
    )
    for word in adapter:
        name, equals, path = word.partition("=")
        if not name or not equals or not path:
            raise ConfigError(f"--adapter {word}: give NAME=PATH")
        server.app.state.service.models.add_adapter(name, Path(path))
    run_server(server, lambda address: print_status(f"serving at {address}"))


def require_packages(command: str) -> None:
    """Raise if the packages of the server are not installed."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{command} needs {' and '.join(missing)}: pip install 'regard[serve]'")
