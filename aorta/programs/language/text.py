"""Host programs as text that reads like the loop: parse_program() and format_program().

The text is a small part of Python's grammar (so errors have lines); it is never executed:

    program("ag_gemm", ranks=2, tiles=8, streams=4)
    main = current_stream()
    A = input(8)
    W = input()
    G = allocate(8)
    C = output(8)
    for i in range(8):
        set_stream(worker[i % 4])
        forked[i] = record(main)
        wait(forked[i])
        gathered[i] = all_gather(A[i], out=G[i], lane=comm)
        wait_work(gathered[i])
        gemm(G[i], W, out=C[i])
        set_stream(main)
        joined[i] = record(worker[i % 4])
        wait(joined[i])

Formatting what was parsed and parsing what was formatted give the same program.
"""

import ast
import math
import warnings
from collections.abc import Iterator

from aorta.files import read_regular
from aorta.programs.language.expr import Expr, HostProgramError, Index, index_of
from aorta.programs.language.ir import (
    COMM_OPS,
    Allocate,
    Communicate,
    Gemm,
    GetCurrentStream,
    Loop,
    Op,
    Program,
    Record,
    Ref,
    Role,
    Select,
    SetStream,
    UserOp,
    Wait,
    WaitWork,
)

MAX_RANKS = 1024
MAX_TILES = 10_000
"""Most tiles of one buffer."""
MAX_COST_US = 1e12
"""Largest cost_us of an operation."""
RESERVED = frozenset(("rank", "ranks"))
"""Variables that every index may use."""
BUFFER_ROLES: dict[str, Role] = {"input": "input", "output": "output", "allocate": "scratch"}
BUFFER_WORDS = {role: word for word, role in BUFFER_ROLES.items()}
STATEMENTS = ("set_stream", "wait", "wait_work", "gemm", "linear", "user")
"""Words of instructions that have no result to assign."""


def read_program(path: str) -> Program:
    """The program in a file. Raises HostProgramError, in one line with the place, for one that has none."""
    try:
        return parse_program(read_regular(path).decode(), path)
    except OSError as error:
        raise HostProgramError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise HostProgramError(f"{path} is not text") from None


def parse_program(text: str, source: str = "program") -> Program:
    """Program that a text describes.

    Raises HostProgramError, one line that begins with `source:line:`, for anything the grammar
    above does not have.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # 4i is read as 4 and i, and refused below
            tree = ast.parse(text)
    except SyntaxError as error:
        raise HostProgramError(f"{source}:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise HostProgramError(f"{source}: not a host program: {error}") from None
    if not tree.body:
        raise HostProgramError(f'{source}:1: a program begins with program("name", ranks=2)')
    parser = _Parser(source)
    head = tree.body[0]
    name, num_ranks, params = parser.located(head, parser.head, head)
    body = tuple(parser.block(tree.body[1:], top=True))
    program = Program(name, num_ranks, body, params)
    try:
        for rank in range(num_ranks):
            program.unroll(rank)
    except HostProgramError as error:
        position, _, problem = str(error).partition(": ")
        line = position.removeprefix("line ")
        message = f"{source}:{line}: {problem}" if line.isdigit() else f"{source}: {error}"
        raise HostProgramError(message) from None
    return program


class _Parser:
    """Statements of the text, with the source's name for errors."""

    def __init__(self, source: str) -> None:
        self.source = source

    def located(self, node: ast.stmt, function, *arguments):  # type: ignore[no-untyped-def]
        try:
            return function(*arguments)
        except HostProgramError as error:
            text = str(error)
            if text.startswith(f"{self.source}:"):
                raise
            raise HostProgramError(f"{self.source}:{node.lineno}: {text}") from None

    def head(self, node: ast.stmt) -> tuple[str, int, tuple[tuple[str, int | str], ...]]:
        match node:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="program"), args=[ast.Constant(value=str(name))], keywords=kws
                )
            ):
                named = {str(kw.arg): _constant(kw.value) for kw in kws}
                num_ranks = named.pop("ranks", 1)
                if not isinstance(num_ranks, int) or not 1 <= num_ranks <= MAX_RANKS:
                    raise HostProgramError(f"ranks must be 1 to {MAX_RANKS}, got {num_ranks!r}")
                return name, num_ranks, tuple(named.items())
        raise HostProgramError('a program begins with program("name", ranks=2)')

    def block(self, nodes: list[ast.stmt], top: bool) -> Iterator[Op]:
        for node in nodes:
            op = self.located(node, self.statement, node)
            if isinstance(op, Allocate) and not top:
                raise HostProgramError(
                    f"{self.source}:{node.lineno}: {op.name} is allocated in a loop; allocate before it"
                )
            yield op

    def statement(self, node: ast.stmt) -> Op:
        match node:
            case ast.For(
                target=ast.Name(id=variable),
                iter=ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]),
                body=body,
                orelse=[],
            ) if 1 <= len(bounds) <= 2:
                if variable in RESERVED:
                    raise HostProgramError(f"{variable} is not free for a loop")
                start: Index = 0 if len(bounds) == 1 else index_of(bounds[0])
                inner = tuple(self.block(body, top=False))
                return Loop(variable, start, index_of(bounds[-1]), inner, line=node.lineno)
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=word)) as call):
                return _operation(word, call, _ref(target), node.lineno)
            case ast.Expr(value=ast.Call(func=ast.Name(id=word)) as call):
                return _operation(word, call, None, node.lineno)
        raise HostProgramError(f"not an instruction: {ast.unparse(node).splitlines()[0][:60]}")


