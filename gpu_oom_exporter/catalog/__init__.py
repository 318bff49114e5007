"""NAME: tables a newcomer edits; no logic beyond a lookup."""
