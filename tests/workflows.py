"""Runs the steps of a GitHub workflow, or of a composite action, as GitHub does, as far as ours need it.

Expressions are `inputs.x`, `env.X` and `steps.x.outputs.y`; scripts run in bash with the files that GitHub gives
them; actions of GitHub's own are passed over, by name. Whatever is none of this is refused, not guessed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PASSED_OVER = ("actions/checkout@v6", "actions/setup-python@v6", "actions/upload-artifact@v6")
_STEP = {"id", "name", "uses", "with", "shell", "env", "run", "if"}
_JOB = {"runs-on", "timeout-minutes", "steps"}
_BASH = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]


class NotGitHub(AssertionError):
    """Something that this runner does not know, or that GitHub would refuse."""


@dataclass
class Done:
    """What came of a job. code: of the step that failed. seen: what was run or passed over, in order."""

    code: int = 0
    log: str = ""
    summary: str = ""
    seen: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)


@dataclass
class Runner:
    """A machine with this interpreter first on its PATH, and its packages in sight of every other interpreter.

    action: the folder that `uses: ./` stands for. temp: RUNNER_TEMP. skip: ids of steps of the action that are not run.
    """

    action: Path
    temp: Path
    workspace: Path
    env: dict[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()

    def workflow(self, path: Path) -> Done:
        """All jobs of a workflow, one after the other."""
        done = Done()
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for job in jobs.values():
            _only(job, _JOB, "job")
            self._steps(job["steps"], {}, done, needs_shell=False)
        return done

    def use(self, inputs: dict[str, Any]) -> Done:
        """The action, as a step with these inputs."""
        done = Done()
        self._use(inputs, done)
        return done

    def _use(self, given: dict[str, Any], done: Done) -> None:
        action = yaml.safe_load((self.action / "action.yml").read_text())
        assert action["runs"].keys() == {"using", "steps"} and action["runs"]["using"] == "composite"
        _only(given, set(action["inputs"]), "input")
        inputs = {name: _text(about.get("default", "")) for name, about in action["inputs"].items()}
        inputs |= {name: _text(value) for name, value in given.items()}
        context = self._steps(action["runs"]["steps"], {f"inputs.{k}": v for k, v in inputs.items()}, done)
        done.outputs = {name: resolve(about["value"], context) for name, about in action["outputs"].items()}

    def _steps(
        self, steps: list[dict[str, Any]], context: dict[str, str], done: Done, needs_shell: bool = True
    ) -> dict[str, str]:
        context = dict(context)
        before = done.code
        for step in steps:
            _only(step, _STEP, "step")
            if step.get("if", "always()") != "always()":
                raise NotGitHub(f"if: {step['if']}")
            if (done.code != before and "if" not in step) or step.get("id") in self.skip:
                continue
            done.seen.append(step.get("uses") or step.get("id") or step["run"])
            if step.get("uses") == "./":
                self._use({name: resolve(_text(v), context) for name, v in step.get("with", {}).items()}, done)
            elif "uses" in step:
                if step["uses"] not in PASSED_OVER:
                    raise NotGitHub(f"uses: {step['uses']}")
                for value in step.get("with", {}).values():
                    resolve(_text(value), context)
            elif needs_shell and step.get("shell") != "bash":
                raise NotGitHub("a composite action's scripts need `shell: bash`")
            else:
                outputs = self._run(step, context, done)
                context |= {f"steps.{step.get('id')}.outputs.{name}": value for name, value in outputs.items()}
        return context

    def _run(self, step: dict[str, Any], context: dict[str, str], done: Done) -> dict[str, str]:
        files = {name: self.temp / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "GITHUB_PATH")}
        for file in files.values():
            file.write_text("")
        script = self.temp / "script.sh"
        script.write_text(resolve(step["run"], context))
        env = self.env | {name: str(file) for name, file in files.items()}
        env |= {name: resolve(_text(value), context) for name, value in step.get("env", {}).items()}
        env["PATH"] = os.pathsep.join([self.env.get("PATH", ""), str(Path(sys.executable).parent), os.environ["PATH"]])
        env |= {"HOME": str(self.temp), "RUNNER_TEMP": str(self.temp), "GITHUB_WORKSPACE": str(self.workspace)}
        env |= {"CI": "true", "GITHUB_ACTION_PATH": str(self.action), "PYTHONPATH": sysconfig.get_path("purelib")}
        ran = subprocess.run(
            [*_BASH, script], cwd=self.workspace, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        done.log += ran.stdout + ran.stderr
        done.summary += files["GITHUB_STEP_SUMMARY"].read_text()
        done.code = done.code or ran.returncode
        if files["GITHUB_PATH"].read_text():
            raise NotGitHub("GITHUB_PATH is written to, which this runner does not know")
        return dict(_output(line) for line in files["GITHUB_OUTPUT"].read_text().splitlines())


def resolve(text: str, context: dict[str, str]) -> str:
    """A text with its expressions worked out. An input or output that is not there is empty, as on GitHub."""

    def value(found: re.Match[str]) -> str:
        name = found[1].strip()
        if not re.fullmatch(r"inputs\.[\w-]+|env\.\w+|steps\.[\w-]+\.outputs\.[\w-]+", name):
            raise NotGitHub(f"expression {found[0]}")
        if name.startswith("inputs.") and name not in context:
            raise NotGitHub(f"no input {name}")
        return context.get(name, "")

    return re.sub(r"\$\{\{(.*?)\}\}", value, text, flags=re.DOTALL)


def _output(line: str) -> tuple[str, str]:
    name, sign, value = line.partition("=")
    if not sign or "<<" in name:
        raise NotGitHub(f"output {line!r}")
    return name, value


def _text(value: Any) -> str:
    """As GitHub passes a value of YAML on."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _only(value: dict[str, Any], known: set[str], what: str) -> None:
    if unknown := value.keys() - known:
        raise NotGitHub(f"{what}: unknown {', '.join(map(str, unknown))}")
