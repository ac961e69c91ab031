"""A comparison for other programs: JSON with all there is, CSV with the tidy rows."""

import json
from dataclasses import asdict

from tailopt import __version__
from tailopt.compare import Comparison
from tailopt.trace.statistics import statistics


def to_json(comparison: Comparison) -> str:
    """Everything about a comparison as one JSON document: inputs, summary, certificates and rows.

    Equal comparisons give equal text: no clock time, path or machine is in it. Seconds, tokens and shares as
    the names say; ``null`` where a number does not exist.
    """
    trace, fleet = comparison.trace, comparison.fleet
    profile = fleet.profile
    document = {
        "tailopt": __version__,
        "seed": comparison.seed,
        "batches": len(comparison.certificates),
        "prompts": comparison.prompts,
        "samples": comparison.samples,
        "groups": "atomic" if comparison.atomic else "free",
        "trace": {
            "name": trace.name,
            "source": trace.source,
            "licence": trace.licence,
            "synthetic": trace.synthetic,
            "sha256": trace.sha256,
            "statistics": asdict(statistics(trace)),
        },
        "engine": {
            "name": profile.name,
            "hardware": profile.hardware,
            "model": profile.model,
            "precision": profile.precision,
            "engine": profile.engine,
            "engine_version": profile.engine_version,
            "sources": profile.sources,
            "licence": profile.licence,
            "step_time": {f"TP{tp}": str(profile.shape(tp).step_time) for tp in comparison.degrees},
        },
        "fleet": {"shape": str(fleet), "gpus": fleet.gpus},
        "summary": comparison.summary.to_dicts(),
        "certificates": comparison.certificates.to_dicts(),
        "rows": comparison.rows.to_dicts(),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(comparison: Comparison) -> str:
    """The tidy rows as CSV, one per batch, policy and predictor."""
    return comparison.rows.write_csv()
