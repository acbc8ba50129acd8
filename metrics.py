"""What a cache costs in accuracy, as figures: perplexity, KL divergence, agreement, ROUGE, intervals, tables.

Works on logits and strings that others made; loads and generates nothing.  n positions, V vocabulary.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass
class TokenFigures:
    """Figures per position of one cache against a baseline, gathered in pieces and condensed once."""
    nll: list[np.ndarray] = field(default_factory=list)  # nats per predicted token
    kl: list[np.ndarray] = field(default_factory=list)  # nats per position
    same_top: list[np.ndarray] = field(default_factory=list)  # bool per position

    def add(self, base: Tensor, other: Tensor, targets: Tensor) -> None:
        """base, other: log-probabilities [n, V]; targets: the tokens that came next [n], [n-1] at an end."""
        picked = other[:len(targets)].gather(-1, targets[:, None])[:, 0]
        self.nll.append(-picked.double().cpu().numpy())
        self.kl.append((base.exp() * (base - other)).sum(-1).double().cpu().numpy())
        self.same_top.append((base.argmax(-1) == other.argmax(-1)).cpu().numpy())

    def condense(self) -> dict[str, float]:
        """perplexity, perplexity_stderr, kl (its mean), kl_p99, and top1, the share of equal top tokens."""
        value, stderr = perplexity(np.concatenate(self.nll))
        kl = np.concatenate(self.kl)
        return {"perplexity": value, "perplexity_stderr": stderr, "kl": float(kl.mean()),
                "kl_p99": float(np.percentile(kl, 99)), "top1": float(np.concatenate(self.same_top).mean())}


def perplexity(nll: np.ndarray) -> tuple[float, float]:
    """exp(mean of nll [n], nats) and its standard error (delta method, tokens taken as independent)."""
    value = float(np.exp(nll.mean()))
    stderr = float(nll.std(ddof=1)) / len(nll) ** 0.5 if len(nll) > 1 else float("nan")
    return value, value * stderr


def log_softmax(logits: Tensor) -> Tensor:
    """float32 log-probabilities over the last axis (float64 when the logits are)."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


def check_rouge() -> None:
    """ValueError, with the remedy, when the rouge-score package is missing."""
    try:
        import rouge_score  # noqa: F401
    except ImportError as e:
        raise ValueError("ROUGE needs the rouge-score package: pip install rouge-score") from e


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
    """F x 100 of each text against its reference, [rows], for each of ROUGE_KINDS (Lin 2004).

    Porter stemmer on; the sentences of rougeLsum are lines; space around a text does not count.
    """
    check_rouge()
    from rouge_score.rouge_scorer import RougeScorer
    scorer = RougeScorer(ROUGE_KINDS, use_stemmer=True)
    scores = [scorer.score(reference.strip(), text.strip())
              for text, reference in zip(texts, references, strict=True)]
    return {kind: np.array([100 * score[kind].fmeasure for score in scores]) for kind in ROUGE_KINDS}


def bootstrap_interval(differences: np.ndarray, level: float = 0.95, samples: int = 2000,
                       seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of paired differences [rows] (Efron and Tibshirani 1993, ch. 13)."""
    rng = np.random.default_rng(seed)
    means = [rng.choice(differences, len(differences)).mean() for _ in range(samples)]
    low, high = np.percentile(means, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """Rows that share their keys as a Markdown table, its first column to the left, others to the right."""
    header = list(rows[0])
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *[list(row.values()) for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
