"""NVIDIA Xid errors: what each number means for us.

Source: the mnemonics of the driver header (branch 595) and NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import re

_ROWS = {
    "gpu_app_fault": (6, 8, 11, 12, 13, 31, 32, 37, 39, 40, 41, 42, 44, 66, 67, 68, 69, 70, 71, 72, 73, 80, 137),
    "gpu_ecc_error": (48, 64, 94, 95, 140, 171, 172),
    "gpu_lost": (79,),
    "gpu_driver_fault": (38, 61, 62, 109, 119, 120, 143),
    "nvlink_fault": (74, 144, 145, 146, 147, 148, 149, 150),
    "gpu_recovery_required": (154,),
    "gpu_xid_info": (43, 45, 63, 92),
}
XID_CATEGORY = {str(xid): category for category, xids in _ROWS.items() for xid in xids}
"""Xid number as printed → incident category; any other number is `XID_OTHER`."""

XID_OTHER = "gpu_xid_info"

XID_LINE = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]{1,16})\): (\d{1,4}),")
"""How the driver tells the kernel's log of an Xid: PCI address and number (drivers 410 to 595)."""
