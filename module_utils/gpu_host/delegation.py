"""Delegations added to a wrapper class that hides its language model from speculative decoding.

SGLang asks the model for `set_eagle3_layers_to_capture`, `get_embed_and_head` and `set_embed_and_head`. A multimodal
wrapper without them fails with an AttributeError after the weights are loaded. What they would do is call the same
method of the wrapped language model, so that is what is added: found by syntax tree, inserted as text, between two
marks, and checked by syntax tree again before the file is replaced.
"""

from __future__ import annotations

import ast
import difflib
import os
import shutil
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .storage import replace_content

# Method -> its parameters behind self, and the call of the language model's.
METHODS = {
    "get_embed_and_head": ("", ""),
    "set_embed_and_head": (", embed, head", "embed, head"),
    "set_eagle3_layers_to_capture": (", layer_ids=None", "layer_ids"),
}
BEGIN = "# BEGIN model_delegation: speculative decoding asks the wrapper, its language model has the answers"
END = "# END model_delegation"
BACKUP = ".before-delegation"
# Names under which wrappers keep a language model, whatever its class is called.
LANGUAGE_MODELS = ("language_model", "llm")
# Bases that have none of the methods.
PLAIN_BASES = {"nn.Module", "torch.nn.Module", "Module", "object", "ABC", "abc.ABC", "Generic", "Protocol"}


class Refused(Exception):
    """The file can't be edited safely; the text is one sentence for the user."""


@dataclass(frozen=True)
class Plan:
    """`text` is the whole file as it is to be; `added` the methods delegated in it, `present` those that it has."""

    text: str
    class_name: str
    attribute: str
    added: tuple[str, ...]
    present: tuple[str, ...]
    unverified: tuple[str, ...] = ()


# Reading


def read(path: str) -> tuple[str, str]:
    """The source and its encoding, line ends as they are. Refused: missing, unreadable, no text."""
    try:
        with open(path, "rb") as file:
            encoding, _ = tokenize.detect_encoding(file.readline)
        with open(path, encoding=encoding, newline="") as file:
            return file.read(), encoding
    except FileNotFoundError:
        raise Refused(f"There is no file {path}; name the module of SGLang that defines the wrapper class.") from None
    except OSError as error:
        raise Refused(f"{path} can't be read: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise Refused(f"{path} is no Python source: {error}.") from error


def parse(text: str, path: str) -> ast.Module:
    """The syntax tree. Refused: no Python, or newer Python than the one that runs this."""
    try:
        return ast.parse(text, path)
    except (SyntaxError, ValueError) as error:
        where = f" at line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Refused(
            f"{path} is no source for Python {sys.version_info[0]}.{sys.version_info[1]}{where}; if the server's own "
            "Python is newer, run the module with that (ansible_python_interpreter)."
        ) from error


def without_block(text: str) -> str:
    """The source without what was added before, the line in front of it included."""
    lines = text.splitlines(keepends=True)
    begins = [number for number, line in enumerate(lines) if line.strip() == BEGIN]
    ends = [number for number, line in enumerate(lines) if line.strip() == END]
    if not begins and not ends:
        return text
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0] or begins[0] == 0:
        raise Refused("The marks of an earlier edit are not as they were left; put the backup back by hand.")
    return "".join(lines[: begins[0] - 1] + lines[ends[0] + 1 :])


def find_class(tree: ast.Module, name: str, path: str) -> ast.ClassDef:
    """The wrapper: the named class, or the only one that the file offers as EntryClass."""
    if not name:
        offered = sorted(_entry_classes(tree))
        if len(offered) != 1:
            what = f"offers {', '.join(offered)}" if offered else "offers no EntryClass"
            raise Refused(f"{path} {what}: name the wrapper class in class_name.")
        name = offered[0]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    if not found:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        close = difflib.get_close_matches(name, classes, n=1)
        raise Refused(f"{path} has no class {name}" + (f"; did you mean {close[0]}?" if close else "."))
    if len(found) > 1 or found[0] not in tree.body:
        raise Refused(f"{path} has the class {name} {len(found)} times or inside of something else; edit it by hand.")
    return found[0]


