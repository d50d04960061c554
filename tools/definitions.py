"""Prove that a change only moves code: compare all top-level definitions of the product at two commits.

python -m tools.definitions BEFORE AFTER [--rename OLD.MODULE:NAME=NEW_NAME] [--once NAME] [--list FILE] [--circles]

BEFORE and AFTER are commits, or ``--worktree`` for the files of the working tree. A definition is a function, a class
or an assignment of a module. The tool compares the definitions as ``ast.dump`` without positions and without imports.
In the dump, each name that stands for an object of a module is replaced by the definition that it refers to. So a
definition that moves to another file is the same definition, and so are all that use it, under whatever module or
alias. A name that now refers to another object makes a difference, also where both objects have the same name.

A definition is known by its name. Where several definitions have the same name, a hash of the content is added.
Strings that name a module of the product, or an object of one, are compared by what they name, too. An annotation
means the same in quotes and without them. ``__all__`` and the docstrings of modules are not compared.

``--rename`` says that a definition has a new name. ``--once`` says that equal definitions of this name, which stood in
several files, stand in fewer now. A file for ``--list`` has one rename, or one ``once NAME``, on each line.

Statements of a module that are neither import nor definition have effects. The tool lists them. They must be the same,
and those of one file must keep their order. Compiled sources (.pyx, .pxd) are compared as lines without imports.

The exit code is 0 if only moves and the named renames were found, else 1. ``--circles`` prints the circles of imports
between files of AFTER, and a circle of imports that run makes the exit code 1, too.
"""

import argparse
import ast
import hashlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.product import PACKAGES, WORKTREE, Module, for_types_only, module_circles, sources

_NAMED = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:/\w+)+\.py\b|\b(?:{'|'.join(PACKAGES)})(?:[.:]\w+)+")
"""A module in a string, as path or as Python names it, perhaps with an object: ``supervisor.loop:run``."""
_TOKEN = re.compile("⟦([^⟧:]*)(?::([^⟧]*))?⟧")
"""A reference in a dump: a module, and the name of a definition in it unless the module itself is meant."""


@dataclass(frozen=True)
class Ref:
    """What a name refers to: an object of a module, or a module of the product."""

    module: str
    name: str = ""

    @property
    def token(self) -> str:
        return f"⟦{self.module}:{self.name}⟧" if self.name else f"⟦{self.module}⟧"


@dataclass
class Namespace:
    """The names of one module: what it defines, and what it imports."""

    module: Module
    definitions: dict[str, list[ast.stmt]] = field(default_factory=lambda: defaultdict(list))
    """The statements that define each name, in order. A statement with effects may define names as well."""
    effects: list[ast.stmt] = field(default_factory=list)
    docs: dict[int, str] = field(default_factory=dict)
    """The documentation below an assignment, by the place of the assignment among the statements."""
    imports: dict[str, str] = field(default_factory=dict)
    """What each imported name stands for, with dots."""

    @classmethod
    def of(cls, module: Module) -> "Namespace":
        space = cls(module)
        space._read(ast.parse(module.source).body)  # a tree of its own, since the resolver changes it
        return space

    def _read(self, body: list[ast.stmt]) -> None:
        last: ast.stmt | None = None
        for statement in body:
            previous, last = last, statement
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.imports.update(imported(statement))
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions[statement.name].append(statement)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and (names := _plain_targets(statement)):
                for name in names:
                    self.definitions[name].append(statement)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(previous, ast.Assign | ast.AnnAssign):
                    self.docs[id(previous)] = str(statement.value.value)
            elif isinstance(statement, ast.If) and for_types_only(statement):
                self._read(statement.body)
                self._read(statement.orelse)
            else:
                self.effects.append(statement)
                bindings = Bindings.of([statement])
                self.imports.update(bindings.imports)
                for name in bindings.names - bindings.imports.keys():
                    if name not in self.definitions:
                        self.definitions[name].append(statement)


