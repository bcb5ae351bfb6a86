"""The GitHub action, its example and the pre-commit hook, run step by step as GitHub and pre-commit run them."""

import inspect
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sparse
import variants
import yaml
from hub_server import hub_server
from workflows import NotGitHub, Runner, resolve

from phasefold.cli.size import size

ROOT = Path(__file__).parent.parent
GLM = "zai-org/GLM-5.2-FP8"
EXAMPLE = ROOT / "examples" / "size-check.yml"
RECIPE = "recipes/glm-decode-int4.toml"
# no download, no compiler: what is sized needs neither torch nor the kernels
SEEN = {"PYTHONPATH": sysconfig.get_path("purelib")}
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "CC": "false", "CXX": "false"}


@pytest.fixture(scope="module")
def installed(module_path: Path) -> Runner:
    """A machine on which the action's own first steps have installed phasefold from a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    action = module_path / "action"
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("examples/", "tests")):
            (action / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, action / name)
    (module_path / "temp").mkdir()
    (module_path / "nowhere").mkdir()
    runner = Runner(action, module_path / "temp", module_path / "nowhere", OFFLINE, skip=("size",))
    done = runner.use({"source": "unused"})
    assert done.code == 0, done.log
    assert done.seen == ["actions/setup-python@v6", "install"]
    return runner


@pytest.fixture(scope="module")
def glm(module_path: Path) -> Path:
    sparse.write(GLM, module_path / "glm")
    return module_path / "glm"


@pytest.fixture
def runner(installed: Runner, tmp_path: Path) -> Runner:
    """The same machine with a workspace of its own."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return Runner(installed.action, installed.temp, workspace, OFFLINE, skip=("install",))


@pytest.fixture
def checkout(runner: Runner, glm: Path) -> Runner:
    """A repository with a recipe, and what the Hub would give, in a folder of the repo's name."""
    recipe = runner.workspace / RECIPE
    recipe.parent.mkdir()
    shutil.copyfile(ROOT / RECIPE, recipe)
    (runner.workspace / GLM).parent.mkdir()
    (runner.workspace / GLM).symlink_to(glm)
    return runner


def tiny(runner: Runner) -> str:
    """A small checkpoint in the workspace."""
    shutil.copytree(variants.EXAMPLES / "tiny-glm4", runner.workspace / "tiny")
    return "tiny"


def failures(file: Path) -> dict[str | None, int]:
    return {case.get("name"): len(case.findall("failure")) for case in ElementTree.parse(file).iter("testcase")}


