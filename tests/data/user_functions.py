"""What a user might name in a run file."""

import os
import signal


def mask_some(tokens_BT, labels_BT, key):
    """Hides every label whose place has some relation to the key, and says in the first token which process it was."""
    labels_BT = labels_BT.copy()
    labels_BT[:, key % 5 :: 5] = -100
    return tokens_BT, labels_BT


def which_process(tokens_BT, labels_BT, key):
    tokens_BT = tokens_BT.copy()
    tokens_BT[0, 0] = os.getpid() % 251
    return tokens_BT, labels_BT


def dies(tokens_BT, labels_BT, key):
    os.kill(os.getpid(), signal.SIGKILL)


def fails(tokens_BT, labels_BT, key):
    raise ValueError("this one is bad")


def other_shape(tokens_BT, labels_BT, key):
    return tokens_BT[:, :-1], labels_BT[:, :-1]


def other_ids(tokens_BT, labels_BT, key):
    return tokens_BT + 257, labels_BT


def is_long(text):
    return len(text) > 10