def imported(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, each with what it stands for."""
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            yield alias.asname or alias.name, f"{statement.module}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            yield alias.name.partition(".")[0], alias.name.partition(".")[0]


def _plain_targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names that an assignment defines, or nothing if it changes an object: ``a.b = 1``, ``a[b] = 1``."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]
    return [t.id for t in flat if isinstance(t, ast.Name)] if all(isinstance(t, ast.Name) for t in flat) else []


@dataclass
class Bindings(ast.NodeVisitor):
    """The names that a scope binds, without those of the scopes inside it."""

    names: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    """Names that the scope declares global or nonlocal."""

    @classmethod
    def of(cls, body: Iterable[ast.AST]) -> "Bindings":
        found = cls()
        for node in body:
            found.visit(node)
        return found

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.imports.update(imported(node))
        self.names.update(name for name, _ in imported(node))

    visit_ImportFrom = visit_Import

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.elsewhere.update(node.names)

    visit_Nonlocal = visit_Global

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names.add(node.name)
        self._visit_all([*node.decorator_list, node.args, node.returns])

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arguments(self, node: ast.arguments) -> None:
        self._visit_all([*node.defaults, *node.kw_defaults])  # what else stands there belongs to the function's scope

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)

    def visit_ListComp(self, node: ast.AST) -> None:
        """Find the names that ``:=`` binds in a comprehension: they belong to the scope around it."""
        self.names.update(
            inner.target.id
            for inner in ast.walk(node)
            if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name)
        )

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._visit_named(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._visit_named(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._visit_named(node)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.names.update([node.rest] if node.rest else [])
        self.generic_visit(node)

    def _visit_named(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        self.names.update([node.name] if node.name else [])
        self.generic_visit(node)

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)


@dataclass
class Scope:
    """A function, class, lambda or comprehension around a name."""

    bindings: Bindings
    is_class: bool = False

    def knows(self, name: str) -> bool:
        return name in self.bindings.names and name not in self.bindings.elsewhere


class Resolver(ast.NodeTransformer):
    """Replace the names in a statement of a module by references, and drop its imports. Changes the statement."""

    def __init__(self, product: "Product", module: str) -> None:
        self._product = product
        self._module = module
        self._scopes: list[Scope] = []

    def _dotted(self, name: str) -> str | None:
        """Return with dots what a name stands for, or None if it is a local variable, a builtin or unknown."""
        for place, scope in enumerate(reversed(self._scopes)):
            if scope.knows(name) and not (scope.is_class and place):
                return scope.bindings.imports.get(name)
        space = self._product.spaces[self._module]
        if name in space.definitions:
            return f"{self._module}.{name}"
        return space.imports.get(name)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        dotted = self._dotted(node.id)
        return node if dotted is None else ast.Name(self._product.resolve(dotted), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        chain = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and (dotted := self._dotted(inner.id)) is not None:
            return ast.Name(self._product.resolve(".".join([dotted, *reversed(chain)])), node.ctx)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            return ast.Constant(_NAMED.sub(self._product.mention, node.value))
        return node

    def visit_Import(self, node: ast.AST) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        node.returns = self._annotation(node.returns)
        self._outer_arguments(node.args)
        self._enter(node, [*node.body], [*_parameters(node.args)])
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._outer_arguments(node.args)
        self._scopes.append(Scope(_named(Bindings.of([node.body]), _parameters(node.args))))
        node.body = self.visit(node.body)
        self._scopes.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        for name in ("decorator_list", "bases", "keywords"):
            setattr(node, name, [self.visit(inner) for inner in getattr(node, name)])
        self._enter(node, node.body, [], is_class=True)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = self._annotation(node.annotation) or node.annotation
        node.target = self.visit(node.target)
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> ast.AST:
        first = node.generators[0]
        first.iter = self.visit(first.iter)  # Python evaluates it outside of the comprehension
        targets = Bindings.of([generator.target for generator in node.generators])
        self._scopes.append(Scope(targets))
        for generator in node.generators:
            generator.target = self.visit(generator.target)
            generator.iter = generator.iter if generator is first else self.visit(generator.iter)
            generator.ifs = [self.visit(test) for test in generator.ifs]
        for name in ("key", "value", "elt"):
            if hasattr(node, name):
                setattr(node, name, self.visit(getattr(node, name)))
        self._scopes.pop()
        return node

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def _enter(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        body: list[ast.stmt],
        parameters: list[str],
        *,
        is_class: bool = False,
    ) -> None:
        self._scopes.append(Scope(_named(Bindings.of(body), parameters), is_class))
        node.body = [changed for statement in body if (changed := self.visit(statement)) is not None]
        self._scopes.pop()

    def _outer_arguments(self, arguments: ast.arguments) -> None:
        """Resolve defaults and annotations, which belong to the scope around the function."""
        arguments.defaults = [self.visit(default) for default in arguments.defaults]
        arguments.kw_defaults = [default and self.visit(default) for default in arguments.kw_defaults]
        for argument in _arguments(arguments):
            argument.annotation = self._annotation(argument.annotation)

    def _annotation(self, node: ast.expr | None) -> ast.expr | None:
        return None if node is None else self.visit(Unquoted().visit(node))


class Unquoted(ast.NodeTransformer):
    """Replace the quoted types in an annotation by the types."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        try:
            unquoted: ast.AST = self.visit(ast.parse(node.value.strip(), mode="eval").body)
        except SyntaxError:
            return node
        return unquoted

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        what = ast.unparse(node.value).rpartition(".")[2]
        if what == "Annotated" and isinstance(node.slice, ast.Tuple):
            node.slice.elts[0] = self.visit(node.slice.elts[0])
        elif what != "Literal":
            node.slice = self.visit(node.slice)
        return node


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    single = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *single]


