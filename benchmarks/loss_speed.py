"""How fast the Muscle loss is beside its written-out sum: forward + backward, one thread, float32.

`python benchmarks/loss_speed.py` times, turn by turn in one run, ours, the paper's formulation (α and the B^M × d
rows S made from the others' rows, then contrasted), and the latter with S and α already there. It prints medians
and, as the median of the ratios of neighbouring turns, how many times faster ours is.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fedbench.seeds import torch_generator
from fedbench_plugins.losses.muscle import Muscle

TAU, TAU_PREV = 0.2, 0.15
CASES = (
    (1, 32, 128, 20),
    (2, 32, 128, 20),
    (3, 16, 128, 20),
    (3, 32, 128, 15),
    (3, 32, 256, 15),
    (4, 16, 128, 7),
    (4, 32, 128, 15),
    (5, 32, 128, 5),
)
"""M, B, d, turns."""
WRITTEN_OUT = 70_000
"""The most tuples B^M that are written out: beyond, S takes gigabytes."""
REPEATS = 5
"""Calls of one turn that takes milliseconds; their median counts."""


def written_out_rows(others: Tensor) -> tuple[Tensor, Tensor]:
    """What the paper's server sends: S (B^M, d) and log α (B^M,)."""
    models, batch, _ = others.shape
    index = torch.cartesian_prod(*[torch.arange(batch)] * models).view(-1, models)
    rows = [others[m, index[:, m]] for m in range(models)]
    log_alpha = torch.zeros(len(index))
    for p, q in itertools.combinations(range(models), 2):
        log_alpha -= (1 / TAU_PREV - 1 / TAU) * (rows[p] * rows[q]).sum(-1)
    return torch.stack(rows).sum(0), log_alpha


def written_out_loss(anchor: Tensor, sums: Tensor, log_alpha: Tensor) -> Tensor:
    """The paper's loss of S and log α."""
    logits = anchor @ sums.T / TAU + log_alpha
    batch = len(anchor)
    stride = (len(sums) - 1) // max(batch - 1, 1)  # the tuple (i, …, i) is row i times this
    return functional.cross_entropy(logits, torch.arange(batch) * stride)


def timed(loss: Callable[[], Tensor], anchor: Tensor, repeats: int = REPEATS) -> float:
    """Milliseconds of one forward and backward pass."""
    spent = []
    for _ in range(repeats):
        anchor.grad = None
        start = time.perf_counter()
        loss().backward()  # type: ignore[no-untyped-call]
        spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent)


def row(models: int, batch: int, dimension: int, turns: int) -> str:
    """One line of the table."""
    loss = Muscle(tau=TAU, tau_prev=TAU_PREV)
    generator = torch_generator("loss_speed", models, batch)
    rows = functional.normalize(torch.randn(models + 1, batch, dimension, generator=generator), dim=-1)
    anchor, others = rows[0].clone().requires_grad_(), rows[1:]
    ours: list[float] = []
    whole: list[float] = []
    given: list[float] = []
    for _ in range(turns + 1):
        ours.append(timed(lambda: loss(anchor, others), anchor))
        gradient = anchor.grad
        if batch**models <= WRITTEN_OUT:
            repeats = 1 if batch**models > 10_000 else REPEATS
            whole.append(timed(lambda: written_out_loss(anchor, *written_out_rows(others)), anchor, repeats))
            torch.testing.assert_close(gradient, anchor.grad, rtol=1e-4, atol=1e-5)
            sums, log_alpha = written_out_rows(others)
            given.append(timed(functools.partial(written_out_loss, anchor, sums, log_alpha), anchor, repeats))
    cells = [f"{models:>2} {batch:>3} {dimension:>4} {statistics.median(ours[1:]):>9.2f}"]
    for slower, width in ((whole, 12), (given, 11)):
        if slower:
            ratio = statistics.median(slow / fast for slow, fast in zip(slower[1:], ours[1:], strict=True))
            cells.append(f"{statistics.median(slower[1:]):>{width}.2f} {ratio:>6.1f}x")
    return " ".join(cells)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"Muscle loss, forward + backward, one thread, float32, medians in ms (torch {torch.__version__})")
    print(f"{'M':>2} {'B':>3} {'d':>4} {'ours':>9} {'written out':>12} {'ratio':>7} {'S, α given':>11} {'ratio':>7}")
    for case in CASES:
        print(row(*case), flush=True)


if __name__ == "__main__":
    main()
