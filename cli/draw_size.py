"""What `size` shows: tables for people and for pull requests, test cases for CI, keys for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import draw

if TYPE_CHECKING:
    from ..serving.size import Budget, Gpus, Size

_HEADER = ["role", "stored", "a GPU", ""]


def size(title: str, found: Size, gpus: Gpus, budgets: list[Budget]) -> None:
    """Sentences, the roles, and the budgets where there are any."""
    draw.say(f"{title}: {found.total_bytes:,} bytes ({draw.binary(found.total_bytes)})")
    for line in sentences(found, gpus):
        print(line)
    for note in found.notes:
        draw.say(f"note: {note}")
    draw.table(_HEADER, list(roles(found, gpus)), "lrrl")
    for budget in budgets:
        print(f"{budget.name}: {'holds' if budget.ok else 'does NOT hold'}, {_shown(budget)}")


def sentences(found: Size, gpus: Gpus) -> list[str]:
    """Weights a GPU, bytes a token, tokens that fit: under what, in words."""
    at = gpus.at
    ways = [f"TP{at.tp}", *([f"EP{at.ep}"] if at.ep > 1 else ()), *([f"DP{gpus.dp}"] if gpus.dp > 1 else ())]
    ways.append("MTP layer loaded" if at.mtp else "no MTP layer")
    weights = f"{found.per_gpu_bytes:,} bytes ({draw.binary(found.per_gpu_bytes)})"
    how = ""
    if gpus.count == "even":
        how = f", of {draw.binary(found.loaded_bytes)} divided evenly, as no runtime does it"
    elif at.tp > 1:
        how = f", {draw.binary(found.replicated_bytes)} of it the same on each"
    lines = [
        f"{draw.RUNTIMES[at.runtime]}, {', '.join(ways)}: {weights} a GPU{how}",
        f"KV cache {gpus.kv}: {found.kv_bytes_per_token:,} bytes a token",
    ]
    if found.kv_tokens is not None and gpus.memory is not None:
        share = f"{gpus.fraction:g} of {draw.size(gpus.memory)}, less weights and {draw.binary(gpus.reserve)}"
        lines.append(f"{found.kv_tokens:,} tokens fit ({share})")
    return lines


def roles(found: Size, gpus: Gpus) -> Iterator[list[str]]:
    """A line a role: stored, on a GPU, and how it comes there."""
    for name, role in found.roles.items():
        how = "not loaded" if not role.loaded else "on each GPU" if role.whole == role.loaded else "cut"
        if role.loaded and (gpus.at.tp == 1 or gpus.count == "even"):
            how = "" if gpus.at.tp == 1 else "evenly"
        yield [name, draw.size(role.stored), draw.size(role.per_gpu), how]


def reason(budget: Budget) -> str:
    """Why a budget does not hold, in a line."""
    over = f"{abs(budget.found - budget.limit):,}"
    if budget.name == "min-kv-tokens":
        return f"{budget.name}: {_shown(budget)}: {over} too few"
    return f"{budget.name}: {_shown(budget)}: {over} bytes over"


def _shown(budget: Budget) -> str:
    if budget.name == "min-kv-tokens":
        return f"{budget.found:,} tokens fit, at least {budget.limit:,} are wanted"
    return f"{draw.binary(budget.found)}, at most {draw.binary(budget.limit)} are wanted"


def keys(found: Size, gpus: Gpus, budgets: list[Budget]) -> dict[str, Any]:
    """What `--json` prints; sizes in bytes."""
    return {
        "total_bytes": found.total_bytes,
        "loaded_bytes": found.loaded_bytes,
        "per_gpu_bytes": found.per_gpu_bytes,
        "replicated_bytes": found.replicated_bytes,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "kv_tokens": found.kv_tokens,
        "within_budget": all(budget.ok for budget in budgets),
        "budgets": [
            {"name": b.name, "limit": b.limit, "found": b.found, "ok": b.ok, "reason": None if b.ok else reason(b)}
            for b in budgets
        ],
        "roles": {
            name: {"bytes": role.stored, "loaded_bytes": role.loaded, "per_gpu_bytes": role.per_gpu,
                   "replicated_bytes": role.whole}
            for name, role in found.roles.items()
        },
        "runtime": gpus.at.runtime, "tp": gpus.at.tp, "ep": gpus.at.ep, "dp": gpus.dp, "mtp": gpus.at.mtp,
        "count": gpus.count, "kv_dtype": gpus.kv, "gpu_memory_bytes": gpus.memory,
        "memory_fraction": gpus.fraction, "reserve_bytes": gpus.reserve, "notes": list(found.notes),
    }  # fmt: skip


def markdown(title: str, found: Size, gpus: Gpus, budgets: list[Budget]) -> str:
    """The same for the summary of a job or a comment."""
    lines = [
        f"### Size of {cell(title)}",
        "",
        f"{found.total_bytes:,} bytes ({draw.binary(found.total_bytes)}) in all.",
    ]
    lines += [f"{line}." for line in sentences(found, gpus)]
    lines += [f"Note: {cell(note)}." for note in found.notes]
    if budgets:
        lines += ["", "| budget | limit | found | |", "|---|---:|---:|---|"]
        for budget in budgets:
            tokens = budget.name == "min-kv-tokens"
            limit, value = (f"{n:,}" if tokens else draw.binary(n) for n in (budget.limit, budget.found))
            lines.append(f"| `--{budget.name}` | {limit} | {value} | {'holds' if budget.ok else '**does not hold**'} |")
    lines += ["", f"| {' | '.join(_HEADER)} |", "|---|---:|---:|---|"]
    lines += [f"| {' | '.join(row)} |" for row in roles(found, gpus)]
    return "\n".join(lines) + "\n"


def junit(title: str, budgets: list[Budget]) -> str:
    """A test case a budget."""
    from xml.etree import ElementTree

    failures = str(sum(not budget.ok for budget in budgets))
    counts = {"tests": str(len(budgets)), "failures": failures, "errors": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "phasefold size", **counts})
    for budget in budgets:
        case = ElementTree.SubElement(suite, "testcase", {"classname": draw.clean(title), "name": budget.name})
        if not budget.ok:
            ElementTree.SubElement(case, "failure", {"message": reason(budget)})
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def cell(text: str) -> str:
    """Text that Markdown leaves as it is, as far as a table needs it."""
    return "".join(f"\\{c}" if c in "\\`*_|<>[]" else c for c in draw.clean(text))