def _parameters(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in _arguments(arguments)]


def _named(bindings: Bindings, parameters: Iterable[str]) -> Bindings:
    bindings.names.update(parameters)
    return bindings


@dataclass
class Definition:
    """One top-level definition, or one statement with effects."""

    module: str
    names: list[str]
    """The names that it defines, or none for a statement with effects."""
    template: str
    """Its dump, with a token for each reference."""
    line: int

    @property
    def shown(self) -> str:
        return f"{self.module}:{', '.join(self.names) or f'line {self.line}'}"


class Product:
    """All definitions of the product at one commit."""

    def __init__(self, modules: Collection[Module], renames: Mapping[Ref, str] | None = None) -> None:
        self.spaces = {module.name: Namespace.of(module) for module in modules}
        self.renames = renames or {}
        for ref in self.renames:
            if ref.module not in self.spaces or ref.name not in self.spaces[ref.module].definitions:
                raise SystemExit(f"--rename: {ref.module}:{ref.name} is not defined")
        self.definitions: list[Definition] = []
        self.effects: list[Definition] = []
        by_content: dict[Ref, list[str]] = defaultdict(list)
        for name, space in self.spaces.items():
            names: dict[int, list[str]] = defaultdict(list)
            statements: dict[int, ast.stmt] = {}
            for defined, places in space.definitions.items():
                for statement in places:
                    names[id(statement)].append(defined)
                    statements[id(statement)] = statement
            statements.update((id(statement), statement) for statement in space.effects)
            effects = {id(statement) for statement in space.effects}
            for place, statement in sorted(statements.items(), key=lambda pair: pair[1].lineno):
                if names[place] == ["__all__"]:
                    continue  # it lists names, as an import does
                template = self._template(name, statement, space.docs.get(place, ""))
                item = Definition(name, [] if place in effects else names[place], template, statement.lineno)
                (self.effects if place in effects else self.definitions).append(item)
                for defined in names[place]:
                    by_content[Ref(name, defined)].append(template)
        self.contents = {ref: "\n".join(templates) for ref, templates in by_content.items()}
        """The templates of what each name of a module stands for."""

    def _template(self, module: str, statement: ast.stmt, doc: str) -> str:
        line = statement.lineno
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own = Ref(module, statement.name).token
            changed = Resolver(self, module).visit(statement)
            changed.name = own
        else:
            changed = Resolver(self, module).visit(statement)
        statement.lineno = line
        return ast.dump(changed) + _NAMED.sub(self.mention, doc)

    def resolve(self, dotted: str) -> str:
        """Return the token of what a dotted name refers to, with the attributes behind it; the name if not ours."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if module in self.spaces:
                return self._within(module, parts[end:])
        return dotted

    def _within(self, module: str, rest: list[str]) -> str:
        if not rest:
            return Ref(module).token
        space = self.spaces[module]
        if rest[0] in space.definitions:
            return ".".join([Ref(module, rest[0]).token, *rest[1:]])
        if rest[0] in space.imports and space.imports[rest[0]] != f"{module}.{rest[0]}":
            return self.resolve(".".join([space.imports[rest[0]], *rest[1:]]))
        return ".".join([Ref(module).token, *rest])

    def mention(self, found: "re.Match[str]") -> str:
        """Return the token for a module or an object that a string names, or the text if there is no such module."""
        text = found[0]
        if text.endswith(".py") and "/" in text:
            name = text.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            return Ref(name).token if name in self.spaces else text
        parts = re.split("([.:])", text)
        for end in range(len(parts), 0, -2):
            module = "".join(parts[:end]).replace(":", ".")
            if module in self.spaces and end > 1:
                space = self.spaces[module]
                if len(parts) > end + 1 and parts[end + 1] in {*space.definitions, *space.imports}:
                    return self._within(module, [parts[end + 1]]) + "".join(parts[end + 2 :])
                return Ref(module).token + "".join(parts[end:])
        return text

    def new_name(self, ref: Ref) -> str:
        return self.renames.get(ref, ref.name)


class Identities:
    """What each definition is known by, in two products that are compared."""

    ROUNDS = 3
    """How far a hash of content looks: at the names a definition uses, at the contents behind these, and once more."""

    def __init__(self, before: Product, after: Product) -> None:
        self._moves: dict[str, str] = {}
        products = (before, after)
        known = [{ref: product.new_name(ref) for ref in product.contents} for product in products]
        for _ in range(self.ROUNDS):
            shared = {name for one in known for name, number in Counter(one.values()).items() if number > 1}
            known = [
                {
                    ref: f"{product.new_name(ref)}#{_hash(self.filled(product, product.contents[ref], one, bare=True))}"
                    if name in shared
                    else name
                    for ref, name in one.items()
                }
                for product, one in zip(products, known, strict=True)
            ]
        self._known = {id(before): known[0], id(after): known[1]}
        homes: dict[str, set[str]] = defaultdict(set)
        for ref, identity in known[1].items():
            homes[identity].add(ref.module)
        votes: dict[str, Counter[str]] = defaultdict(Counter)
        for ref, identity in known[0].items():
            if len(homes[identity]) == 1:
                votes[ref.module].update(homes[identity])
        self._moves = {module: count.most_common(1)[0][0] for module, count in votes.items()}

    def filled(
        self, product: Product, template: str, known: dict[Ref, str] | None = None, *, bare: bool = False
    ) -> str:
        """Return a dump with what its references are known by. With ``bare``, all modules are the same."""
        identities = self._known[id(product)] if known is None else known

        def fill(found: "re.Match[str]") -> str:
            module, name = found.groups()
            if name is not None:
                return f"‹{identities.get(Ref(module, name), name)}›"
            return "‹module›" if bare else f"‹module {self._moves.get(module, module)}›"

        return _TOKEN.sub(fill, template)

    def by_name(self, product: Product, template: str) -> str:
        """Return a dump in which the references are only names."""
        return _TOKEN.sub(lambda m: product.new_name(Ref(m[1], m[2])) if m[2] else "‹module›", template)

    def named(self, product: Product, template: str) -> list[str]:
        """Return what the references of a dump are known by."""
        return re.findall("‹([^›]*)›", self.filled(product, template))

    def of(self, product: Product, definition: Definition, name: str) -> str:
        """Return what one name of a definition is known by."""
        return self._known[id(product)][Ref(definition.module, name)]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass
class Report:
    """What is not the same at two commits."""

    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(before: Product, after: Product, once: Collection[str] = ()) -> Report:
    """Compare the definitions and the statements with effects of two products."""
    report = Report()
    identities = Identities(before, after)
    found: list[dict[str, list[Definition]]] = []
    for product in (before, after):
        by_dump: dict[str, list[Definition]] = defaultdict(list)
        for definition in product.definitions:
            by_dump[identities.filled(product, definition.template)].append(definition)
        found.append(by_dump)
    gone: list[Definition] = []
    new: list[Definition] = []
    for dump in {**found[0], **found[1]}:
        old, now = found[0].get(dump, []), found[1].get(dump, [])
        if old and now and len(now) < len(old) and set(old[0].names) <= set(once):
            report.notes.append(f"once: {', '.join(d.shown for d in old)} -> {', '.join(d.shown for d in now)}")
        elif len(old) != len(now):
            if old and now:
                report.differences.append(
                    f"stood {len(old)} times ({', '.join(d.shown for d in old)}), "
                    f"stands {len(now)} times ({', '.join(d.shown for d in now)})"
                )
            else:
                gone += old
                new += now
        for definition in old:
            places = {d.module for d in now}
            own = re.findall(r"Name\(id='(__\w+__)'", dump)
            if (
                places
                and definition.module not in places
                and (names := {"__name__", "__file__", "__package__"} & {*own})
            ):
                report.notes.append(f"{definition.shown} uses {', '.join(sorted(names))} and stands elsewhere now")
    report.differences += _pairs(identities, before, after, gone, new)
    report.differences += _effects(identities, before, after)
    return report


def _pairs(
    identities: Identities, before: Product, after: Product, gone: list[Definition], new: list[Definition]
) -> Iterator[str]:
    """Describe definitions without an equal one: changed, with other references, gone or new."""
    left = list(new)
    pairs = []
    for definition in gone:
        names = [before.new_name(Ref(definition.module, name)) for name in definition.names]
        text = identities.by_name(before, definition.template)
        alike = [other for other in left if other.names == names]
        alike.sort(key=lambda d: (identities.by_name(after, d.template) != text, d.module != definition.module))
        if not alike:
            yield f"gone: {definition.shown}"
            continue
        other = alike[0]
        left.remove(other)
        pairs.append((definition, other, identities.by_name(after, other.template) == text))
    changed = {
        (identities.of(before, definition, name), identities.of(after, other, name_after))
        for definition, other, _ in pairs
        for name, name_after in zip(definition.names, other.names, strict=True)
    }
    for definition, other, same_text in pairs:
        if not same_text:
            yield f"changed: {definition.shown} -> {other.shown}"
            continue
        named = (identities.named(p, d.template) for p, d in ((before, definition), (after, other)))
        # That a definition refers to one that is listed as changed is no news.
        references = {pair: None for pair in zip(*named, strict=True) if pair[0] != pair[1] and pair not in changed}
        if references:
            listed = ", ".join(f"{old} -> {now}" for old, now in references)
            yield f"refers to something else: {definition.shown} -> {other.shown}: {listed}"
    yield from (f"new: {definition.shown}" for definition in left)


def _effects(identities: Identities, before: Product, after: Product) -> Iterator[str]:
    """Describe the statements with effects that are not the same, or not in the same order."""
    orders: list[dict[str, list[str]]] = []
    for product in (before, after):
        order: dict[str, list[str]] = defaultdict(list)
        for effect in product.effects:
            order[effect.module].append(identities.filled(product, effect.template))
        orders.append(order)
    counts = [Counter(dump for dumps in order.values() for dump in dumps) for order in orders]
    for product, here, there, word in (
        (before, counts[0], counts[1], "gone"),
        (after, counts[1], counts[0], "new"),
    ):
        for effect in product.effects:
            dump = identities.filled(product, effect.template)
            if here[dump] > there[dump]:
                yield f"statement with effects, {word}: {effect.shown}"
    for module, dumps in orders[0].items():
        for place, now in orders[1].items():
            common = Counter(dumps) & Counter(now)
            kept = iter([dump for dump in now if dump in common])
            if not all(dump in kept for dump in dumps if dump in common):
                yield f"statements with effects in another order: {module} -> {place}"


def _compiled(before: str, after: str, repository: Path) -> Iterator[str]:
    """Describe the compiled sources that are not the same but for imports."""
    found = [
        Counter(
            (module.path.name, re.sub(r"(?m)^\s*(from .*|import .*|cimport .*)\n", "", module.source))
            for module in sources(commit, suffixes=(".pyx", ".pxd"), repository=repository)
        )
        for commit in (before, after)
    ]
    yield from (f"compiled source, gone or changed: {name}" for name, _ in found[0] - found[1])
    yield from (f"compiled source, new or changed: {name}" for name, _ in found[1] - found[0])


def modules(commit: str, repository: Path) -> list[Module]:
    """Return the modules at a commit; for a compiled one without Python source, what its stub declares."""
    found: dict[str, Module] = {}
    for module in sources(commit, suffixes=(".py", ".pyi"), repository=repository):
        if module.name not in found or module.path.suffix == ".py":
            found[module.name] = module
    return list(found.values())


def _renames(lines: Iterable[str]) -> dict[Ref, str]:
    renames = {}
    for line in lines:
        where, equals, new = line.partition("=")
        module, colon, name = where.strip().partition(":")
        if not (equals and colon):
            raise SystemExit(f"a rename is OLD.MODULE:NAME=NEW_NAME, but this is {line!r}")
        renames[Ref(module, name)] = new.strip()
    return renames


def main() -> None:
    words = [word if word != WORKTREE else f"\\{word}" for word in sys.argv[1:]]
    parser = argparse.ArgumentParser(description="Prove that a change only moves code.")
    parser.add_argument("before", help="a commit, or --worktree")
    parser.add_argument("after", help="a commit, or --worktree")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD.MODULE:NAME=NEW_NAME")
    parser.add_argument(
        "--once", action="append", default=[], metavar="NAME", help="equal definitions, written once now"
    )
    parser.add_argument("--list", type=Path, help="a file with one rename, or one 'once NAME', on each line")
    parser.add_argument("--circles", action="store_true", help="print the circles of imports, too")
    parser.add_argument("--repository", type=Path, default=Path())
    given = parser.parse_args(words)
    before, after = (commit.removeprefix("\\") for commit in (given.before, given.after))
    listed = [line.partition("#")[0].strip() for line in given.list.read_text().splitlines()] if given.list else []
    once = [line.removeprefix("once ").strip() for line in listed if line.startswith("once ")]
    renames = [line for line in listed if line and not line.startswith("once ")]

    old = Product(modules(before, given.repository), _renames([*renames, *given.rename]))
    new = Product(modules(after, given.repository))
    report = compare(old, new, [*once, *given.once])
    report.differences += _compiled(before, after, given.repository)
    for line in report.differences:
        print(line)
    for line in report.notes:
        print("note:", line)
    print(f"{len(new.effects)} statements with effects:", *(effect.shown for effect in new.effects))
    counts = f"{len(old.definitions)} definitions before, {len(new.definitions)} after"
    print(f"{counts}, {len(report.differences)} differences")
    wrong = bool(report.differences)
    if given.circles:
        running, typed = module_circles(sources(after, repository=given.repository))
        for group in running:
            print("circle:", *group)
        for group in typed:
            print("circle for type checkers only:", *group)
        wrong = wrong or bool(running)
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
