"""Python programs in forks of this process, where torch is imported already: starting Python with torch takes seconds.

What ends with a process, or begins with it (``atexit``, the memory it takes, what is imported), needs a real one.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import torch

__all__ = ["run_warm", "start_warm"]

ROOT = Path(__file__).parents[2]

_Popen = subprocess.Popen  # a test may put :func:`start_warm` in its place


def start_warm(
    *command: object,
    env: Mapping[str, str] = os.environ,
    closed: Sequence[int] = (),
    bucket: bool = False,
    **popen: Any,
) -> subprocess.Popen[Any]:
    """Start what ``python -c CODE``, ``python -m MODULE`` or ``python FILE`` runs, with arguments behind it.

    Args:
        command: These arguments of Python.
        env: The environment.
        closed: Standard files that are closed.
        bucket: The program uses object storage, for which a fork of a process that did so lacks the threads.
        popen: Arguments of :class:`subprocess.Popen`.
    """
    words = [os.fsdecode(os.fspath(word)) if isinstance(word, os.PathLike) else str(word) for word in command]

    objects = sys.modules.get("pccheck_async.bucket.obstore_objects")
    if bucket and objects is not None and objects._used_in:
        path = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
        return _Popen([sys.executable, *words], env={**env, "PYTHONPATH": path}, **popen)

    def be() -> Never:
        # Whatever was to run in place of this process never does; the end of this file tells that it was started.
        # Their numbers stay taken: objects of this process that own them will close them here, too.
        null = os.open(os.devnull, os.O_RDWR)
        for file in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, null}:
            os.dup2(null, file)
        for file in closed:
            os.close(file)
        os._exit(_run(words, dict(env)))

    return _Popen([sys.executable, *words], preexec_fn=be, env=env, **popen)


def run_warm(*command: object, **popen: Any) -> subprocess.CompletedProcess[Any]:
    """Run one to its end; its output is captured, but for standard files that are given."""
    files = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with start_warm(*command, **files | popen) as process:
        output, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _run(words: list[str], env: dict[str, str]) -> int:
    status = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
        logging.getLogger().handlers.clear()
        warnings.resetwarnings()
        torch.set_num_threads(1)
        encoding, _, errors = env.get("PYTHONIOENCODING", "utf-8:surrogateescape").partition(":")
        sys.stdin = _open(0, "r", encoding, errors)
        sys.stdout = _open(1, "w", encoding, errors or "strict")
        sys.stderr = _open(2, "w", encoding, "backslashreplace")
        status = _main(words)
        for process in multiprocessing.active_children():  # daemons, as they end with a process
            process.terminate()
            process.join()
        for file in filter(None, (sys.stdout, sys.stderr)):
            file.flush()
    except BaseException:  # noqa: BLE001 - the process ends here
        if sys.stderr is not None:
            traceback.print_exc()
            sys.stderr.flush()
    return status


def _open(number: int, mode: str, encoding: str, errors: str) -> Any:
    try:
        file = open(number, f"{mode}b", closefd=False)  # noqa: SIM115 - it stays open
    except OSError:
        return None  # as Python has it where a standard file is closed
    return io.TextIOWrapper(file, encoding, errors or None, line_buffering=file.isatty(), write_through=number == 2)


def _main(words: list[str]) -> int:
    """Run the program; return the exit status, as Python makes it."""
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0