def _entry_classes(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets):
            items = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else [node.value]
            names |= {item.id for item in items if isinstance(item, ast.Name)}
    return names


def own_names(class_: ast.ClassDef) -> set[str]:
    """Methods and attributes that the class itself brings: definitions, class-level and self-assignments."""
    names: set[str] = set()
    for node in class_.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {name for name, _ in _self_assignments(class_)}


def _self_assignments(class_: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Each `self.name = value` in the class's methods."""
    for node in ast.walk(class_):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    yield target.attr, node.value


def dotted(node: ast.expr) -> str:
    """`nn.Module` for that expression; '' for anything but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else ""
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


@dataclass(frozen=True)
class Home:
    """A class and where it is defined, to look its bases up from there."""

    class_: ast.ClassDef
    tree: ast.Module
    path: str


def resolve(name: str, home: Home, depth: int = 8) -> Home | None:
    """The class of that name as seen from a file: defined there, or imported from another module of its folder."""
    if not name or "." in name or depth == 0:
        return None
    for node in home.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name and node is not home.class_:
            return Home(node, home.tree, home.path)
    module, original = imported(name, home.tree)
    path = os.path.join(os.path.dirname(home.path), module.rpartition(".")[2] + ".py")
    if not module or not os.path.exists(path) or os.path.realpath(path) == os.path.realpath(home.path):
        return None
    try:
        tree = parse(read(path)[0], path)
    except Refused:
        return None
    # A module that only passes the class on has no definition: look through its imports too.
    return resolve(original, Home(ast.ClassDef(original, [], [], [], []), tree, path), depth - 1)


def imported(name: str, tree: ast.Module) -> tuple[str, str]:
    """From which module a name comes, and what it is called there; '' for none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    return "", ""


def provided(home: Home, wanted: Sequence[str]) -> tuple[set[str], list[str]]:
    """Which methods the class or a base of it has, and the bases that could not be looked up."""
    have, unknown = own_names(home.class_) & set(wanted), []
    for base in home.class_.bases:
        name = dotted(base)
        if name in PLAIN_BASES or imported(name, home.tree)[0].split(".")[0] in ("torch", "transformers"):
            continue
        found = resolve(name, home)
        if found is None:
            unknown.append(name or "an expression")
        else:
            theirs, further = provided(found, wanted)
            have |= theirs
            unknown += further
    return have, unknown


def language_model(home: Home, attribute: str) -> tuple[str, set[str]]:
    """The attribute that holds the wrapped language model, and the names of the classes assigned to it."""
    classes: dict[str, set[str]] = {}
    for name, value in _self_assignments(home.class_):
        calls = [dotted(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)]
        if name in LANGUAGE_MODELS or any(call.endswith("ForCausalLM") for call in calls[:1]) or name == attribute:
            classes.setdefault(name, set()).update(call for call in calls[:1] if call)
    if attribute:
        if attribute not in classes:
            raise Refused(f"{home.class_.name} in {home.path} assigns no self.{attribute}; correct attribute.")
        return attribute, classes[attribute]
    if len(classes) == 1:
        return next(iter(classes.items()))
    if not classes:
        raise Refused(
            f"{home.class_.name} in {home.path} wraps no language model that can be told; name its attribute."
        )
    raise Refused(
        f"{home.class_.name} in {home.path} has several language models ({', '.join(sorted(classes))}); name one in "
        "attribute."
    )


# Writing


def block(attribute: str, methods: Sequence[str], indent: str, newline: str) -> str:
    """The lines to add, marks included."""
    step = "\t" if indent.startswith("\t") else "    "
    lines = [indent + BEGIN]
    for number, method in enumerate(methods):
        parameters, passed = METHODS[method]
        lines += [""] * (number > 0)
        lines.append(f"{indent}def {method}(self{parameters}):")
        lines.append(f"{indent}{step}return self.{attribute}.{method}({passed})")
    return newline.join([*lines, indent + END]) + newline


def plan(
    text: str, path: str, class_name: str = "", attribute: str = "", methods: Sequence[str] = tuple(METHODS)
) -> Plan:
    """What the file is to be with the delegations in. Refused: ambiguous, or it would not help."""
    base = without_block(text)
    tree = parse(base, path)
    class_ = find_class(tree, class_name, path)
    home = Home(class_, tree, path)
    have, unknown = provided(home, methods)
    missing = [method for method in METHODS if method in methods and method not in have]
    present = tuple(method for method in METHODS if method in have)
    if not missing:
        return Plan(base, class_.name, "", (), present)
    if unknown:
        raise Refused(
            f"{class_.name} in {path} inherits from {', '.join(unknown)}, which can't be looked up from there, so it "
            "is not known what it lacks; edit it by hand."
        )
    name, classes = language_model(home, attribute)
    unverified = []
    for class_of in sorted(classes):
        inner = resolve(class_of, home)
        if inner is None:
            unverified.append(class_of)
            continue
        theirs, further = provided(inner, missing)
        lacking = [method for method in missing if method not in theirs]
        if lacking and not further:
            raise Refused(
                f"The language model {class_of} of {class_.name} has no {', '.join(lacking)} either; this SGLang can't "
                "run EAGLE-3 with that model, use a newer one."
            )
        unverified += [class_of] * bool(lacking)
    new = _insert(base, class_, block(name, missing, _indent(base, class_, path), _newline(base)), path)
    _check(base, new, path, class_.name, name, missing)
    return Plan(new, class_.name, name, tuple(missing), present, tuple(unverified))


def _newline(text: str) -> str:
    first = text.splitlines(keepends=True)[0]
    return "\r\n" if first.endswith("\r\n") else "\n"


def _indent(text: str, class_: ast.ClassDef, path: str) -> str:
    first = class_.body[0]
    line = text.split("\n")[first.lineno - 1]
    indent = line[: len(line) - len(line.lstrip())]
    if first.lineno == class_.lineno or not indent:
        raise Refused(f"The class {class_.name} in {path} is written in one line; edit it by hand.")
    return indent


def _insert(text: str, class_: ast.ClassDef, added: str, path: str) -> str:
    # str.splitlines also parts at form feeds and the like, which Python does not count as line ends.
    lines = text.split("\n")
    end = class_.body[-1].end_lineno
    assert end is not None
    if end == len(lines) or (end == len(lines) - 1 and lines[-1] == ""):
        before, after = "\n".join(lines[:end]), ""
    else:
        before, after = "\n".join(lines[:end]), "\n".join(lines[end:])
    newline = "\r\n" if added.endswith("\r\n") else "\n"
    before = before[:-1] if before.endswith("\r") else before
    return before + newline + newline + added + after


def _check(base: str, new: str, path: str, class_name: str, attribute: str, methods: Sequence[str]) -> None:
    """That the new source is the old one plus exactly the delegations; anything else is a fault of ours."""
    tree = parse(new, path)
    compile(new, path, "exec", dont_inherit=True)
    class_ = find_class(tree, class_name, path)
    added = class_.body[-len(methods) :]
    for node, method in zip(added, methods):
        good = (
            isinstance(node, ast.FunctionDef)
            and node.name == method
            and len(node.body) == 1
            and isinstance(node.body[0], ast.Return)
            and isinstance(node.body[0].value, ast.Call)
            and dotted(node.body[0].value.func) == f"self.{attribute}.{method}"
        )
        if not good:
            raise Refused(f"The edit of {path} did not come out as meant; edit it by hand.")
    del class_.body[-len(methods) :]
    if ast.dump(tree) != ast.dump(parse(base, path)):
        raise Refused(f"The edit of {path} would change more than was meant; edit it by hand.")


def bytecode(path: str) -> list[str]:
    """Compiled forms of the module beside it."""
    stem, folder = os.path.splitext(os.path.basename(path))[0], os.path.join(os.path.dirname(path), "__pycache__")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if name.startswith(stem + ".") and name.endswith(".pyc")]


