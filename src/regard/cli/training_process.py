"""`regard` as a child process of the studio; when the studio ends, it stops as after SIGTERM."""

import os
import runpy
import signal
import threading


def stop_with_parent(pipe: int) -> None:
    """Send SIGTERM to this process when the parent has closed its end of a pipe.

    The system closes it too when the parent is killed.
    """

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    stop_with_parent(0)
    runpy.run_module("regard", run_name="__main__")