def test_what_was_installed_is_the_checkout_without_torch(installed: Runner) -> None:
    needs = (installed.temp / "phasefold" / "needs.txt").read_text()
    assert "typer" in needs and "huggingface-hub" in needs and "torch" not in needs and "pytest" not in needs
    code = "import phasefold; print(phasefold.__file__)"
    python = installed.temp / "phasefold" / "bin" / "python"
    found = subprocess.run([python, "-c", code], cwd="/", env=SEEN, check=True, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(installed.temp / "phasefold")


def test_a_recipe_within_its_budget_passes(checkout: Runner) -> None:
    done = checkout.workflow(EXAMPLE)
    assert done.code == 0, done.log
    assert done.seen == ["actions/checkout@v6", "./", "actions/setup-python@v6", "size", "actions/upload-artifact@v6"]
    assert done.summary.startswith(f"### Size of {GLM} by recipes/glm-decode-int4.toml\n")
    assert "| `--max-per-gpu` | 55.00 GiB | 54.36 GiB | holds |" in done.summary
    assert "| routed_expert | 413.12 GB | 50.96 GB | cut |" in done.summary
    assert done.outputs["within-budget"] == "true" and done.outputs["total-bytes"] == "450904205312"
    assert int(done.outputs["kv-tokens"]) > 1_100_000
    cases = failures(checkout.workspace / "size.xml")
    assert cases == {"max-total": 0, "max-per-gpu": 0, "min-kv-tokens": 0}


def test_a_recipe_of_ones_own_that_outgrows_its_budget_fails(checkout: Runner) -> None:
    recipe = checkout.workspace / RECIPE
    changed = recipe.read_text().replace('format = "int4-g32"\nmethod = "search"', 'format = "keep"')
    assert changed != recipe.read_text()
    recipe.write_text(changed)
    done = checkout.workflow(EXAMPLE)
    assert done.code == 3
    assert "phasefold: max-per-gpu: " in done.log and "bytes over" in done.log
    assert "| `--max-total` | 421.00 GiB | 719.35 GiB | **does not hold** |" in done.summary
    assert "| routed_expert |" in done.summary
    assert done.outputs["within-budget"] == "false"
    assert failures(checkout.workspace / "size.xml") == {"max-total": 1, "max-per-gpu": 1, "min-kv-tokens": 1}
    assert done.seen[-1] == "actions/upload-artifact@v6"  # the cases are kept all the more


def test_every_option_of_size_is_an_input(runner: Runner) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    options = {name.replace("_", "-") for name in inspect.signature(size).parameters} - {"as-json", "markdown"}
    assert action["inputs"].keys() - {"python", "phasefold"} == options
    words = {
        "runtime": "sglang", "tp": 2, "ep": 2, "dp": 2, "mtp": True, "count": "even", "kv-dtype": "fp8_e4m3",
        "gpu-memory": "8GB", "memory-fraction": 0.5, "reserve": "1GB",
    }  # fmt: skip
    done = runner.use({"source": tiny(runner), **words})
    assert done.code == 0, done.log
    assert "::notice title=phasefold::no budget is given" in done.log
    assert "SGLang, TP2, EP2, DP2" in done.summary and "no MTP layer is there to be loaded" in done.summary
    assert "0.5 of 8.00 GB, less weights and 953.67 MiB" in done.summary
    assert runner.use({"source": "tiny", "mtp": False}).outputs["kv-tokens"] == ""


def test_a_revision_on_the_hub(runner: Runner, tmp_path: Path) -> None:
    """The settings of huggingface_hub reach the action as they reach every step, from the job's env."""
    with hub_server(tmp_path / "hub") as server:
        commit = server.add("org/tiny", variants.EXAMPLES / "tiny-glm5", private=True)
        settings = server.environment(tmp_path / "home")
        runner.env = OFFLINE | {name: value for name, value in settings.items() if name.startswith("HF_")}
        words = {"source": f"org/tiny@{commit}", "recipe": "glm-decode-int4"}
        assert runner.use(words | {"max-total": "7MB"}).outputs["within-budget"] == "true"
        assert runner.use(words | {"max-total": "6MB"}).code == 3
        del runner.env["HF_TOKEN"]
        done = runner.use(words)
        assert done.code == 1 and "org/tiny" in done.log


@pytest.mark.parametrize(
    ("inputs", "code", "said"),
    [
        ({}, 2, "::error title=phasefold::the input `source` is not set"),
        ({"source": ""}, 2, "::error title=phasefold::the input `source` is not set"),
        ({"source": "tiny", "mtp": "yes"}, 2, "the input `mtp` is neither true nor false"),
        ({"source": "tiny", "max-total": "421"}, 2, "--max-total: '421' is no size"),
        ({"source": "tiny", "min-kv-tokens": "1M"}, 2, "--min-kv-tokens: only with --gpu-memory"),
        ({"source": "tiny", "recipe": "none.toml"}, 2, "no recipe 'none.toml': there is no such file"),
        ({"source": "nowhere"}, 1, "nowhere"),
        ({"source": "--version"}, 1, "--version"),  # a name, no option
        ({"source": "tiny", "junit": "no/such/folder.xml"}, 1, "cannot be written"),
    ],
)
def test_what_is_wrong_fails_loudly(runner: Runner, inputs: dict[str, str], code: int, said: str) -> None:
    tiny(runner)
    done = runner.use(inputs)
    assert (done.code, done.summary) == (code, "") and said in done.log


CODE = [
    "$(touch pwned)", "`touch pwned`", '"; touch pwned; "', "'; touch pwned; '", "x\ntouch pwned\n", "--help",
    "a[$(touch pwned)]", "* ; touch pwned", "${{ inputs.source }}", "\n::error::pwned",
]  # fmt: skip


@pytest.mark.parametrize("text", CODE)
def test_an_input_is_never_code(runner: Runner, text: str) -> None:
    """In every input in turn; each but `junit`, a file's name, is refused as a value."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert not [step for step in action["runs"]["steps"] if "${{" in step.get("run", "")]
    tiny(runner)
    for name in ("source", "recipe", "max-total", "tp", "mtp", "junit"):
        done = runner.use({"source": "tiny", name: text})
        assert done.code != 0 or name == "junit", (name, done.log)
        assert not list(runner.workspace.rglob("pwned")), name
        assert not [line for line in done.log.splitlines() if line.startswith("::error::")], name


def test_python_files_of_the_workspace_are_not_run(runner: Runner, installed: Runner, tmp_path: Path) -> None:
    """What a pull request puts there would be Python's own modules to whoever looks for them in the workspace first."""
    for name in ("json", "venv", "pip", "importlib", "typer", "phasefold", "sitecustomize"):
        (runner.workspace / f"{name}.py").write_text("raise SystemExit('it was run')\n")
    done = runner.use({"source": tiny(runner), "max-total": "1kB"})
    assert done.code == 3 and done.outputs["within-budget"] == "false" and "it was run" not in done.log
    (tmp_path / "temp").mkdir()
    anew = Runner(installed.action, tmp_path / "temp", runner.workspace, OFFLINE, skip=("size",)).use({"source": "x"})
    assert anew.code == 0 and "it was run" not in anew.log, anew.log


def test_the_text_of_an_input_arrives_whole(runner: Runner) -> None:
    name = "$(touch pwned) `x` \"a\" 'b' *"
    shutil.copytree(variants.EXAMPLES / "tiny-glm4", runner.workspace / name)
    done = runner.use({"source": name, "max-total": "1 GiB"})
    assert done.code == 0, done.log
    assert done.summary.splitlines()[0] == "### Size of " + name.replace("`", r"\`").replace("*", r"\*")
    assert sorted(path.name for path in runner.workspace.iterdir()) == [name]


def test_the_runner_refuses_what_it_does_not_know() -> None:
    assert resolve("a ${{ inputs.x }} ${{steps.s.outputs.y}}", {"inputs.x": "1"}) == "a 1 "
    for text in ("${{ github.head_ref }}", "${{ inputs.x || 'y' }}", "${{ inputs.unknown }}"):
        with pytest.raises(NotGitHub):
            resolve(text, {"inputs.x": "1"})


def test_the_example_gives_no_more_rights_than_it_needs() -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    assert example["permissions"] == {"contents": "read"}
    assert set(example[True]) == {"pull_request"}  # YAML 1.1 reads the key `on` as a truth


def test_the_pre_commit_hook(installed: Runner, tmp_path: Path) -> None:
    """Its entry and the args of a user, as pre-commit puts them together."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("phasefold-size", "python", False)
    command, *words = shlex.split(hook["entry"])
    shutil.copyfile(ROOT / RECIPE, tmp_path / "recipe.toml")

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        path = installed.temp / "phasefold" / "bin" / command
        return subprocess.run(
            [path, *words, *args], cwd=tmp_path, env=SEEN, capture_output=True, text=True, check=False
        )

    source = str(variants.EXAMPLES / "tiny-glm4")
    done = run(source, "--recipe", "recipe.toml", "--max-total", "7MB")
    assert done.returncode == 0, done.stderr
    assert run(source, "--recipe", "recipe.toml", "--max-total", "6MB").returncode == 3
    assert run().returncode == 2
