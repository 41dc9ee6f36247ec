"""Context parallelism: rows longer than one device, shared by several processes.

The N processes of a context group read the same rows and each holds a part of every row. Everything but attention works
on that part alone. For attention, U of them trade tokens for heads (`ulysses`), so that each has a share of the heads
and U times the tokens; where N is larger than that goes, Z = N / U of them gather the keys, values and gates of whole
rows (`zigzag`). A group is a row of a 2D mesh, Z x U, and a run has as many groups as fit its processes.
"""
