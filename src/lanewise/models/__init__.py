"""Models: plain torch.nn. They know nothing of processes; each declares its parameters as data (`spec.py`).

Letters in shape suffixes: B batch, T tokens of a sequence, S = B*T, H hidden width, N query heads, G key/value heads,
D head width, E experts, K experts a token goes to, P = S*K pairs (token, expert), F feed-forward width, V vocabulary,
L layers with experts.
"""
