"""Which tasks are meant: names, groups, tags and patterns of lm-eval and of ours, YAML files, folders of them.

lm-eval reads some ten thousand files to know all its tasks, which takes seconds; that is left out where everything that
is asked for is a task of ours, or of a folder or file that was given.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError

#: the tasks that come with phasefold
OURS = Path(__file__).with_name("tasks")


class Asked(NamedTuple):
    """tasks: lm-eval's, by name, in order. groups: what else was asked for by a name, and the tasks in it."""

    tasks: dict[str, Any]
    groups: dict[str, tuple[str, ...]]


def find_tasks(names: Sequence[str], include: Sequence[Path], metadata: Mapping[str, Any]) -> Asked:
    """Load what is asked for, data included. UsageError for a name that is none, and for nothing."""
    for folder in include:
        if not folder.is_dir():
            raise UsageError(f"--include {folder}: no such folder; give one that holds tasks (YAML files)")
    folders = (OURS, *(folder.resolve() for folder in include))
    manager = _manager(folders, False, json.dumps(dict(metadata)))
    specs = [_specs(name, manager) for name in names]
    if not all(found and all(_known(_config(spec, manager), manager) for spec in found) for found in specs):
        manager = _manager(folders, True, json.dumps(dict(metadata)))
        specs = [_specs(name, manager) for name in names]
    tasks: dict[str, Any] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for name, found in zip(names, specs, strict=True):
        if not found:
            near = difflib.get_close_matches(name, manager.all_tasks, 5, 0.6)
            raise UsageError(
                f"task {name}: no task, group or tag of this name, and no file or folder"
                + (f"; near to it are {', '.join(near)}" if near else "; see lm-eval ls tasks")
                + _unreadable(include)
            )
        for spec in found:
            check_safe(spec, _config(spec, manager).get("unsafe_code"))
            loaded = manager.load([spec])
            _add(tasks, loaded["tasks"])
            if inner := next(iter(loaded["groups"]), spec if spec in manager.all_tags else None):
                groups[inner] = tuple(loaded["tasks"])
    if not tasks:
        raise UsageError("no tasks: give the names of some")
    return Asked(tasks, groups)


def _unreadable(folders: Sequence[Path]) -> str:
    """Files of these folders that lm-eval has passed over without a word."""
    for file in (file for folder in folders for file in sorted(folder.rglob("*.yaml"))):
        try:
            _read(str(file))
        except UsageError as error:
            return f"; {error}"
    return ""


def check_safe(name: str, unsafe: Any) -> None:
    """UsageError for a task that is marked as unsafe."""
    if unsafe:
        raise UsageError(
            f"task {name}: runs code that the model writes, which phasefold does not; run it in a sandbox of yours "
            "with `phasefold-lm-eval run --model phasefold --confirm_run_unsafe_code`"
        )


def _add(tasks: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """A task that is asked for twice, by itself and in a group, is run once; two of one name cannot be told apart."""
    for name, task in loaded.items():
        if name in tasks and tasks[name].dump_config() != task.dump_config():
            raise UsageError(f"task {name}: two of the tasks asked for have this name, and differ: ask for them apart")
        tasks.setdefault(name, task)


def _specs(name: str, manager: Any) -> list[str]:
    """What lm-eval can load, of one name or pattern: a registered name goes before a file, as lm-eval has it."""
    if matched := list(manager.match_tasks([name])):
        return matched
    place = Path(name)
    files = sorted(place.glob("*.yaml")) if place.is_dir() else sorted(map(Path, glob(name)))
    files = [file for file in files if file.suffix == ".yaml"]
    wanted = [file for file in files if (config := _read(str(file))).get("task") or config.get("group")]
    if files and not wanted:
        raise UsageError(f"{files[0]}: names neither a task nor a group, so it is none")
    return [str(file) for file in wanted]  # the others of a folder are what these include


def _known(config: Mapping[str, Any], manager: Any) -> bool:
    """Whether a task, or all members of a group, are in the index; tags may be on tasks that are not."""
    members = config.get("task")
    if isinstance(members, str):
        return True
    names = [one if isinstance(one, str) else one.get("group", one.get("task")) for one in members or ()]
    entries = [manager.task_index.get(name) for name in names]
    return bool(names) and all(entry is not None and _known(entry.cfg or {}, manager) for entry in entries)


def _config(spec: str, manager: Any) -> dict[str, Any]:
    """What a YAML file says, its functions not looked at."""
    entry = manager.task_index.get(spec)
    return (entry.cfg or {}) if entry else _read(spec)


def _read(file: str) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        return dict(load_yaml(file, resolve_func=False))
    except Exception as error:  # YAML of others, with tags of lm-eval's
        raise UsageError(f"{file}: is no task ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from None


@cache
def _manager(folders: tuple[Path, ...], everything: bool, metadata: str) -> Any:
    """lm-eval's index of the tasks in folders, and of its own."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders), include_defaults=everything, metadata=json.loads(metadata))