def _operation(word: str, call: ast.Call, target: Ref | None, line: int) -> Op:
    arguments = _Arguments(word, call)
    op = _build(word, arguments, target, line)
    arguments.finish()
    return op


def _build(word: str, arguments: "_Arguments", target: Ref | None, line: int) -> Op:
    if word in COMM_OPS:
        return _communicate(word, arguments, target, line)
    if word in BUFFER_ROLES or word in ("current_stream", "select"):
        name = _plain(word, target)
        if word == "current_stream":
            return GetCurrentStream(name, line=line)
        if word == "select":
            return Select(name, arguments.ref(), line=line)
        return Allocate(name, arguments.sizes(), BUFFER_ROLES[word], line=line)
    if word == "record":
        return Record(_needed(word, target), arguments.optional_ref(), line=line)
    if target is not None:
        raise HostProgramError(f"{word} has no result to assign" if word in STATEMENTS else _unknown(word))
    match word:
        case "set_stream":
            return SetStream(arguments.ref(), line=line)
        case "wait":
            return Wait(arguments.ref(), line=line)
        case "wait_work":
            return WaitWork(arguments.ref(), line=line)
        case "gemm" | "linear":
            return Gemm(
                arguments.ref(),
                arguments.ref(),
                _needed("out", arguments.named_ref("out")),
                arguments.named_ref("bias"),
                word == "linear",
                arguments.cost_us(),
                line=line,
            )
        case "user":
            name = arguments.text()
            reads, writes = arguments.refs("reads"), arguments.refs("writes")
            return UserOp(name, reads, writes, arguments.cost_us(), line=line)
    raise HostProgramError(_unknown(word))


def _communicate(word: str, arguments: "_Arguments", work: Ref | None, line: int) -> Communicate:
    source = None if word == "recv" else arguments.ref()
    out = arguments.named_ref("out")
    to, by, root = arguments.index("to"), arguments.index("by"), arguments.index("root")
    required: dict[str, object] = {} if word == "send" else {"out": out}
    if word in ("send", "send_recv"):
        required["to"] = to
    if word in ("recv", "send_recv"):
        required["by"] = by
    if word == "broadcast":
        required["root"] = root
    for key, value in {"out": out, "to": to, "by": by, "root": root}.items():
        if (value is None) == (key in required):
            raise HostProgramError(f"{word} {'needs' if key in required else 'has no'} {key}=")
    return Communicate(
        word,  # type: ignore[arg-type]  # one of COMM_OPS
        source,
        out,
        _needed("lane", arguments.named_ref("lane")),
        work,
        to,
        by,
        root,
        arguments.cost_us(),
        line=line,
    )


class _Arguments:
    """Arguments of one call, taken one by one; finish() refuses those that are left."""

    def __init__(self, word: str, call: ast.Call) -> None:
        self.word = word
        self.positional = list(call.args)
        self.named: dict[str, ast.expr] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise HostProgramError(f"{word}: ** is not part of the grammar")
            self.named[keyword.arg] = keyword.value

    def next(self) -> ast.expr:
        if not self.positional:
            raise HostProgramError(f"{self.word} needs another argument")
        return self.positional.pop(0)

    def ref(self) -> Ref:
        return _ref(self.next())

    def optional_ref(self) -> Ref | None:
        return self.ref() if self.positional else None

    def named_ref(self, key: str) -> Ref | None:
        return _ref(self.named.pop(key)) if key in self.named else None

    def index(self, key: str) -> Index | None:
        return index_of(self.named.pop(key)) if key in self.named else None

    def refs(self, key: str) -> tuple[Ref, ...]:
        match self.named.pop(key, ast.List([])):
            case ast.List(elts=parts):
                return tuple(_ref(part) for part in parts)
            case other:
                raise HostProgramError(f"{self.word}: {key}= takes a list, got {ast.unparse(other)}")

    def text(self) -> str:
        value = _constant(self.next())
        if not isinstance(value, str):
            raise HostProgramError(f"{self.word}: {value!r} is not a name in quotes")
        return value

    def sizes(self) -> tuple[int, ...]:
        sizes = []
        for size in map(_constant, self.positional):
            if not isinstance(size, int) or size < 1:
                raise HostProgramError(f"{self.word}: {size!r} is not a number of tiles")
            sizes.append(size)
        self.positional.clear()
        if math.prod(sizes) > MAX_TILES:
            raise HostProgramError(f"{self.word}: a buffer has at most {MAX_TILES:,} tiles")
        return tuple(sizes)

    def cost_us(self) -> float | None:
        if "cost_us" not in self.named:
            return None
        match self.named.pop("cost_us"):
            case ast.Constant(value=int() | float() as value) if (
                not isinstance(value, bool) and 0 <= value <= MAX_COST_US
            ):
                return float(value)
            case other:
                raise HostProgramError(f"{self.word}: cost_us={ast.unparse(other)} is not a time in µs")

    def finish(self) -> None:
        for node in self.positional:
            raise HostProgramError(f"{self.word}: unexpected {ast.unparse(node)}")
        for key in self.named:
            raise HostProgramError(f"{self.word}: unexpected {key}=")


