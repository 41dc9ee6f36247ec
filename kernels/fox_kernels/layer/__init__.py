"""Fused parts of an attention layer beside attention: projections, gate, norm, rotary embedding, shift."""
