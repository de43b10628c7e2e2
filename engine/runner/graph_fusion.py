"""Fuses operators of a recording: fewer calls, fewer passes over memory, the same bits.

A rule matches a few connected operators anywhere in the graph, and replaces them by one compiled operator, which rounds
between them as they did. The rules do not depend on a model; other operators stay unchanged, and
`engine.runner.traced_forward` verifies the result against the modules, bit for bit.

    three linear layers of the same rows          tandem::linears
    x + linear(y)                                 tandem::linear_add
    x * cos + cat(-x[half:], x[:half]) * sin      tandem::rotate
    silu(x) * y, gelu(x) * y                      tandem::gated
    the same of two linear layers of one x        tandem::linears_gated

Linear layers of quantised weights have operators of their own: linears_codes, linear_codes_add, linears_codes_gated. On
CUDA the operators are those of tandem_gpu:: (engine/gpu/products.py): gates stay apart from their products, and what is
done to heads between products and attention, writes into pages included, is one operator, heads.
Operators after the last attention are computed only for tokens whose logits are wanted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

Node = Any  # torch._C.Node
Value = Any  # torch._C.Value
Graph = Any  # torch._C.Graph

TO_THE_END = 2**63 - 1
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
CPU, CUDA = "tandem", "tandem_gpu"  # namespaces of operators


def fuse(graph: Graph, ops: str = CPU) -> None:
    """Rewrites `graph` in place, with the operators of a namespace."""
    passes: Any = torch._C
    passes._jit_pass_inline(graph)
    passes._jit_pass_constant_pooling(graph)
    passes._jit_pass_cse(graph)
    of_products = (_siblings, _gates, _gated_siblings) if ops == CPU else (_siblings, _gates, _heads)
    for rule in (_detours, _rotations, _sums, *of_products, _wanted_rows):
        rule(graph, ops)
        passes._jit_pass_dce(graph)
    passes._jit_pass_lint(graph)


def _detours(graph: Graph, _ops: str) -> None:
    """Removes the tracer's conversions of sizes to tensors and back, and dropouts, which have no effect in
    inference."""
    for node in graph.findAllNodes("aten::Int"):
        if (boxed := _made_by(node.input(), "prim::NumToTensor")) is not None:
            node.output().replaceAllUsesWith(boxed.input())
    for node in graph.findAllNodes("aten::dropout"):
        if _is(node.inputsAt(2), 0):
            node.output().replaceAllUsesWith(node.inputsAt(0))


def _rotations(graph: Graph, ops: str) -> None:
    for node in graph.findAllNodes("aten::add"):
        straight, across = _made_by(node.inputsAt(0), "aten::mul"), _made_by(node.inputsAt(1), "aten::mul")
        if straight is None or across is None or not _is(node.inputsAt(2), 1):
            continue
        x, cos = straight.inputsAt(0), straight.inputsAt(1)
        turned, sin = across.inputsAt(0), across.inputsAt(1)
        if _turned(turned, x) and _one_type(x, cos, sin):
            _replace(graph, node, f"{ops}::rotate", [x, cos, sin])


def _turned(value: Value, x: Value) -> bool:
    """Whether `value` is cat(-x[half:], x[:half]) along the last of four dimensions."""
    cat = _made_by(value, "aten::cat")
    if cat is None or not (_is(cat.inputsAt(1), -1) or _is(cat.inputsAt(1), 3)):
        return False
    parts = list(cat.inputsAt(0).node().inputs())
    if len(parts) != 2 or (minus := _made_by(parts[0], "aten::neg")) is None:
        return False
    high, low = _made_by(minus.input(), "aten::slice"), _made_by(parts[1], "aten::slice")
    if high is None or low is None or not all(each.inputsAt(0) == x for each in (high, low)):
        return False
    half = low.inputsAt(3)
    last = all(_is(each.inputsAt(1), 3) and _is(each.inputsAt(4), 1) for each in (high, low))
    ends = _is(low.inputsAt(2), 0) and high.inputsAt(2) == half and _is(high.inputsAt(3), TO_THE_END)
    return last and ends and _is_half(half, x)


def _is_half(half: Value, x: Value) -> bool:
    """Whether it is the last of four sizes of x, halved."""
    if (integer := _made_by(half, "aten::Int")) is None:
        return False
    if (division := _made_by(integer.input(), "aten::floor_divide")) is None or not _is(division.inputsAt(1), 2):
        return False
    if (boxed := _made_by(division.inputsAt(0), "prim::NumToTensor")) is None:
        return False
    size = _made_by(boxed.input(), "aten::size")
    return size is not None and size.inputsAt(0) == x and _is(size.inputsAt(1), 3)


def _heads(graph: Graph, ops: str) -> None:
    """Norms and rotations of q and k, and the writes of k and v into pages, before attention."""
    for attend in graph.findAllNodes(f"{ops}::attend"):
        writes = [write for at in (1, 2) if (write := _made_by(attend.inputsAt(at), "aten::index_put_")) is not None]
        if len(writes) != 2 or any(len(write.output().uses()) != 1 for write in writes):
            continue
        places = [list(write.inputsAt(1).node().inputs()) for write in writes]
        pages, new = ([write.inputsAt(at) for write in writes] for at in (0, 2))
        of_q, of_k = _rotated(attend.inputsAt(0), ops), _rotated(new[0], ops)
        v = _swapped(_of_tokens(new[1]), 1, 2)
        if places[0] != places[1] or len(places[0]) != 2 or v is None or of_q is None or of_k is None:
            continue
        (q, *turns), (k, *same_turns) = of_q, of_k
        weights, numbers = zip(*(_norm_of(x, ops) for x in (q, k)), strict=True)
        if turns != same_turns or numbers[0] != numbers[1] or not _one_type(q, k, v, *pages, *turns):
            continue
        inputs = [x if weight is None else x.node().inputsAt(0) for x, weight in zip((q, k), weights, strict=True)]
        constants = [_constant(graph, attend, value) for value in numbers[0]]
        given = [_constant(graph, attend, None) if weight is None else weight for weight in weights]
        heads = graph.create(f"{ops}::heads", [*inputs, v, *given, *constants, *turns, *pages, *places[0]], 1)
        heads.insertBefore(attend)
        heads.output().setType(attend.inputsAt(0).type())
        attend.replaceInput(0, heads.output())
        for at, write, own in zip((1, 2), writes, pages, strict=True):
            attend.replaceInput(at, own)
            write.destroy()


def _of_tokens(value: Value) -> Value | None:
    """x `[1, heads, tokens, d]` where `value` is x[0].transpose(0, 1)."""
    cast = _made_by(value, "aten::to")
    if cast is not None and value.type().dtype() == cast.inputsAt(0).type().dtype():
        value = cast.inputsAt(0)
    chosen = _made_by(_swapped(value, 0, 1), "aten::select")
    if chosen is None or not (_is(chosen.inputsAt(1), 0) and _is(chosen.inputsAt(2), 0)):
        return None
    return chosen.inputsAt(0)


def _swapped(value: Value | None, *dims: int) -> Value | None:
    """x where `value` is x.transpose(*dims)."""
    if value is None or (node := _made_by(value, "aten::transpose")) is None:
        return None
    right = all(_is(node.inputsAt(at), dim) for at, dim in zip((1, 2), dims, strict=True))
    return node.inputsAt(0) if right else None


def _rotated(value: Value, ops: str) -> tuple[Value, Value, Value] | None:
    """x `[1, tokens, heads, d]`, cos and sin where `value` is x rotated, by token."""
    rotation = _made_by(_of_tokens(value), f"{ops}::rotate")
    x = _swapped(rotation.inputsAt(0), 1, 2) if rotation is not None else None
    return (x, rotation.inputsAt(1), rotation.inputsAt(2)) if rotation is not None and x is not None else None


def _norm_of(x: Value, ops: str) -> tuple[Value | None, tuple[float, float, bool]]:
    """The weight and numbers of the RMS norm that made x; no weight if none did."""
    norm = _made_by(x, f"{ops}::rms_norm")
    if norm is None or len(x.uses()) != 1:
        return None, (0.0, 0.0, False)
    eps, offset, round_first = (norm.inputsAt(at).toIValue() for at in (2, 3, 4))
    return norm.inputsAt(1), (eps, offset, round_first)


def _constant(graph: Graph, before: Node, value: Any) -> Value:
    made = graph.insertConstant(value)
    made.node().moveBefore(before)
    return made


def _sums(graph: Graph, ops: str) -> None:
    for node in graph.findAllNodes("aten::add"):
        for beside, product in ((node.inputsAt(0), node.inputsAt(1)), (node.inputsAt(1), node.inputsAt(0))):
            linear = _made_by(product, f"{ops}::linear") or _made_by(product, f"{ops}::linear_codes")
            plain = len(product.uses()) == 1 and _is(node.inputsAt(2), 1) and _one_type(product, beside)
            if linear is not None and plain:
                _replace(graph, node, f"{linear.kind()}_add", [*linear.inputs(), beside])
                break


_TENSOR, _INT = torch._C.TensorType.get(), torch._C.IntType.get()
_BIAS = torch._C.OptionalType(_TENSOR)
_STRING = torch._C.StringType.get()
# Linear layers: which inputs become lists where there are several of them, and which are the same for all: k first.
_LINEARS: dict[str, tuple[tuple[tuple[int, Any], ...], tuple[int, ...]]] = {
    "tandem::linear": (((1, _TENSOR), (2, _BIAS), (3, _INT)), (4,)),
    "tandem::linear_codes": (((1, _TENSOR), (2, _TENSOR), (3, _BIAS), (4, _INT), (6, _INT), (7, _STRING)), (5,)),
    "tandem_gpu::linear": (((1, _TENSOR), (2, _BIAS), (3, _INT)), (4,)),
    "tandem_gpu::linear_codes": (((1, _TENSOR), (2, _TENSOR), (3, _BIAS), (4, _BIAS), (5, _INT)), (6, 7, 8, 9)),
}


def _several(kind: str) -> str:
    return kind.replace("::linear", "::linears")


def _siblings(graph: Graph, ops: str) -> None:
    """Linear layers of the same rows, all in the place of the first: their other inputs are constants."""
    groups: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for kind in (kind for kind in _LINEARS if kind.startswith(f"{ops}::")):
        for node in graph.findAllNodes(kind):
            if all(each.node().kind() == "prim::Constant" for each in list(node.inputs())[1:]):
                same = (node.inputsAt(at).toIValue() for at in _LINEARS[kind][1])
                groups[kind, node.inputsAt(0).debugName(), *same].append(node)
    for (kind, *_), nodes in groups.items():
        if len(nodes) == 1:
            continue
        first, (lists_of, rest) = nodes[0], _LINEARS[kind]
        lists = [_list_of(graph, first, [node.inputsAt(at) for node in nodes], of) for at, of in lists_of]
        together = graph.create(_several(kind), [first.inputsAt(0), *lists, *map(first.inputsAt, rest)], 1)
        together.insertBefore(first)
        together.output().setType(torch._C.ListType.ofTensors())
        apart = graph.create("prim::ListUnpack", [together.output()], len(nodes))
        apart.insertBefore(first)
        for node, output in zip(nodes, apart.outputs(), strict=True):
            output.setType(node.output().type())
            node.output().replaceAllUsesWith(output)


def place_together(graph: Graph) -> None:
    """Places the weights, scales and biases of siblings on CUDA one after the other in memory, where one product reads
    them all. The module and every graph have the same tensors, which move there, so nothing is kept twice."""
    for kind, (lists_of, _) in _LINEARS.items():
        for node in graph.findAllNodes(_several(kind)) if kind.startswith(f"{CUDA}::") else ():
            for at in range(1, len(lists_of)):  # the last list has the widths
                parts = [value.toIValue() for value in node.inputsAt(at).node().inputs()]
                if any(part is None for part in parts) or len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
                    continue
                together = torch.split(torch.cat(parts), [len(part) for part in parts])
                for part, new in zip(parts, together, strict=True):
                    part.data = new


def _list_of(graph: Graph, before: Node, values: list[Value], of: Any) -> Value:
    node = graph.create("prim::ListConstruct", values, 1)
    node.insertBefore(before)
    node.output().setType(torch._C.ListType(of))
    return node.output()


def _gates(graph: Graph, ops: str) -> None:
    for node in graph.findAllNodes("aten::mul"):
        for gate, up in ((node.inputsAt(0), node.inputsAt(1)), (node.inputsAt(1), node.inputsAt(0))):
            if (silu := _made_by(gate, "aten::silu")) is not None:
                act = "silu"
            elif (silu := _made_by(gate, "aten::gelu")) is not None:
                act = GELUS[silu.inputsAt(1).toIValue()]
            else:
                continue
            if not _one_type(gate, up):
                continue
            name = graph.insertConstant(act)
            name.node().moveBefore(node)
            _replace(graph, node, f"{ops}::gated", [silu.inputsAt(0), up, name])
            break


def _gated_siblings(graph: Graph, _ops: str) -> None:
    for node in graph.findAllNodes("tandem::gated"):
        gate, up = node.inputsAt(0), node.inputsAt(1)
        apart = _made_by(gate, "prim::ListUnpack")
        if apart is None or [gate, up] not in (pair := list(apart.outputs()), pair[::-1]):
            continue
        linears = apart.input().node()
        kind = next((kind for kind in _LINEARS if _several(kind) == linears.kind()), None)
        once = all(len(value.uses()) == 1 for value in (gate, up))
        if kind is None or not once:
            continue
        x, *lists, k = list(linears.inputs())
        types = [of for _, of in _LINEARS[kind][0]]
        columns = [value.toIValue() for value in lists[types.index(_INT)].node().inputs()]
        if columns[0] != columns[1]:
            continue
        if gate != pair[0]:
            lists = [
                _list_of(graph, node, list(each.node().inputs())[::-1], of)
                for each, of in zip(lists, types, strict=True)
            ]
        _replace(graph, node, f"{_several(kind)}_gated", [x, *lists, k, node.inputsAt(2)])


# Operators whose rows do not depend on each other, with the indices of the inputs that have as many rows as the output.
_BY_ROWS = {
    "tandem::rms_norm": (0,),
    "tandem::linear": (0,),
    "tandem::linear_add": (0, 5),
    "tandem::linear_codes": (0,),
    "tandem::linear_codes_add": (0, 8),
    "tandem::linears_gated": (0,),
    "tandem::linears_codes_gated": (0,),
    "tandem::gated": (0, 1),
    "tandem_gpu::rms_norm": (0,),
    "tandem_gpu::linear": (0,),
    "tandem_gpu::linear_add": (0, 5),
    "tandem_gpu::linear_codes": (0,),
    "tandem_gpu::linear_codes_add": (0, 10),
    "tandem_gpu::gated": (0, 1),
    "aten::add": (0, 1),
}


def _wanted_rows(graph: Graph, _ops: str) -> None:
    """Moves x[:, wanted] up to the inputs of x, as long as x has no other use."""
    nodes = list(graph.nodes())
    for last in (node for node in nodes if node.kind() == "aten::index"):
        rows = last.inputsAt(1).node()
        kinds = [each.type().kind() for each in rows.inputs()]
        if kinds != ["NoneType", "TensorType"] or last.inputsAt(0).type().dim() != 3:
            continue
        late = {last}
        for node in reversed(nodes[: nodes.index(last)]):
            users = [use.user for use in node.output().uses()] if node.outputsSize() == 1 else []
            if users and late.issuperset(users) and (_is_by_rows(node) or _is_whole(node)):
                late.add(node)
        fewer: dict[str, Value] = {}
        for node in nodes:
            if node not in late or node is last or _is_whole(node):
                continue
            for at in _BY_ROWS[node.kind()]:
                value = node.inputsAt(at)
                if value.node() in late:
                    continue
                if value.debugName() not in fewer:
                    index = _list_of(graph, node, list(rows.inputs()), rows.output().type().getElementType())
                    taken = graph.create("aten::index", [value, index], 1)
                    taken.insertBefore(node)
                    taken.output().setType(last.output().type())
                    fewer[value.debugName()] = taken.output()
                node.replaceInput(at, fewer[value.debugName()])
        if fewer:
            last.output().replaceAllUsesWith(last.inputsAt(0))


def _is_by_rows(node: Node) -> bool:
    rows = [node.inputsAt(at).type() for at in _BY_ROWS.get(node.kind(), ())]
    counts = {tuple(each.sizes() or ())[:-1] if each.kind() == "TensorType" else () for each in rows}
    return len(counts) == 1 and len(counts.pop()) == 2  # equal sizes while recording, so nothing is broadcast


def _is_whole(node: Node) -> bool:
    """Whether it is x[:] of any dimension."""
    return (
        node.kind() == "aten::slice"
        and _is(node.inputsAt(2), 0)
        and _is(node.inputsAt(3), TO_THE_END)
        and _is(node.inputsAt(4), 1)
    )


def _replace(graph: Graph, node: Node, kind: str, inputs: list[Value]) -> None:
    """Puts one operator in the place of `node`; what fed it goes with the next removal of dead code."""
    new = graph.create(kind, inputs, 1)
    new.insertBefore(node)
    new.output().setType(node.output().type())
    node.output().replaceAllUsesWith(new.output())
    node.destroy()


def _made_by(value: Value | None, kind: str) -> Node | None:
    node = value.node() if value is not None else None
    return node if node is not None and node.kind() == kind else None


def _one_type(*values: Value) -> bool:
    """Whether the tensors that were seen here while recording are of one type, and of one number of dimensions."""
    kinds = {(value.type().dtype(), value.type().dim()) for value in values}
    return len(kinds) == 1 and None not in kinds.pop()


def _is(value: Value, number: int) -> bool:
    if value.node().kind() != "prim::Constant":
        return False
    constant = value.toIValue()
    if isinstance(constant, torch.Tensor):
        return constant.numel() == 1 and constant.item() == number
    return isinstance(constant, int) and constant == number
