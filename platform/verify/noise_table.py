"""Format the certificates of `stochastic.py` as a table."""

from dbo.platform.verify.stochastic import NODES, NoiseCertificate

HEADINGS = ("algorithm", "V", "mean", "steps ½", "σ ½", "one node", "other samples", "without", "verdict")
LEGEND = (
    "V: mean square of mean(x) − its end with full batches. mean: share of V that is not variance but an offset. "
    f"Ratios to V: with half of the steps, with half of the noise, on one node instead of {NODES}, with new samples at "
    "every call of an oracle; without: V relative to that of the algorithm without variance reduction."
)
MARKS = ("<!-- dbo verify --noise -->\n", "<!-- end of dbo verify --noise -->\n")


def format_row(certificate: NoiseCertificate) -> tuple[str, ...]:
    """Return a row of the table."""
    if certificate.noise is None:
        return (certificate.algorithm, *("–",) * (len(HEADINGS) - 2), certificate.verdict)
    base = certificate.base
    return (
        certificate.algorithm, f"{base.variance:.1e}".replace("e-0", "e-"), f"{base.offset:.2f}",
        f"{certificate.step_ratio:.2f}", f"{certificate.noise_ratio:.2f}", f"{certificate.nodes_ratio:.1f}",
        _format_ratio(certificate.shared_ratio, 0), _format_ratio(certificate.below_ratio, 2), certificate.verdict,
    )


def _format_ratio(ratio: float | None, digits: int) -> str:
    if ratio is None:
        return "–"
    return "> 1e6" if ratio > 1e6 else f"{ratio:,.{digits}f}"
