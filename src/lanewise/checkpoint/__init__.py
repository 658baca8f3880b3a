"""Checkpoints: written whole or not at all, verified before they are believed, read into any layout.

`pieces` says which part of a tensor a rank holds, `dcp` teaches torch's distributed checkpoint to store such parts,
`manifest` is what a finished checkpoint is known by, `store` saves and finds them during a run, `stored` reads one
without a process group, `weights_hash` names the weights whatever their layout.
"""