def _ref(node: ast.expr) -> Ref:
    match node:
        case ast.Name(id=name) if name not in RESERVED:
            return Ref(name)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=parts)) if parts:
            return Ref(name, tuple(index_of(part) for part in parts))
        case ast.Subscript(value=ast.Name(id=name), slice=part):
            return Ref(name, (index_of(part),))
    raise HostProgramError(f"{ast.unparse(node)} is not a name or name[index]")


def _plain(word: str, target: Ref | None) -> str:
    target = _needed(word, target)
    if target.index:
        raise HostProgramError(f"{word} binds a plain name, not {target}")
    return target.name


def _needed(word: str, ref: Ref | None) -> Ref:
    if ref is None:
        raise HostProgramError(
            f"{word}= is missing" if word in ("out", "lane") else f"the result of {word} needs a name"
        )
    return ref


def _unknown(word: str) -> str:
    words = ("current_stream", "select", "record", *BUFFER_ROLES, *STATEMENTS, *COMM_OPS)
    return f"unknown instruction {word!r}; known: {', '.join(words)}"


def _constant(node: ast.expr) -> int | str:
    match node:
        case ast.Constant(value=int() | str() as value) if not isinstance(value, bool):
            return value
    raise HostProgramError(f"{ast.unparse(node)} is not a number or a text in quotes")


def format_program(program: Program) -> str:
    """Text of a program, ending in a newline."""
    quoted = ((key, value if isinstance(value, int) else f'"{value}"') for key, value in program.params)
    params = "".join(f", {key}={value}" for key, value in quoted)
    lines = [f'program("{program.name}", ranks={program.num_ranks}{params})']
    lines += _block(program.body, "")
    return "\n".join(lines) + "\n"


def _block(body: tuple[Op, ...], indent: str) -> Iterator[str]:
    for op in body:
        yield indent + format_op(op)
        if isinstance(op, Loop):
            yield from _block(op.body, indent + "    ")


def format_op(op: Op) -> str:
    """Text of one instruction; for a loop its head."""
    match op:
        case GetCurrentStream(name=name):
            return f"{name} = current_stream()"
        case SetStream(stream=stream):
            return f"set_stream({stream})"
        case Record(event=event, stream=stream):
            return f"{event} = record({'' if stream is None else stream})"
        case Wait(event=event):
            return f"wait({event})"
        case Allocate(name=name, tiles=tiles, role=role):
            return f"{name} = {BUFFER_WORDS[role]}({', '.join(map(str, tiles))})"
        case Select(name=name, source=source):
            return f"{name} = select({source})"
        case WaitWork(work=work):
            return f"wait_work({work})"
        case Gemm(a=a, b=b, out=out, bias=bias, transposed=transposed, cost_us=cost_us):
            named = _named(out=out, bias=bias, cost_us=cost_us)
            return f"{'linear' if transposed else 'gemm'}({a}, {b}{named})"
        case Communicate(op=kind, source=source, work=work, cost_us=cost_us):
            named = _named(out=op.out, lane=op.lane, to=op.to, by=op.by, root=op.root, cost_us=cost_us)
            call = f"{kind}({named.removeprefix(', ') if source is None else f'{source}{named}'})"
            return call if work is None else f"{work} = {call}"
        case UserOp(name=name, cost_us=cost_us):
            inputs, outputs = (", ".join(map(str, parts)) for parts in (op.inputs, op.outputs))
            return f'user("{name}", reads=[{inputs}], writes=[{outputs}]{_named(cost_us=cost_us)})'
        case Loop(variable=variable, start=start, stop=stop):
            return f"for {variable} in range({stop if start == 0 else f'{start}, {stop}'}):"
    raise AssertionError(type(op))


def _named(**values: Ref | Expr | int | float | None) -> str:
    return "".join(f", {key}={value}" for key, value in values.items() if value is not None)
