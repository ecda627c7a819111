"""Rules for products of tensors, which follow from their einsum equations.

A letter names a dimension, "..." the batch dimensions. An argument that has the letter of the
output's sliced dimension is sliced along that dimension; any other argument is needed whole.
"""

from __future__ import annotations

from wf_backends.autochunk.slicing.call import Call, Reads, Rows, Rule, Shape, Table, aten, shape_of

Letters = tuple[str | int, ...]  # an int is a batch dimension, counted from the last one (-1)


def letters(term: str, ndim: int) -> Letters:
    """The letters of a tensor with `ndim` dimensions; of a longer term only the last ones count."""
    if "..." not in term:
        return tuple(term[len(term) - ndim :])
    front, back = term.split("...")
    batch = ndim - len(front) - len(back)
    return (*front, *range(-batch, 0), *back)


def rows(term: str, shape: Shape | None, letter: str | int, out_size: int) -> Rows | None:
    """The rows along `letter` of an argument with this term of the equation; None (all of it) where
    it lacks the letter, or is broadcast: the letter's size in the output is `out_size`."""
    argument_letters = letters(term, len(shape)) if shape else ()
    if shape is None or letter not in argument_letters:
        return None
    dim = argument_letters.index(letter)
    return Rows(dim) if shape[dim] == out_size else None


def equation_reads(call: Call, dim: int, equation: str, names: tuple[str, ...]) -> Reads:
    """What a slice reads of the arguments `names`, each of which has a term in `equation`."""
    terms, _, out = equation.partition("->")
    letter = letters(out, len(call.shape))[dim]
    return {
        name: rows(term, call.size(name), letter, call.shape[dim])
        for name, term in zip(names, terms.split(","), strict=True)
        if call.has(name)
    }


def product(equation: str, *names: str) -> Rule:
    """The rule for an operator whose arguments `names` are multiplied by a fixed equation."""
    return Rule(lambda call, dim: equation_reads(call, dim, equation, names))


def linear(call: Call, dim: int) -> Reads:
    vector = len(call.size("weight")) == 1
    equation = "...i,i,->..." if vector else "...i,oi,o->...o"
    return equation_reads(call, dim, equation, ("input", "weight", "bias"))


def matmul(call: Call, dim: int) -> Reads:
    is_vector = {name: len(call.size(name)) == 1 for name in ("self", "other")}
    left, row = ("k", "") if is_vector["self"] else ("...ik", "i")
    right, column = ("k", "") if is_vector["other"] else ("...kj", "j")
    return equation_reads(call, dim, f"{left},{right}->...{row}{column}", ("self", "other"))


def einsum(call: Call, dim: int) -> Reads | None:
    """By its own equation; a wall where a term repeats a letter (a diagonal)."""
    equation = call["equation"].replace(" ", "")
    terms, arrow, out = equation.partition("->")
    if not arrow:  # the output has the letters that occur once, in alphabetical order
        batch = "..." if "..." in terms else ""
        out = batch + "".join(sorted(c for c in set(terms) - set(".,") if terms.count(c) == 1))
    for term in terms.replace(".", "").split(","):
        if len(set(term)) < len(term):
            return None
    letter = letters(out, len(call.shape))[dim]
    with_terms = zip(terms.split(","), map(shape_of, call["tensors"]), strict=True)
    return {"tensors": [rows(t, shape, letter, call.shape[dim]) for t, shape in with_terms]}


TABLE: Table = {
    aten.addbmm: product("ik,bij,bjk->ik", "self", "batch1", "batch2"),
    aten.addmm: product("ik,ij,jk->ik", "self", "mat1", "mat2"),
    aten.baddbmm: product("bik,bij,bjk->bik", "self", "batch1", "batch2"),
    aten.bmm: product("bij,bjk->bik", "self", "mat2"),
    aten.mm: product("ij,jk->ik", "self", "mat2"),
    aten.mv: product("ij,j->i", "self", "vec"),
    aten.outer: product("i,j->ij", "self", "vec2"),
    aten.prelu: product("bc...,c->bc...", "self", "weight"),
    aten.einsum: Rule(einsum),
    aten.linear: Rule(linear),
    aten.matmul: Rule(matmul),
}
