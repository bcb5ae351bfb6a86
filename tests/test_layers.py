"""The house rules that a program can hold: imports run one way, the wheel is whole, the packages are those declared."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# a package may import from itself and from those below it
BELOW = {
    "errors": set(),
    "families": {"errors"},
    "recipes": {"errors"},
    "formats": {"errors"},
    "quantize": {"errors", "families", "recipes", "formats"},
    "calib": {"errors", "families", "recipes", "formats", "quantize"},
    "serving": {"errors", "families", "recipes", "formats", "quantize", "calib"},
    "evals": {"errors", "families", "recipes", "formats", "quantize", "calib", "serving"},  # pairs, as they are served
    "hub": {"errors", "families", "recipes", "formats", "quantize", "calib"},
}
# documents, which are read as config.json is
READ_JSON = ("manifest.py", "statistics.py", "kv_scales.py")
SIBLINGS_APART = ("families", "formats")  # their files know the package's own __init__ and `_private` modules only


def modules() -> list[Path]:
    tops = [ROOT / name for name in BELOW]
    return sorted(
        path
        for top in tops
        for path in ([top.with_suffix(".py")] if not top.is_dir() else top.rglob("*.py"))
        if path.exists()
    )


def imported(path: Path) -> list[tuple[str, ...]]:
    """Every module of ours that a file imports, as dotted parts from the package's root."""
    here = path.relative_to(ROOT).with_suffix("").parts
    package = here[:-1]  # relative imports count from the folder, for __init__.py as well
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(
                (node.module or "").split(".") if node.module else ()
            )
            found += [base if node.module else (*base, alias.name) for alias in node.names] or [base]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.split(".")[0] == "phasefold" for name in names), f"{path}: import relatively"
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path: Path) -> None:
    top = path.relative_to(ROOT).with_suffix("").parts[0]
    for parts in imported(path):
        if not parts or parts[0] == "__version__":
            continue
        assert parts[0] == top or parts[0] in BELOW[top], f"{path.name} imports {'.'.join(parts)}"
        if top in SIBLINGS_APART and parts[0] == top and len(parts) > 1 and path.name != "__init__.py":
            sibling = (ROOT / top / parts[1]).with_suffix(".py")
            apart = not parts[1].startswith("_") and sibling.exists() and sibling != path
            assert not apart or path.name in READ_JSON, f"{path.name} imports its sibling {parts[1]}"


def test_only_the_command_line_knows_typer_and_rich() -> None:
    for path in [*modules(), ROOT / "__init__.py"]:
        tree = ast.walk(ast.parse(path.read_text()))
        called = {node.func.id for node in tree if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert "print" not in called, path
        assert not [word for word in ("typer", "rich") if f"import {word}" in path.read_text()], path


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from phasefold.quantize import plan, summary, convert, verify, kernels;"
        "from phasefold.formats.checkpoint import open_checkpoint; from phasefold.recipes import load;"
        f"plan.make_plan(open_checkpoint(Path({str(ROOT / 'examples' / 'tiny-glm5')!r})), load('glm-decode-int4'));"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_outgrows_a_page_of_thought() -> None:
    for path in [*modules(), *(ROOT / "cli").glob("*.py")]:
        assert len(path.read_text().splitlines()) <= 330, path


def test_packages_are_the_folders() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {path.parent.relative_to(ROOT) for path in modules() if path.name == "__init__.py"} | {Path("cli")}
    assert set(declared) == {"phasefold", *(f"phasefold.{'.'.join(folder.parts)}" for folder in found)}


def test_the_wheel_holds_what_it_must(tmp_path: Path) -> None:
    """Built from a copy of what git tracks, so that nothing left over in the checkout gets in."""
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    copy = tmp_path / "copy"
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("examples/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, copy],
        check=True,
        capture_output=True,
    )
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    python = {f"phasefold/{path.relative_to(ROOT).as_posix()}" for path in modules()}
    schemas = {f"phasefold/formats/{path.name}" for path in (ROOT / "formats").glob("*.schema.json")}
    tasks = {f"phasefold/evals/tasks/{path.name}" for path in (ROOT / "evals" / "tasks").glob("*.yaml")}
    recipes = {f"phasefold/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    kernels = {
        f"phasefold/quantize/kernels/{p.name}"
        for p in (ROOT / "quantize" / "kernels").iterdir()
        if p.suffix in (".h", ".cpp", ".cu")
    }
    assert (
        python
        | recipes
        | kernels
        | schemas
        | tasks
        | {"phasefold/py.typed", "phasefold/cli/__init__.py", "phasefold/__main__.py"}
        <= names
    )
    assert not [
        name for name in names if name.startswith(("phasefold/tests", "phasefold/benchmarks", "phasefold/examples"))
    ]
