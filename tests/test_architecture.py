"""The rules of the house that no linter knows, checked on the source text.

Each rule is a function from sources (module name -> text) to a list of problems. It is run
on `src/`, where it must find none, and on a small bad example, where it must find some.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

Sources = dict[str, str]
Rule = Callable[[Sources], list[str]]

# What each package may import from, besides itself and the private modules at the root.
MAY_IMPORT = {
    "typing": set(),
    "ops": set(),
    "networks": {"ops"},
    "envs": {"ops"},
    "algorithms": {"ops", "networks", "envs"},
    "training": {"ops", "networks", "envs", "algorithms"},
}
HOST_MODULES = {
    "datetime",
    "io",
    "os",
    "pathlib",
    "pickle",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "time",
}
# `check_env` measures what a reset costs; it runs on the host, and nothing compiled sees it.
HOST_EXCEPTIONS = {("eqx_ppo.envs._conformance._cost", "time")}
HOST_FUNCTIONS = {"input", "open", "print"}
OPTIONAL_PACKAGES = {
    "PIL",
    "brax",
    "etils",
    "flax",
    "gymnasium",
    "gymnax",
    "imageio_ffmpeg",
    "jax2onnx",
    "matplotlib",
    "mediapy",
    "mujoco",
    "mujoco_menagerie",
    "mujoco_playground",
    "nnx_ppo",
    "onnxruntime",
    "rich",
    "scipy",
    "tensorboardX",
    "wandb",
    "warp",
}
OPEN_BASES = {"ABC", "Enum", "IntEnum", "NamedTuple", "Protocol", "StrEnum", "TypedDict"}


# --- Reading the source -------------------------------------------------------------------


@functools.cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def read_sources() -> Sources:
    sources = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text()
    return sources


def read_docs() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def part(module: str) -> str:
    """`ops` for `eqx_ppo.ops._gae`, `` for the root and its private modules."""
    below_root = module.split(".")[1:]
    return below_root[0] if below_root and not below_root[0].startswith("_") else ""


def imports(
    tree: ast.AST, *, at_import_time: bool = False
) -> Iterator[tuple[ast.stmt, str, str | None]]:
    """Yields `(statement, module, name)`; `name` is `None` for `import module`."""
    for node in walk_import_time(tree) if at_import_time else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, "." * node.level + (node.module or ""), alias.name


def walk_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, without the bodies of functions and of `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from walk_import_time(other)
            continue
        yield from walk_import_time(child)


def imported_modules(module: str, tree: ast.AST, sources: Sources, **options: bool) -> set[str]:
    """The modules of this library that `module` imports."""
    found = set()
    for _, source, name in imports(tree, **options):
        if name is not None and f"{source}.{name}" in sources:
            found.add(f"{source}.{name}")
        elif source.split(".")[0] == "eqx_ppo":
            found.add(source)
    return found - {module}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yields the calls of plain names: `f(x)`, not `a.f(x)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node, node.func.id


def last_name(node: ast.expr) -> str:
    """`Module` for `eqx.Module`, `Generic[T]` and `eqx.Module()` alike."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def classes(sources: Sources) -> Iterator[tuple[str, ast.ClassDef]]:
    for module, text in sources.items():
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.ClassDef):
                yield module, node


def public_names(module: str, text: str) -> dict[str, str]:
    """The names that a package offers, and the module each comes from.

    They are those in `__all__`, or imported `as` themselves.
    """
    offered, origin = set(), {}
    for node in parse(text).body:
        if isinstance(node, ast.Assign) and last_name(node.targets[0]) == "__all__":
            offered |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origin[alias.asname or alias.name] = node.module or module
                if alias.asname == alias.name:
                    offered.add(alias.name)
    return {name: origin.get(name, module) for name in sorted(offered)}


class Definition(NamedTuple):
    node: ast.stmt | None  # `None` for a module
    docstring: str | None


