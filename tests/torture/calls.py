"""Faults and interrupts inside of calls."""


def fail_calls(*a, **k):
    pass


def interrupt_calls(*a, **k):
    pass
