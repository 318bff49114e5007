"""What helps: for holders of memory, and for incidents, with the versions for which each is right."""

from __future__ import annotations

from gpu_oom_exporter.catalog.remedies.holders import SEE, remedies
from gpu_oom_exporter.catalog.remedies.incidents import ADVICE, NAMES, Remedy, advise, version_key

__all__ = ["ADVICE", "NAMES", "SEE", "Remedy", "advise", "remedies", "version_key"]