def write(path: str, text: str, encoding: str) -> None:
    """Replace the file as a whole; another name of it (uv links its cache) stays as it was."""
    replace_content(path, text.encode(encoding))


def find_file(folder: str, class_name: str) -> str:
    """The file of SGLang's models that defines the class. `folder` is the package, or its parent.

    Refused: none or several.
    """
    for below in ("srt/models", "sglang/srt/models", "python/sglang/srt/models", ""):
        models = os.path.join(folder, below) if below else folder
        if os.path.isdir(models) and (below or models.rstrip("/").endswith("models")):
            break
    else:
        raise Refused(f"{folder} holds no srt/models; give SGLang's package folder.")
    needle, found = f"class {class_name}".encode(), []
    for name in sorted(os.listdir(models)):
        path = os.path.join(models, name)
        if name.endswith(".py") and os.path.isfile(path):
            with open(path, "rb") as file:
                if any(line.startswith((needle + b"(", needle + b":")) for line in file):
                    found.append(path)
    if len(found) != 1:
        what = f"is in {' and '.join(found)}" if found else f"is in no file of {models}"
        raise Refused(f"The class {class_name} {what}; name the file in path.")
    return found[0]


def run(params: Mapping[str, Any], *, check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module `model_delegation` does and returns."""
    result: dict[str, Any] = {"changed": False, "path": "", "added": [], "present": [], "bytecode": [], "backup": ""}
    try:
        path = os.path.realpath(params["path"] or find_file(params["sglang_folder"], params["class_name"]))
        backup = path + BACKUP
        text, encoding = read(path)
        if params["state"] == "absent":
            made = Plan(without_block(text), params["class_name"], "", (), ())
            parse(made.text, path)
        else:
            made = plan(text, path, params["class_name"], params["attribute"], params["methods"] or tuple(METHODS))
    except Refused as reason:
        return {**result, "failed": True, "refused": True, "msg": f"Nothing was done. {reason}"}
    result.update(
        path=path,
        class_name=made.class_name,
        attribute=made.attribute,
        added=list(made.added),
        present=list(made.present),
        unverified=list(made.unverified),
        backup=backup if os.path.exists(backup) else "",
    )
    changed = made.text != text
    if changed:
        result["changed"] = True
        result["bytecode"] = bytecode(path)
        if diff:
            result["diff"] = {"before": text, "after": made.text, "before_header": path, "after_header": path}
    try:
        if changed and not check_mode:
            if params["state"] == "absent":
                _restore(path, backup, made.text, encoding)
            else:
                _keep(path, backup, without_block(text), encoding)
                write(path, made.text, encoding)
            for name in result["bytecode"]:
                os.unlink(name)
            result["backup"] = backup if os.path.exists(backup) else ""
    except OSError as error:
        reason_ = f"{error.filename or path} can't be written: {error.strerror}; check owner and mount."
        return {**result, "changed": False, "failed": True, "msg": reason_}
    result["msg"] = _message(result, params["state"])
    return result


def _keep(path: str, backup: str, original: str, encoding: str) -> None:
    """Keep the file without our lines; one of an older SGLang gives way."""
    shutil.copy2(path, backup)
    if read(backup)[0] != original:
        write(backup, original, encoding)


def _restore(path: str, backup: str, text: str, encoding: str) -> None:
    """Put the original back; where the file was edited by others too, only our lines go and the backup stays."""
    try:
        same = read(backup)[0].rstrip("\r\n") == text.rstrip("\r\n")
    except Refused:
        same = False
    if same:
        os.replace(backup, path)
    else:
        write(path, text, encoding)


def _message(result: Mapping[str, Any], state: str) -> str:
    name = f"{result['class_name'] or 'The wrapper'} in {result['path']}"
    if state == "absent":
        return (
            f"{result['path']} is as it came." if result["changed"] else f"{result['path']} has no added delegations."
        )
    if result["added"]:
        verb = "passes" if not result["changed"] else "now passes"
        return f"{name} {verb} {', '.join(result['added'])} on to its {result['attribute']}."
    return f"{name} has all methods itself."
