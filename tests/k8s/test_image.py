"""The image is built nowhere here: its Dockerfile is linted, and its install steps run in a plain environment.

hadolint knows the Dockerfile and the shell in it (`make lint` runs it too). What it cannot know are this project's
files and pods: those rules are here. Each rule, theirs or ours, is shown to fire on a spoilt copy.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from built import K8S, ROOT

from deployments.runtime.local import ALLOCATOR

DOCKERFILE = ROOT / "Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")


@dataclass
class Stage:
    image: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Instruction and its arguments."""

    def all(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.steps if name == instruction]


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Global build arguments, and the stages in order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in joined.splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            image, _, name = rest.partition(" AS ")
            stages.append(Stage(image, name))
        elif stages:
            stages[-1].steps.append((instruction, rest))
        else:
            assert instruction == "ARG", f"{instruction} before the first FROM"
            name, _, value = rest.partition("=")
            arguments[name] = value
    return arguments, stages


def ignored(path: str) -> bool:
    """Is a path kept out of the build context? The last matching pattern decides."""
    out = False
    for pattern in (ROOT / ".dockerignore").read_text().split():
        bare = pattern.removeprefix("!")
        if fnmatch.fnmatch(path, bare) or path.startswith(f"{bare}/") or bare.startswith(f"{path}/"):
            out = not pattern.startswith("!")
    return out


def hadolint(text: str) -> list[str]:
    """What the linter says, one finding a line."""
    done = subprocess.run([HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def problems(text: str) -> Iterator[str]:
    yield from hadolint(text)
    _, stages = parse(text)
    for stage in stages:
        for run in stage.all("RUN"):  # hadolint looks for this in the last stage alone
            if "apt-get install" in run and "rm -rf /var/lib/apt/lists" not in run:
                yield "apt lists stay in the layer"
        for copy in stage.all("COPY"):
            yield from copy_problems(copy)
        for instruction, rest in stage.steps:
            if instruction in ("ENV", "ARG") and re.search(r"(?i)(password|secret|token|api_?key)", rest):
                yield f"{instruction} {rest}: secrets do not belong into layers"
    final = stages[-1]
    if not final.all("USER") or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", final.all("USER")[-1]):
        yield "the last USER must be a number and not root"
    if [name for name, _ in final.steps].index("USER") < max(i for i, s in enumerate(final.steps) if s[0] == "RUN"):
        yield "RUN after USER"


def copy_problems(copy: str) -> Iterator[str]:
    """Sources must be named, be there, and be in the build context."""
    *sources, _ = shlex.split(re.sub(r"--\S+ ?", "", copy))
    for source in sources if "--from=" not in copy else ():
        path = source.rstrip("/")
        if path == "." or not (ROOT / path).exists() or ignored(path):
            yield f"COPY {source}"


def test_the_dockerfile_is_clean() -> None:
    assert list(problems(DOCKERFILE.read_text())) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (":${PYTHON_VERSION}-slim-bookworm", "", "DL3006"),
        (":${PYTHON_VERSION}-slim-bookworm", ":latest", "DL3007"),
        ("USER 10001:10001", "USER outrider", "USER"),
        ("USER 10001:10001\n", "USER 0:0\n", "USER"),
        (" --no-install-recommends", "", "DL3015"),
        (" \\\n    && rm -rf /var/lib/apt/lists/*", "", "apt lists"),
        ("COPY actors/ actors/", "COPY actor/ actors/", "COPY"),
        ("COPY actors/ actors/", "COPY tests/ tests/", "COPY"),
        ("COPY actors/ actors/", "ADD actors/ actors/", "DL3020"),
        ("COPY actors/ actors/", "COPY . .", "COPY"),
        ('CMD ["outrider", "--help"]', "CMD outrider", "DL3025"),
        ("EXPOSE 8000", "ENV HF_TOKEN=hf_x", "secrets"),
        ("WORKDIR /opt/outrider", "WORKDIR outrider", "DL3000"),
        ("RUN groupadd", "RUN cd /tmp; groupadd", "DL3003"),
    ],
)
def test_each_rule_fires(old: str, new: str, complaint: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert any(complaint in problem for problem in problems(text.replace(old, new)))


def test_image_and_manifests_agree() -> None:
    """User, home, application path and port are said in both."""
    final = parse(DOCKERFILE.read_text())[1][-1]
    template = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())
    cluster = template["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        context = spec["securityContext"]
        assert final.all("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
        homes = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "home"]
        assert f"--home-dir {homes[0]}" in final.all("RUN")[0]
    assert final.all("EXPOSE") == [str(template["spec"]["serveService"]["spec"]["ports"][0]["port"])]
    environment = dict(pair.split("=", 1) for line in final.all("ENV") for pair in line.split())
    assert environment["PYTHONPATH"] == final.all("WORKDIR")[-1]
    assert environment.items() >= ALLOCATOR.items()


def test_both_variants_lead_to_the_runtime() -> None:
    arguments, stages = parse(DOCKERFILE.read_text())
    names = {stage.name for stage in stages}
    assert arguments["VARIANT"] == "cpu"
    assert {"runtime-cpu", "runtime-cuda"} <= names
    assert stages[-1].image == "runtime-${VARIANT}"


def test_a_wrong_variant_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "k8s/image/install.sh", str(tmp_path / "venv"), "rocm"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_install_steps_work_in_a_plain_environment(tmp_path: Path) -> None:
    """What the image's build stage runs, here; then the application from its folder alone, as in a pod."""
    application, venv = tmp_path / "application", tmp_path / "venv"
    application.mkdir()
    for stage in parse(DOCKERFILE.read_text())[1]:
        for copy in stage.all("COPY"):
            if "--from=" not in copy:
                *sources, _ = copy.split()
                for source in sources:
                    target = application / source.rstrip("/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    subprocess.run(["cp", "-r", str(ROOT / source.rstrip("/")), str(target)], check=True)
    (install,) = [run for run in parse(DOCKERFILE.read_text())[1][1].all("RUN") if "install.sh" in run]
    command = install.replace("/opt/venv", str(venv)).replace("${VARIANT}", "cpu").replace("${TORCH_INDEX}", "")
    plain = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    plain |= {name: os.environ[name] for name in ("HOME", "PIP_INDEX_URL", "PIP_CONFIG_FILE") if name in os.environ}
    subprocess.run(["bash", "-c", command], cwd=application, env=plain, check=True)
    checks = (
        "import actors, cluster, deployments, ray, torch, transformers\n"
        "for package in (actors, cluster, deployments):\n"
        f"    assert package.__file__.startswith({str(application)!r}), package.__file__\n"
    )
    path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(application), "HOME": str(tmp_path)}
    subprocess.run([venv / "bin" / "python", "-c", checks], cwd="/", env=path, check=True)
    shown = subprocess.run([venv / "bin" / "outrider", "--help"], cwd="/", env=path, capture_output=True, check=True)
    assert b"serve" in shown.stdout
