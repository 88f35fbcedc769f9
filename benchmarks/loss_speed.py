"""How fast the Muscle loss is beside its written-out sum: forward + backward, one thread, float32.

`python benchmarks/loss_speed.py` times, turn by turn in one run, ours, the paper's formulation (α and the B^M × d
rows S made from the others' rows, then contrasted), and the latter with S and α already there. It prints medians
and, as the median of the ratios of neighbouring turns, how many times faster ours is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fedbench.seeds import torch_generator
from fedbench_plugins.losses.muscle import Muscle

TAU, TAU_PREV, DIMENSION = 0.2, 0.15, 128
TURNS = {(1, 32): 50, (2, 32): 50, (3, 16): 30, (3, 32): 9, (4, 16): 5, (4, 32): 15, (5, 32): 5}
WRITTEN_OUT = ((1, 32), (2, 32), (3, 16), (3, 32), (4, 16))
"""(M, B) whose B^M × d rows take a bearable time and memory."""


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


def timed(loss: Callable[[], Tensor], anchor: Tensor) -> tuple[float, Tensor]:
    """Milliseconds of one forward and backward pass, and the gradient."""
    anchor.grad = None
    start = time.perf_counter()
    loss().backward()
    spent = (time.perf_counter() - start) * 1e3
    assert anchor.grad is not None
    return spent, anchor.grad


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    loss = Muscle(tau=TAU, tau_prev=TAU_PREV)
    print(f"Muscle loss, forward + backward, d = {DIMENSION}, one thread, medians in ms (torch {torch.__version__})")
    print(f"{'M':>2} {'B':>3} {'ours':>9} {'written out':>12} {'ratio':>7} {'S, α given':>11} {'ratio':>7}")
    for (models, batch), turns in TURNS.items():
        generator = torch_generator("loss_speed", models, batch)
        rows = functional.normalize(torch.randn(models + 1, batch, DIMENSION, generator=generator), dim=-1)
        anchor, others = rows[0].clone().requires_grad_(), rows[1:]
        ours: list[float] = []
        whole: list[float] = []
        given: list[float] = []
        for turn in range(turns + 2):
            spent, gradient = timed(lambda a=anchor, o=others: loss(a, o), anchor)  # type: ignore[misc]
            ours.append(spent)
            if (models, batch) not in WRITTEN_OUT:
                continue
            spent, reference = timed(lambda a=anchor, o=others: written_out_loss(a, *written_out_rows(o)), anchor)  # type: ignore[misc]
            whole.append(spent)
            ready = written_out_rows(others)
            given.append(timed(lambda a=anchor, r=ready: written_out_loss(a, *r), anchor)[0])  # type: ignore[misc]
            if turn == 0:
                torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)
        cells = [f"{models:>2} {batch:>3} {statistics.median(ours[2:]):>9.2f}"]
        for others_times, width in ((whole, 12), (given, 11)):
            if others_times:
                ratio = statistics.median(slow / fast for slow, fast in zip(others_times[2:], ours[2:], strict=True))
                cells.append(f"{statistics.median(others_times[2:]):>{width}.2f} {ratio:>6.1f}x")
        print(" ".join(cells), flush=True)


if __name__ == "__main__":
    main()
