"""The documents: their code runs, their commands and links are right, no example is skipped."""

import ast
import doctest
import importlib
import importlib.util
import re
import subprocess
import tomllib
import traceback
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import jax
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADAPTED = ("brax", "gymnasium", "gymnax")  # what blocks with the label `test: adapters` need
DOCUMENTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


class Block(NamedTuple):
    language: str
    label: str  # what the comment right before the block says: "test: skip", "command: test"
    line: int
    code: str


BLOCK = re.compile(
    r"(?:^<!-- (?P<label>[^>]*?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def blocks(text: str) -> list[Block]:
    return [
        Block(
            language=match["language"],
            label=match["label"] or "",
            line=text.count("\n", 0, match.start("code")),
            code=match["code"],
        )
        for match in BLOCK.finditer(text)
    ]


def python_blocks(page: Path) -> list[Block]:
    found = [block for block in blocks(page.read_text()) if block.language == "python"]
    return [block for block in found if block.label != "test: skip"]


def page_params() -> list:
    params = []
    for page in PAGES:
        labels = {block.label for block in python_blocks(page)}
        marks = [pytest.mark.playground, pytest.mark.slow] if "test: playground" in labels else []
        if "test: adapters" in labels:
            missing = [name for name in ADAPTED if importlib.util.find_spec(name) is None]
            reason = f"needs {', '.join(missing)}"
            marks += [pytest.mark.adapters, pytest.mark.slow]
            marks += [pytest.mark.skipif(missing != [], reason=reason)]
        if labels:
            params.append(pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks))
    return params


def command(name: str) -> str:
    """The single line of the README's block with the label `command: NAME`."""
    found = [b for b in blocks((ROOT / "README.md").read_text()) if b.label == f"command: {name}"]
    assert len(found) == 1
    lines = found[0].code.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("page", page_params())
def test_python_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    # Readers have JAX's own settings, not those of our tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in python_blocks(page):
            code = re.sub(r"\btotal_steps=[\d_]+", "total_steps=5_120", block.code)  # one iteration
            # Blank lines so that a traceback shows the line of the page.
            compiled = compile("\n" * block.line + code, str(page), "exec")
            if block.label == "test: raises":
                got, expected = reported(compiled, namespace), text_after(page, block)
                assert without_digits(got) == without_digits(expected)
            else:
                exec(compiled, namespace)


def reported(code: CodeType, namespace: dict[str, object]) -> str:
    """The error that a block raises, as the reader's terminal ends with it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the page says which)
        exec(code, namespace)
    lines = "".join(traceback.format_exception_only(caught.value)).splitlines()
    lines = [line for line in lines if line.strip("-") and "internal frames" not in line]
    return "\n".join(re.sub(r"^(\w+\.)+(?=\w+: )", "", line) for line in lines) + "\n"


def without_digits(text: str) -> str:
    """Measured magnitudes may differ between machines."""
    return re.sub(r"\d\.\d+e[+-]\d+", "#", text)


def text_after(page: Path, block: Block) -> str:
    """The block of text that follows a block of code."""
    following = [other for other in blocks(page.read_text()) if other.line > block.line]
    assert following[0].language == "text"
    return following[0].code


def test_blocks_are_found_with_their_labels():
    text = "<!-- test: skip -->\n```python\nx = 1\n```\ntext\n\n```bash\nls\n```\n"
    assert blocks(text) == [
        Block("python", "test: skip", 2, "x = 1\n"),
        Block("bash", "", 7, "ls\n"),
    ]


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) \{\n.*?^\}$", script, re.DOTALL | re.MULTILINE)
    assert function is not None
    extracted = subprocess.run(
        ["bash", "-c", f"{function[0]}\nreadme_command test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert extracted == command("test") + "\n"
    assert command("test").endswith("python -m pytest")
    assert 'eval "$test_command"' in script


def test_quick_start_command_runs_an_example_that_exists():
    example = re.search(r"python (examples/\w+\.py)$", command("quick start"))
    assert example is not None
    assert (ROOT / example[1]).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


def test_version_is_the_newest_of_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"]


def module_names() -> list[str]:
    paths = (path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py"))
    return sorted(
        ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts)
        for path in paths
        if path.name != "__main__.py"
    )


def documented_nodes(tree: ast.AST) -> list[ast.AST]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("name", module_names())
def test_pytest_finds_every_docstring_example(name: str):
    """A decorator that hides where a function comes from would hide its examples too."""
    module = importlib.import_module(name)
    text = Path(module.__file__).read_text()
    written = sum(
        len(doctest.DocTestParser().get_examples(ast.get_docstring(node) or ""))
        for node in documented_nodes(ast.parse(text))
    )
    tests = doctest.DocTestFinder().find(module)
    assert sum(len(test.examples) for test in tests) == written
