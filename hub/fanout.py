"""Many small requests at a time, in threads that never keep a process alive.

concurrent.futures joins its threads when the interpreter ends: one that waits for a busy Hub would hold up Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def mapped(act: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """What `act` makes of each item, in their order. Raises what one of them has raised first."""
    left = list(enumerate(items))
    found: dict[int, R] = {}
    told: SimpleQueue[BaseException | None] = SimpleQueue()
    total, ends, lock = len(left), threading.Event(), threading.Lock()
    left.reverse()

    def work() -> None:
        while not ends.is_set():
            with lock:
                if not left:
                    return
                number, item = left.pop()
            try:
                found[number] = act(item)
            except BaseException as error:
                told.put(error)
                return
            told.put(None)

    for _ in range(min(threads, total)):
        threading.Thread(target=work, daemon=True, name="hub").start()
    try:
        for _ in range(total):
            if error := told.get():
                raise error
    finally:
        ends.set()
    return [found[number] for number in range(total)]
