"""Writes docs/python-api.md from the docstrings of the package's public names; nothing is imported, so it needs no built extension.

    python python/api.py
"""

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / "docs" / "python-api.md"

HEAD = """# termwise in Python: reference

Generated from the docstrings by `python python/api.py`; a test compares them. Start with [Getting started in Python](getting-started.md).
"""

#: Documented modules and their files.
PACKAGES = {"termwise": "termwise/__init__.py", "termwise.torch": "termwise/torch/__init__.py", "termwise.hf": "termwise/hf.py"}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def public(tree: ast.Module) -> list[str]:
    """The names in ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError("a package without __all__")


def definition(path: Path, name: str) -> ast.AST | None:
    """The definition of a name: in a file, or in a file of the same package that it imports from."""
    tree = parsed(path)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name and not any(getattr(d, "id", "") == "overload" for d in node.decorator_list):
            return node
        if isinstance(node, ast.ImportFrom) and node.level == 1 and any(alias.name == name for alias in node.names):
            for place in (path.parent / f"{node.module}.py", path.parent / f"{node.module}.pyi"):
                if place.exists() and (found := definition(place, name)) is not None:
                    return found
    return None


def signature(node: ast.FunctionDef, bound: bool = False) -> str:
    arguments = node.args
    if bound and not any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list):
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{node.name}({ast.unparse(arguments)}){returns}"


def text(node: ast.AST) -> str:
    """A NumPy-style docstring as Markdown: sections become lists, examples become code."""
    lines, out, code, listed = inspect.cleandoc(ast.get_docstring(node) or "").splitlines(), [], False, False
    for line, after in pairwise([*lines, ""]):
        if line and set(line) == {"-"}:
            continue
        example = line.startswith((">>>", "...")) or (code and line.strip() != "")
        if example != code:
            out.append("```" if code else "```pycon")
        code = example
        plain = re.sub(r":\w+:(?=`)", "", line).replace("``", "`")
        if code:
            out.append(line)
        elif after and set(after) == {"-"}:
            listed = line in ("Parameters", "Attributes", "Returns", "Raises")
            out += [f"**{line}**", ""]
        elif listed and line and not line.startswith(" "):
            name, _, kind = plain.partition(" : ")
            out.append(f"- `{name}`" + (f" ({kind})" if kind else ""))
        elif listed and line.startswith("    "):
            out.append(f"  {plain.strip()}")
        else:
            out.append(plain)
    return "\n".join([*out, *(["```"] if code else [])])


def described(module: str, name: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [f"### {module}.{name}", f"```python\n{signature(node)}\n```", text(node)]
    fields = [
        f"- `{member.target.id}: {ast.unparse(member.annotation)}`"
        for member in node.body if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
    ]  # fmt: skip
    parts = [f"### class {module}.{name}", text(node), "\n".join(fields)]
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and (not member.name.startswith("_") or member.name == "__init__"):
            decorators = {getattr(d, "id", "") for d in member.decorator_list}
            title = member.name if "property" in decorators else signature(member, bound=True)
            about = text(member)
            if about or member.name == "__init__":
                title = title.replace("__init__", name).removesuffix(" -> None") if member.name == "__init__" else title
                parts.append(f"- `{title}`" + (f"\n{textwrap.indent(about, '  ')}" if about else ""))
    return parts


def page() -> str:
    parts = [HEAD.strip()]
    for module, file in PACKAGES.items():
        path = ROOT / file
        tree = parsed(path)
        parts += [f"## {module}", text(tree)]
        for name in public(tree):
            node = definition(path, name)
            if node is not None:
                parts += described(module, name, node)
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
