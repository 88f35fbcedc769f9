"""Sums over all B^M tuples of a product of pairwise factors, without ever holding the B^M tuples.

For rows r and tuples (j_1 … j_M): inner_r = Σ_j Π_m K^m[r, j_m] Π_{p<q} W^{pq}[j_p, j_q]. Fixing j_1 turns
W^{1m}[j_1, ·] into factors of K^m, so a problem of M models and B rows is one of M − 1 models and B² rows that share
the *tail* S[j_2 … j_M] = Π_{2≤p<q} W^{pq}. The last index is then summed by a matrix product with S: B^{M+1}
multiply-adds at the speed of a matrix product, and only B^M elementwise steps, in chunks that fit the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Pairs = Mapping[tuple[int, int], Tensor]
"""For models p < q a (B, B) matrix [j_p, j_q]."""

CHUNK = 2**19
"""Elements of each temporary of a chunk."""
FLAT = 2**18
"""Up to this B^M the tail covers all models: fewer, larger steps."""
TAIL = 2**21
"""Elements of the largest tail; further leading indices are fixed one by one beyond it."""
LEAF = 2**20
"""Terms that `log_contract` holds at once."""


def tail_length(models: int, batch: int) -> int:
    """How many trailing models the tail covers: all, all but the first, or fewer as B^M grows."""
    length = models if models <= 2 or batch**models <= FLAT else models - 1
    while length > 2 and batch**length > TAIL:
        length -= 1
    return length


def make_tail(pairs: Pairs, models: int, length: int, like: Tensor) -> Tensor:
    """S, of `length` dimensions: the product of the pair factors among the last `length` of the models."""
    first = models - length
    tail = like.new_ones(like.shape[-1])
    for q in range(first + 1, models):
        factor = pairs[q - 1, q]
        for p in range(q - 2, first - 1, -1):
            factor = pairs[p, q].view(-1, *[1] * (q - p - 1), like.shape[-1]) * factor
        tail = tail.unsqueeze(-1) * factor
    return tail


def contract(kernels: Sequence[Tensor], pairs: Pairs, tail: Tensor, *, marginals: bool) -> tuple[Tensor, list[Tensor]]:
    """The sums of the module's docstring, differentiable where `marginals` is off.

    Args:
        kernels: the matrices K^m (R, B) of the last `len(kernels)` models.
        pairs: the factors W^{pq}, of all models, numbered from 0.
        tail: what `make_tail` returns.
        marginals: whether the second result is wanted, else it is empty.

    Returns:
        inner (R,), and for each model the part of the sum that falls to each value of its index: (R, B), whose
        rows sum to inner.
    """
    if len(kernels) == tail.dim():
        return _leaf(kernels, tail, marginals)
    head, *rest = kernels
    rows, batch = head.shape
    # `pairs` numbers all models, `kernels` are the last of them.
    this = 1 + max((q for _, q in pairs), default=0) - len(kernels)
    step = 1
    if len(rest) == tail.dim():
        step = min(batch, max(1, CHUNK // (rows * batch ** (tail.dim() - 1))))
    first: list[Tensor] = []
    sums: list[Tensor] = []
    for start in range(0, batch, step):
        fixed = slice(start, start + step)
        inside = [
            (kernel.unsqueeze(1) * pairs[this, other][fixed]).flatten(0, 1)
            for other, kernel in enumerate(rest, start=this + 1)
        ]
        inner, parts = contract(inside, pairs, tail, marginals=marginals)
        weight = head[:, fixed]
        first.append(weight * inner.view(rows, -1))
        scaled = [(weight.unsqueeze(1) @ part.view(rows, -1, batch)).squeeze(1) for part in parts]
        sums = [total + part for total, part in zip(sums, scaled, strict=True)] if sums else scaled
    of_head = torch.cat(first, dim=1)
    return of_head.sum(1), [of_head, *sums] if marginals else []


def _leaf(kernels: Sequence[Tensor], tail: Tensor, marginals: bool) -> tuple[Tensor, list[Tensor]]:
    *front, last = kernels
    rows, batch = last.shape
    product = front[0] if front else last.new_ones(rows, 1)
    for kernel in front[1:]:
        product = (product.unsqueeze(-1) * kernel.unsqueeze(1)).flatten(1)
    shared = tail.reshape(-1, batch)
    of_last = last * (product @ shared)
    inner = of_last.sum(1)
    if not marginals:
        return inner, []
    found = [of_last]
    if front:
        joint = (last @ shared.T).mul_(product)  # over the indices of `front`, the last one running fastest
        for _ in front[1:]:
            joint = joint.view(rows, -1, batch)
            found.insert(0, joint.sum(1))
            joint = joint.sum(2)
        found.insert(0, joint)
    return inner, found


def log_contract(logits: Sequence[Tensor], pairs: Pairs) -> Tensor:
    """log inner (R,) from logarithms of all factors, term by term: for factors too far apart for float64.

    B^{M+1} exponentials instead of multiply-adds, so 10 to 100 times slower than `contract`; differentiable.
    """
    head, *rest = logits
    rows, batch = head.shape
    if rows * batch ** len(logits) <= LEAF or not rest:
        models = 1 + max((q for _, q in pairs), default=0)
        factors = [pairs[p, q] for p in range(models - len(logits), models) for q in range(p + 1, models)]
        found: Tensor = checkpoint(
            _log_leaf, len(logits), *logits, *factors, use_reentrant=False, preserve_rng_state=False
        )
        return found
    this = 1 + max(q for _, q in pairs) - len(logits)
    each = [
        head[:, j] + log_contract([logit + pairs[this, m][j] for m, logit in enumerate(rest, start=this + 1)], pairs)
        for j in range(batch)
    ]
    return torch.stack(each, dim=1).logsumexp(1)


def _log_leaf(models: int, *parts: Tensor) -> Tensor:
    logits, factors = parts[:models], iter(parts[models:])
    rows, batch = logits[0].shape

    def spread(part: Tensor, *at: int) -> Tensor:
        return part.reshape([batch if m in at else 1 for m in range(models)])

    total = sum(
        (logit.reshape([rows, *(batch if m == k else 1 for m in range(models))]) for k, logit in enumerate(logits)),
        start=logits[0].new_zeros(()),
    )
    for p in range(models):
        for q in range(p + 1, models):
            total = total + spread(next(factors), p, q)
    return total.flatten(1).logsumexp(1)
