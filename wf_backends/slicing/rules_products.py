"""Rules for products of tensors, read off their Einstein sums.

A letter names a dimension, "..." the batch dimensions in front, counted from the end. An argument
that has the letter of the output's sliced dimension is sliced along it, any other is needed whole.
"""

from __future__ import annotations

from torch import fx

from wf_backends.slicing.call import Call, Reads, Rows, Rule, Shape, Table, aten, axis, shape_of

Letters = tuple[str | int, ...]  # int: a batch dimension, counted from the end


def letters(term: str, ndim: int) -> Letters:
    """One letter for each dimension of a tensor; a term may begin with more than the tensor has."""
    if "..." not in term:
        return tuple(term[len(term) - ndim :])
    front, back = term.split("...")
    batch = ndim - len(front) - len(back)
    return (*front, *range(-batch, 0), *back)


def rows(term: str, size: Shape | None, letter: str | int, wanted: int) -> Rows | None:
    """The rows of one argument; None where it lacks the letter or is broadcast along it."""
    if size is None:
        return None
    own = letters(term, len(size))
    if letter not in own:
        return None
    dim = own.index(letter)
    return Rows(dim) if size[dim] == wanted else None


def einstein_sum(call: Call, dim: int, equation: str, names: tuple[str, ...]) -> Reads:
    """`equation` has one term for each of `names` and ends in "->" and the output's."""
    terms, _, out = equation.partition("->")
    letter = letters(out, len(call.shape))[dim]
    return {
        name: rows(term, call.size(name), letter, call.shape[dim])
        for name, term in zip(names, terms.split(","), strict=True)
        if call.has(name)
    }


def product(equation: str, *names: str) -> Rule:
    return Rule(lambda call, dim: einstein_sum(call, dim, equation, names))


def linear(call: Call, dim: int) -> Reads:
    vector = len(call.size("weight")) == 1
    equation = "...i,i,->..." if vector else "...i,oi,o->...o"
    return einstein_sum(call, dim, equation, ("input", "weight", "bias"))


def matmul(call: Call, dim: int) -> Reads:
    left, right = len(call.size("self")), len(call.size("other"))
    row, column = "i" * (left > 1), "j" * (right > 1)
    terms = (f"...{row}k" if left > 1 else "k", f"...k{column}" if right > 1 else "k")
    return einstein_sum(call, dim, f"{','.join(terms)}->...{row}{column}", ("self", "other"))


def tensordot(call: Call, dim: int) -> Reads:
    """The output has the dimensions left over of `self`, then those of `other`."""
    summed = {
        name: {axis(d, len(call.size(name))) for d in call[f"dims_{name}"]}
        for name in ("self", "other")
    }
    left_over = [
        (name, d) for name in summed for d in range(len(call.size(name))) if d not in summed[name]
    ]
    name, own = left_over[dim]
    return {name: Rows(own)}


def einsum(call: Call, dim: int) -> Reads | None:
    """As its equation says; a wall where a term repeats a letter (a diagonal)."""
    equation = call["equation"].replace(" ", "")
    terms, arrow, out = equation.partition("->")
    if not arrow:
        once = sorted(c for c in set(terms) - set(".,") if terms.count(c) == 1)
        out = "..." * ("..." in terms) + "".join(once)
    split = terms.split(",")
    if any(len(set(own)) < len(own) for own in (t.replace(".", "") for t in split)):
        return None
    letter = letters(out, len(call.shape))[dim]
    sizes = [shape_of(tensor) for tensor in call["tensors"]]
    return {
        "tensors": [rows(t, s, letter, call.shape[dim]) for t, s in zip(split, sizes, strict=True)]
    }


def is_interleaved(product: fx.Node, operand: fx.Node) -> bool:
    """Whether elements of an operand that lie side by side belong to different matrices of a batch.

    A library copies such matrices one by one before it multiplies.
    """
    if product.target not in (*BATCHED, aten.einsum.default):
        return False
    strides = operand.meta["val"].stride()
    inner = strides.index(min(strides)) if strides else 0
    if product.target in BATCHED:
        return inner < len(strides) - 2
    equation, operands = product.args[:2]
    terms, _, out = str(equation).replace(" ", "").partition("->")
    tensors = [*operands, product]  # type: ignore[misc]
    every = [
        letters(term, len(tensor.meta["val"].shape))
        for term, tensor in zip([*terms.split(","), out], tensors, strict=True)
    ]
    return all(every[tensors.index(operand)][inner] in own for own in every)


BATCHED = (aten.bmm.default, aten.baddbmm.default, aten.matmul.default)

TABLE: Table = {
    aten.addbmm: product("ik,bij,bjk->ik", "self", "batch1", "batch2"),
    aten.addmm: product("ik,ij,jk->ik", "self", "mat1", "mat2"),
    aten.addmv: product("i,ij,j->i", "self", "mat", "vec"),
    aten.baddbmm: product("bik,bij,bjk->bik", "self", "batch1", "batch2"),
    aten.bilinear: product("...i,...j,oij,o->...o", "input1", "input2", "weight", "bias"),
    aten.bmm: product("bij,bjk->bik", "self", "mat2"),
    aten.mm: product("ij,jk->ik", "self", "mat2"),
    aten.mv: product("ij,j->i", "self", "vec"),
    aten.outer: product("i,j->ij", "self", "vec2"),
    aten.einsum: Rule(einsum),
    aten.linear: Rule(linear),
    aten.matmul: Rule(matmul),
    aten.tensordot: Rule(tensordot),
}