def definition(sources: Sources, module: str, name: str) -> Definition:
    """Follows re-exports from `module` to the statement that defines `name`."""
    if f"{module}.{name}" in sources:
        return Definition(None, ast.get_docstring(parse(sources[f"{module}.{name}"])))
    body = parse(sources[module]).body if module in sources else []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(sources, node.module or "", alias.name)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            if node.name == name:
                return Definition(node, ast.get_docstring(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(last_name, targets):
                return Definition(node, string_statement(following))
    return Definition(None, None)


def string_statement(node: ast.stmt | None) -> str | None:
    """The text of a statement that is only a string: the docstring of an assignment."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value
    return None


def all_public_names(sources: Sources) -> Iterator[tuple[str, str, str]]:
    """Yields `(package, name, module it comes from)`."""
    packages = {"eqx_ppo"} | {f"eqx_ppo.{package}" for package in MAY_IMPORT}
    for package in sorted(packages & sources.keys()):
        for name, origin in public_names(package, sources[package]).items():
            yield package, name, origin


# --- The rules ----------------------------------------------------------------------------


def imports_point_one_way(sources: Sources) -> list[str]:
    problems = []
    for module, text in sources.items():
        if module in ("eqx_ppo", "eqx_ppo.__main__"):
            continue
        own = part(module)
        if own and own not in MAY_IMPORT:
            problems.append(f"{module}: the package `{own}` has no place in MAY_IMPORT")
            continue
        allowed = MAY_IMPORT[own] | {own} if own else set()
        for other in sorted(imported_modules(module, parse(text), sources)):
            is_root = other == "eqx_ppo"
            if is_root or (part(other) and part(other) not in allowed):
                problems.append(f"{module} imports {other}")
    return problems


def no_import_cycles(sources: Sources) -> list[str]:
    graph = {
        module: imported_modules(module, parse(text), sources, at_import_time=True)
        for module, text in sources.items()
    }
    done: set[str] = set()
    problems = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            problems.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    return problems


def only_training_touches_the_host(sources: Sources) -> list[str]:
    problems = []
    for module, text in sources.items():
        if part(module) == "training" or module == "eqx_ppo.__main__":
            continue
        problems += [
            f"{module}:{node.lineno} imports {source}"
            for node, source, _ in imports(parse(text))
            if source.split(".")[0] in HOST_MODULES and (module, source) not in HOST_EXCEPTIONS
        ]
        problems += [
            f"{module}:{call.lineno} calls {name}"
            for call, name in calls(parse(text))
            if name in HOST_FUNCTIONS
        ]
    return problems


def no_future_annotations(sources: Sources) -> list[str]:
    return [
        f"{module}:{node.lineno} imports annotations from __future__"
        for module, text in sources.items()
        for node, source, name in imports(parse(text))
        if source == "__future__" and name == "annotations"
    ]


def classes_are_abstract_or_final(sources: Sources) -> list[str]:
    """A class is final, leaves something abstract, or is a base: subclassed, and saying so."""
    by_name = {node.name: node for _, node in classes(sources)}
    subclassed = {last_name(base) for node in by_name.values() for base in node.bases}

    def abstract_members(node: ast.ClassDef) -> set[str]:
        """The members of `node` and its bases that are still without an implementation."""
        inherited = [by_name[base] for base in map(last_name, node.bases) if base in by_name]
        missing = set().union(*map(abstract_members, inherited))
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                name = member.name
                is_abstract = "abstractmethod" in map(last_name, member.decorator_list)
            elif isinstance(member, ast.AnnAssign):
                name = last_name(member.target)
                is_abstract = bool(
                    re.search(r"\bAbstract(Class)?Var\b", ast.unparse(member.annotation))
                )
            else:
                continue
            missing = missing | {name} if is_abstract else missing - {name}
        return missing

    def is_abstract(node: ast.ClassDef) -> bool:
        return bool({last_name(base) for base in node.bases} & OPEN_BASES or abstract_members(node))

    def is_documented_base(node: ast.ClassDef) -> bool:
        text = (ast.get_docstring(node) or "").lower()
        return node.name in subclassed and ("subclass" in text or "base" in text)

    return [
        f"{module}:{node.lineno} `{node.name}` is neither abstract nor `typing.final`"
        for module, node in classes(sources)
        if "final" not in map(last_name, node.decorator_list)
        and not is_abstract(node)
        and not is_documented_base(node)
    ]


def no_attribute_guessing(sources: Sources) -> list[str]:
    problems = []
    for module, text in sources.items():
        for call, name in calls(parse(text)):
            with_default = name == "getattr" and len(call.args) > 2
            if name in ("hasattr", "locals") or with_default:
                problems.append(f"{module}:{call.lineno} calls {name}")
    return problems


def any_only_in_typing(sources: Sources) -> list[str]:
    problems = []
    for module, text in sources.items():
        if module == "eqx_ppo._typing":
            continue
        for node in ast.walk(parse(text)):
            imported = isinstance(node, ast.ImportFrom) and "Any" in {n.name for n in node.names}
            attribute = isinstance(node, ast.Attribute) and node.attr == "Any"
            quoted = isinstance(node, ast.arg | ast.AnnAssign) and any(
                isinstance(part, ast.Constant) and re.search(r"\bAny\b", str(part.value))
                for part in ast.walk(node.annotation or node)
            )
            if imported or attribute or quoted:
                problems.append(f"{module}:{node.lineno} uses Any")
    return problems


def public_signatures_are_annotated(sources: Sources) -> list[str]:
    """Every parameter and result of what the packages offer, and of its public methods."""
    problems = []
    for _, name, origin in all_public_names(sources):
        node = definition(sources, origin, name).node
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in members:
            if not isinstance(function, ast.FunctionDef):
                continue
            if function.name.startswith("_") and function.name not in ("__init__", "__call__"):
                continue
            problems += [
                f"{origin}: {name}.{function.name}({parameter.arg})"
                for parameter in ast.walk(function.args)
                if isinstance(parameter, ast.arg)
                and parameter.annotation is None
                and parameter.arg not in ("self", "cls")
            ]
            if function.returns is None and function.name != "__init__":
                problems.append(f"{origin}: {name}.{function.name} -> ?")
    return problems


def public_names_have_docstrings(sources: Sources) -> list[str]:
    return [
        f"{package}: `{name}` has no docstring"
        for package, name, origin in all_public_names(sources)
        if not definition(sources, origin, name).docstring
    ]


def public_names_are_in_the_reference(sources: Sources, docs: str) -> list[str]:
    documented = set(re.findall(r"^::: eqx_ppo(?:\.\w+)*\.(\w+)", docs, re.MULTILINE))
    return [
        f"{package}: `{name}` is on no page of docs/reference"
        for package, name, _ in all_public_names(sources)
        if name not in documented
    ]


def optional_packages_are_imported_late(sources: Sources) -> list[str]:
    problems = []
    for module, text in sources.items():
        for node, source, _ in imports(parse(text), at_import_time=True):
            if source.split(".")[0] in OPTIONAL_PACKAGES:
                problems.append(f"{module}:{node.lineno} imports {source} at import time")
        for node, source, _ in imports(parse(text)):
            if source.split(".")[0] == "mujoco_playground" and module != "eqx_ppo.envs._playground":
                problems.append(f"{module}:{node.lineno} imports {source}")
    return problems


# --- Each rule on the real source and on a bad example ------------------------------------

CASES: list[tuple[Rule, Sources]] = [
    (imports_point_one_way, {"eqx_ppo.ops._a": "from eqx_ppo.networks import Dense"}),
    (imports_point_one_way, {"eqx_ppo.networks._a": "import eqx_ppo.envs"}),
    (imports_point_one_way, {"eqx_ppo.envs._a": "def f():\n  from eqx_ppo.networks import Dense"}),
    (imports_point_one_way, {"eqx_ppo._tree": "from eqx_ppo.ops._gae import gae"}),
    (imports_point_one_way, {"eqx_ppo.training._a": "from eqx_ppo import Dense"}),
    (imports_point_one_way, {"eqx_ppo.utils._a": ""}),
    (
        no_import_cycles,
        {
            "eqx_ppo.ops": "from eqx_ppo.ops._a import a as a",
            "eqx_ppo.ops._a": "from eqx_ppo.ops import b",
        },
    ),
    (only_training_touches_the_host, {"eqx_ppo.algorithms._a": "from pathlib import Path"}),
    (only_training_touches_the_host, {"eqx_ppo.algorithms._a": "def f():\n  import os.path"}),
    (only_training_touches_the_host, {"eqx_ppo.networks._a": "print(1)"}),
    (no_future_annotations, {"eqx_ppo._a": "from __future__ import annotations"}),
    (classes_are_abstract_or_final, {"eqx_ppo.ops._a": "class A(eqx.Module):\n  x: int"}),
    (
        classes_are_abstract_or_final,
        {"eqx_ppo.ops._a": "class A:\n  '''No word.'''\n@final\nclass B(A): pass"},
    ),
    (
        classes_are_abstract_or_final,
        {
            "eqx_ppo.ops._a": (
                "class A(ABC):\n  @abstractmethod\n  def f(self): ...\n"
                "class B(A):\n  def f(self): ..."
            )
        },
    ),
    (no_attribute_guessing, {"eqx_ppo._a": "hasattr(x, 'y')"}),
    (no_attribute_guessing, {"eqx_ppo._a": "getattr(x, 'y', None)"}),
    (no_attribute_guessing, {"eqx_ppo._a": "locals()"}),
    (any_only_in_typing, {"eqx_ppo._a": "from typing import Any"}),
    (any_only_in_typing, {"eqx_ppo._a": "import typing\nx: typing.Any"}),
    (any_only_in_typing, {"eqx_ppo._a": "def f(x: 'dict[str, Any]'): ..."}),
    (
        public_signatures_are_annotated,
        {
            "eqx_ppo.ops": "from eqx_ppo.ops._a import f as f",
            "eqx_ppo.ops._a": "def f(x) -> int: ...",
        },
    ),
    (
        public_signatures_are_annotated,
        {
            "eqx_ppo.ops": "from eqx_ppo.ops._a import A as A",
            "eqx_ppo.ops._a": "class A:\n  def __call__(self, x: int): ...",
        },
    ),
    (
        public_names_have_docstrings,
        {
            "eqx_ppo.ops": "from eqx_ppo.ops._a import f as f",
            "eqx_ppo.ops._a": "def f(): ...",
        },
    ),
    (
        public_names_have_docstrings,
        {
            "eqx_ppo": "from eqx_ppo.ops import X\n__all__ = ['X']",
            "eqx_ppo.ops": "from eqx_ppo.ops._a import X as X",
            "eqx_ppo.ops._a": "X = int\nY = 1\n'''Documents Y.'''",
        },
    ),
    (optional_packages_are_imported_late, {"eqx_ppo.training._a": "import mediapy"}),
    (
        optional_packages_are_imported_late,
        {"eqx_ppo.envs._a": "def f():\n  from mujoco_playground import registry"},
    ),
]

GOOD: Sources = {
    "eqx_ppo": "from eqx_ppo.ops import f as f",
    "eqx_ppo._typing": "from typing import Any",
    "eqx_ppo.ops": "from eqx_ppo.ops._a import X as X, f as f",
    "eqx_ppo.ops._a": (
        "X = int\n'''Documents X.'''\n"
        "def f(x: int) -> int:\n  '''Doc.'''\n  return getattr(x, 'real')"
    ),
    "eqx_ppo.networks._a": (
        "from eqx_ppo.ops import f\n"
        "class Open(Base):\n  @abc.abstractmethod\n  def g(self): ...\n"
        "class StillOpen(Open):\n  def h(self): ...\n"
        "class Field(Base):\n  x: eqx.AbstractVar[int]\n"
        "class Marker(Base):\n  '''A base for tables.'''\n"
        "@typing.final\nclass Table(Marker): ...\n"
        "class Output(NamedTuple):\n  x: int\n"
    ),
    "eqx_ppo.envs._playground": "def f():\n  from mujoco_playground import registry",
    "eqx_ppo.training._a": "import os\nfrom eqx_ppo.ops._a import f\ndef g():\n  import mediapy",
}

RULES: list[Rule] = list(dict.fromkeys(rule for rule, _ in CASES))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source(rule: Rule):
    problems = rule(read_sources())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("rule", "bad"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_finds_what_is_wrong(rule: Rule, bad: Sources):
    assert rule(bad) != []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_what_is_right(rule: Rule):
    assert rule(GOOD) == []


def test_public_names_are_in_the_reference():
    problems = public_names_are_in_the_reference(read_sources(), read_docs())
    assert not problems, "\n".join(problems)


def test_reference_rule_finds_what_is_missing():
    docs = "::: eqx_ppo.ops.f\n\nSee `eqx_ppo.ops.X`."
    assert public_names_are_in_the_reference(GOOD, docs) == [
        "eqx_ppo.ops: `X` is on no page of docs/reference"
    ]
    assert public_names_are_in_the_reference(GOOD, docs + "\n::: eqx_ppo.ops.X\n") == []


def test_there_is_something_to_check():
    sources = read_sources()
    assert len(list(all_public_names(sources))) > 10
    assert {f"eqx_ppo.{package}" for package in MAY_IMPORT if f"eqx_ppo.{package}" in sources}
