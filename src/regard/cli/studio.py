"""`regard studio`."""

import signal
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from regard.cli.output import print_status
from regard.cli.serve import require_packages


def studio(
    runs: Annotated[
        Path, Argument(metavar="FOLDER", help="The folder of the runs; it may be empty.")
    ] = Path("runs"),
    host: Annotated[
        str,
        Option(
            metavar="ADDRESS",
            help="Address to listen on; --api-key is needed unless it is localhost.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(metavar="N", min=0, max=65535, help="Port; 0: any free one.")
    ] = 8001,
    api_key: Annotated[
        str | None,
        Option(
            metavar="KEY",
            envvar="REGARD_API_KEY",
            help="API key that the page asks for.",
            show_envvar=True,
        ),
    ] = None,
    browser: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, mps or auto.")] = "auto",
) -> None:
    """Train, generate and inspect models in the browser.

    \b
    regard studio
    regard studio class-runs --port 9000
    regard studio --host 0.0.0.0 --api-key SECRET

    The page lists the runs of the folder and trains new ones, one at a time. It is part of the
    server of `regard serve`, and requests nothing from other hosts. Ctrl-C or closing the
    terminal ends it; a run in training is saved, and `regard resume` continues it.
    """
    require_packages("studio")
    import threading
    import webbrowser

    from regard.serve.server import make_server, run_server
    from regard.serve.studio.app import create_studio

    server = make_server(
        [runs], host=host, port=port, api_key=api_key, device=device, create=create_studio
    )

    def on_start(address: str) -> None:
        print_status(f"studio at {address}")
        if browser:  # in a thread: a text-mode browser would block the server
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    _exit_on_hangup()
    try:
        run_server(server, on_start)
    finally:
        server.app.state.studio.trainer.close()


def _exit_on_hangup() -> None:
    """Treat SIGHUP, sent when the terminal closes, as SIGTERM; nohup has set it to be ignored."""
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
        signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))
