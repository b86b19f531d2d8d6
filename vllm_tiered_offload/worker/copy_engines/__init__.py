"""Engines that move bytes between device blocks and region rows: one module per kind of device, one seam (base)."""
