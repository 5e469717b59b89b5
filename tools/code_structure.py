"""Measure a checkout from its syntax trees: packages, rooms, circles of imports, and what is larger than the limits.

Product code is every `TOP/drover_*` package with an `__init__.py`, for any TOP, without generated modules (*_pb2*).
Imports at any depth count, those under TYPE_CHECKING too. Nothing of the checkout is imported or run.

A room of a package is a sub-package or a flat module at its root. A room is one floor above the highest room that it
imports; the rooms of a circle share a floor. In a circle some imports run back up: counted are those of the order that
has the fewest.
"""

from __future__ import annotations

import ast
import functools
import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_ATTRIBUTES = 15  # of an instance, inherited ones included
MAX_PUBLIC_METHODS = 20  # inherited ones and properties included
MAX_CONSTRUCTOR_PARAMETERS = 6  # without self, *args and **kwargs
MAX_FUNCTION_LINES = 50
MAX_SLIVER_LINES = 99  # of a module that one other imports
EXACT_ROOMS = 14  # circles of more rooms are ordered by improvement, not by trying every order
# Generators written by strangers, whom nobody here reads or mends: their classes and functions have no limits.
STRANGERS = tuple(f"drover_simulator.strangers.{name}" for name in "abcdf")

Graph = Mapping[str, Iterable[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, and of a class or function the name with those that it lies in."""

    name: str
    node: ast.AST
    in_class: bool


@dataclass(frozen=True)
class Module:
    """One file of product code. `path` is relative to the checkout."""

    name: str
    package: str
    path: str
    text: str
    statements: tuple[Statement, ...]

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def in_sub_package(self) -> bool:
        """True if it lies in a sub-package, or is one's `__init__`."""
        return self.name.count(".") > (0 if self.is_package else 1)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def room(self) -> str | None:
        """The sub-package or flat module at the package's root that holds it; None for the root's own `__init__`."""
        return self.name.split(".")[1] if "." in self.name else None


@dataclass(frozen=True, slots=True)
class ClassSize:
    """What an instance of a class carries. Constructor parameters are those of its own `__init__`."""

    package: str
    module: str
    name: str
    attributes: int
    public_methods: int
    constructor_parameters: int

    @property
    def past_a_limit(self) -> bool:
        return (
            self.attributes > MAX_ATTRIBUTES
            or self.public_methods > MAX_PUBLIC_METHODS
            or self.constructor_parameters > MAX_CONSTRUCTOR_PARAMETERS
        )


@dataclass(frozen=True, slots=True)
class FunctionSize:
    """Lines from `def` to the end; parameters without self or cls, *args and **kwargs."""

    package: str
    module: str
    name: str
    lines: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Rooms:
    """The rooms of one package. Imports are pairs of modules: importer, imported."""

    flat_modules: tuple[str, ...]
    sub_packages: tuple[str, ...]
    floors: tuple[tuple[str, ...], ...]  # lowest first
    circles: tuple[tuple[str, ...], ...]
    back_imports: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class _Class:
    module: Module
    name: str  # with the classes that it lies in
    node: ast.ClassDef


class Codebase:
    """The product code of one checkout, parsed."""

    def __init__(self, root: Path) -> None:
        """Parse every product module below `root`.

        Raises:
            SyntaxError: a file is not valid Python.
        """
        self.modules: dict[str, Module] = {}
        self.folders: dict[str, str] = {}  # package -> its folder, relative to the root
        collects = gc.isenabled()
        gc.disable()  # all that is made stays: to look for garbage in it takes three times as long as to parse it
        try:
            for start in sorted(root.glob("[!.]*/drover_*/__init__.py")):
                folder = start.parent
                self.folders[folder.name] = folder.relative_to(root).as_posix()
                for file in sorted(folder.rglob("*.py")):
                    if "_pb2" not in file.name:
                        self._add(root, folder, file)
        finally:
            if collects:
                gc.enable()

    def _add(self, root: Path, folder: Path, file: Path) -> None:
        parts = list(file.relative_to(folder.parent).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = file.read_text("utf-8")
        path = file.relative_to(root).as_posix()
        self.modules[name] = Module(name, folder.name, path, text, tuple(statements(ast.parse(text, path))))

    def of(self, package: str) -> list[Module]:
        return [module for module in self.modules.values() if module.package == package]

    # Imports

    @functools.cached_property
    def imports(self) -> dict[str, frozenset[str]]:
        """Module -> the product modules that it imports. A name out of a package is an import of its `__init__`."""
        return {name: frozenset(self._imported(module)) - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in (each.node for each in module.statements):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom):
                origin = _origin(module, node)
                for alias in node.names:
                    if f"{origin}.{alias.name}" in self.modules:
                        yield f"{origin}.{alias.name}"
                    elif origin in self.modules:
                        yield origin

    def module_circles(self) -> list[tuple[str, ...]]:
        return [group for group in components(self.imports) if len(group) > 1]

    def room_imports(self, package: str) -> dict[tuple[str, str], list[tuple[str, str]]]:
        """Return the imports between the rooms of a package: (room, imported room) -> pairs of modules."""
        found: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for module in self.of(package):
            for name in sorted(self.imports[module.name]):
                other = self.modules[name]
                if other.package == package and module.room and other.room and module.room != other.room:
                    found.setdefault((module.room, other.room), []).append((module.name, name))
        return found

    def rooms(self, package: str) -> Rooms:
        modules = self.of(package)
        inside = {module.room for module in modules if module.room and module.in_sub_package}
        flat = {module.room for module in modules if module.room and not module.in_sub_package}
        between = self.room_imports(package)
        graph: dict[str, set[str]] = {room: set() for room in sorted(inside | flat)}
        for room, other in between:
            graph[room].add(other)
        circles = [group for group in components(graph) if len(group) > 1]
        back: list[tuple[str, str]] = []
        for circle in circles:
            weights = {pair: len(between[pair]) for pair in between if {*pair} <= {*circle}}
            for pair in backward(best_order(circle, weights), weights):
                back += between[pair]
        return Rooms(tuple(sorted(flat)), tuple(sorted(inside)), floors(graph), tuple(circles), tuple(sorted(back)))

    def slivers(self) -> list[tuple[str, str, int]]:
        """Return modules of up to MAX_SLIVER_LINES that one module imports: (module, importer, lines)."""
        importers: dict[str, list[str]] = {}
        for name, imported in self.imports.items():
            for other in imported:
                importers.setdefault(other, []).append(name)
        return [
            (name, importers[name][0], module.lines)
            for name, module in self.modules.items()
            if len(importers.get(name, [])) == 1 and not module.is_package and module.lines <= MAX_SLIVER_LINES
        ]

    # Classes and functions

    def class_sizes(self) -> list[ClassSize]:
        return [
            ClassSize(
                found.module.package,
                found.module.name,
                found.name,
                len({name for node in line for name in _attributes(node)}),
                len({name for node in line for name in _public_methods(node)}),
                _constructor_parameters(found.node),
            )
            for found in self._classes.values()
            if not found.module.name.startswith(STRANGERS)
            for line in [[each.node for each in self._with_bases(found)]]
        ]

    def function_sizes(self) -> list[FunctionSize]:
        return [
            FunctionSize(
                module.package, module.name, each.name, _lines(each.node), len(_parameters(each.node, each.in_class))
            )
            for module in self.modules.values()
            for each in module.statements
            if isinstance(each.node, Function) and not module.name.startswith(STRANGERS)
        ]

    @functools.cached_property
    def _classes(self) -> dict[tuple[str, str], _Class]:
        return {
            (module.name, each.name): _Class(module, each.name, each.node)
            for module in self.modules.values()
            for each in module.statements
            if isinstance(each.node, ast.ClassDef)
        }

    @functools.cached_property
    def _names(self) -> dict[str, dict[str, str]]:
        """Module -> what its imports call a name -> the full name."""
        found: dict[str, dict[str, str]] = {}
        for module in self.modules.values():
            names = found.setdefault(module.name, {})
            for node in (each.node for each in module.statements):
                if isinstance(node, ast.ImportFrom):
                    names |= {each.asname or each.name: f"{_origin(module, node)}.{each.name}" for each in node.names}
                elif isinstance(node, ast.Import):
                    names |= {each.asname: each.name for each in node.names if each.asname}
        return found

    def _with_bases(self, found: _Class) -> list[_Class]:
        """Return the class and every class of the code base that it inherits from."""
        line = [found]
        for each in line:  # it grows meanwhile
            bases = (self._find(each.module.name, _dotted(base)) for base in each.node.bases)
            line += [base for base in bases if base is not None and base not in line]
        return line

    def _find(self, module: str, name: str, depth: int = 0) -> _Class | None:
        """Return the class that a dotted name means in a module; follows imports, also through other modules."""
        if (module, name) in self._classes:
            return self._classes[module, name]
        first, _, rest = name.partition(".")
        full = ".".join(filter(None, (self._names.get(module, {}).get(first, first), rest)))
        origin = full
        while "." in origin and origin not in self.modules:
            origin = origin.rpartition(".")[0]
        if origin not in self.modules or depth > 8:
            return None
        return self._find(origin, full.removeprefix(f"{origin}."), depth + 1)


# Graphs


def components(graph: Graph) -> list[tuple[str, ...]]:
    """Return the strongly connected components, each sorted; those that are imported come first."""
    order: list[str] = []
    seen: set[str] = set()
    reverse: dict[str, list[str]] = {node: [] for node in graph}
    for start in sorted(graph):
        for node in sorted(graph[start]):
            reverse[node].append(start)
        _after(start, graph, seen, order)
    groups: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for start in reversed(order):
        group: list[str] = []
        _after(start, reverse, taken, group)
        if group:
            groups.append(tuple(sorted(group)))
    return groups[::-1]


def _after(start: str, graph: Graph, seen: set[str], order: list[str]) -> None:
    """Append what is reached from `start` and not seen yet to `order`, each node after those that it leads to."""
    stack = [(start, iter(sorted(graph[start])))] if start not in seen else []
    seen.add(start)
    while stack:
        node, ahead = stack[-1]
        following = next((other for other in ahead if other not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(sorted(graph[following]))))


def floors(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return the nodes of each floor, lowest first."""
    floor: dict[str, int] = {}
    for group in components(graph):
        below = [floor[other] for node in group for other in graph[node] if other not in group]
        floor |= dict.fromkeys(group, max(below, default=-1) + 1)
    return tuple(tuple(sorted(n for n in floor if floor[n] == level)) for level in range(len({*floor.values()})))


def backward(order: Iterable[str], weights: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """Return the edges that run back up where `order` lists nodes from the top down."""
    place = {node: at for at, node in enumerate(order)}
    return [(node, other) for node, other in weights if place[node] > place[other]]


def best_order(nodes: Iterable[str], weights: Mapping[tuple[str, str], int]) -> list[str]:
    """Return the order from the top down in which the least weight runs back up; near it for more than EXACT_ROOMS."""
    nodes = sorted(nodes)
    return _tried_order(nodes, weights) if len(nodes) <= EXACT_ROOMS else _improved_order(nodes, weights)


def _tried_order(nodes: list[str], weights: Mapping[tuple[str, str], int]) -> list[str]:
    """Best order of every set of nodes from those of its subsets: node n is bit n."""
    best: list[tuple[int, list[int]]] = [(0, [])] * (1 << len(nodes))
    weight = [[weights.get((node, other), 0) for other in nodes] for node in nodes]
    for chosen in range(1, len(best)):
        inside = [n for n in range(len(nodes)) if chosen >> n & 1]
        # n is the lowest: what it imports of the others runs up.
        best[chosen] = min(
            (best[chosen ^ 1 << n][0] + sum(weight[n][m] for m in inside if m != n), [*best[chosen ^ 1 << n][1], n])
            for n in inside
        )
    return [nodes[n] for n in best[-1][1]]


def _improved_order(nodes: list[str], weights: Mapping[tuple[str, str], int]) -> list[str]:
    """Move one node after another to its best place until no move helps."""

    def cost(order: list[str]) -> int:
        return sum(weights[pair] for pair in backward(order, weights))

    surplus = Counter(nodes)
    for (node, other), weight in weights.items():
        surplus[node] += weight
        surplus[other] -= weight
    order, before = sorted(nodes, key=lambda node: (-surplus[node], node)), -1
    while cost(order) != before:
        before = cost(order)
        for node in nodes:
            others = [other for other in order if other != node]
            order = min(([*others[:at], node, *others[at:]] for at in range(len(nodes))), key=cost)
    return order


# Syntax trees


def _origin(module: Module, node: ast.ImportFrom) -> str:
    """Return the full name of what a `from` statement imports from."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*package, *filter(None, [node.module])])


def _dotted(node: ast.expr) -> str:
    """Return a base class as written, without what is in brackets."""
    return ast.unparse(node.value if isinstance(node, ast.Subscript) else node)


def statements(tree: ast.AST, inside: str = "", in_class: bool = False) -> Iterator[Statement]:
    """Yield every statement at any depth. Expressions hold no imports, classes or functions and are left out."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, block, ()):
            if isinstance(node, ast.ClassDef | Function):
                name = f"{inside}{node.name}"
                yield Statement(name, node, in_class)
                yield from statements(node, f"{name}.", isinstance(node, ast.ClassDef))
            else:
                yield Statement("", node, in_class)
                yield from statements(node, inside, in_class)


def _decorated(node: Function | ast.ClassDef, *names: str) -> bool:
    written = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return any(ast.unparse(each).rpartition(".")[2] in names for each in written)


def _lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(node: Function, in_class: bool) -> list[str]:
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return names[1:] if in_class and not _decorated(node, "staticmethod") else names


def _constructor_parameters(node: ast.ClassDef) -> int:
    """Count those of a written `__init__`; what a dataclass makes of its fields is counted as attributes."""
    own = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
    return max((len(_parameters(each, True)) for each in own), default=0)


def _public_methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, Function) and not each.name.startswith("_")}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the instance attributes that a class sets or declares itself: fields, slots, `self.x = ...` anywhere."""
    is_record = _decorated(node, "dataclass") or any(
        _dotted(base).rpartition(".")[2] in {"NamedTuple", "TypedDict"} for base in node.bases
    )
    found: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            kind = _dotted(each.annotation).rpartition(".")[2]
            if kind not in {"ClassVar", "InitVar", "KW_ONLY"} and (is_record or each.value is None):
                found.add(each.target.id)
        elif isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__slots__":
            found |= {n.value for n in ast.walk(each.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        elif isinstance(each, Function) and not _decorated(each, "staticmethod", "classmethod"):
            found |= _assigned(each)
    properties = {each.name for each in node.body if isinstance(each, Function) and _decorated(each, "property")}
    return found - properties - {"__weakref__", "__dict__"}


def _assigned(method: Function) -> set[str]:
    """Return the attributes that a method assigns on its first parameter."""
    first = [each.arg for each in (*method.args.posonlyargs, *method.args.args)][:1]
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and [node.value.id] == first
    }
