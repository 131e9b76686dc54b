"""A signal after a given time: SIGALRM, and on Windows, where no timer sends signals, SIGINT.

Programs that tests start import this module, so it needs the standard library alone.
"""

import ctypes
import signal
import sys

if sys.platform == "win32":
    ALARM = signal.SIGINT
    _kernel = ctypes.WinDLL("kernel32")
    _kernel.CreateTimerQueueTimer.argtypes = (
        ctypes.POINTER(ctypes.c_void_p), *[ctypes.c_void_p] * 3, *[ctypes.c_ulong] * 3,
    )  # fmt: skip
    _kernel.DeleteTimerQueueTimer.argtypes = (ctypes.c_void_p,) * 3
    # The function of the C library, not Python's: a call may hold the GIL while it runs.
    _raise = ctypes.cast(getattr(ctypes.CDLL("ucrtbase"), "raise"), ctypes.c_void_p)
    _IN_TIMER_THREAD, _WAIT_FOR_CALLBACKS = 0x20, ctypes.c_void_p(-1)
    _timers: list[ctypes.c_void_p] = []

    def set_alarm(seconds: float, interval: float = 0.0) -> None:
        """Raise ALARM in that time, and then in these intervals. 0 seconds: no more."""
        while _timers:
            _kernel.DeleteTimerQueueTimer(None, _timers.pop(), _WAIT_FOR_CALLBACKS)
        if seconds > 0:
            timer = ctypes.c_void_p()
            due, period = (max(1, round(1000 * t)) if t > 0 else 0 for t in (seconds, interval))
            started = _kernel.CreateTimerQueueTimer(
                ctypes.byref(timer), None, _raise, ctypes.c_void_p(ALARM), due, period, _IN_TIMER_THREAD
            )
            assert started, ctypes.WinError()
            _timers.append(timer)

else:
    ALARM = signal.SIGALRM

    def set_alarm(seconds: float, interval: float = 0.0) -> None:
        """Raise ALARM in that time, and then in these intervals. 0 seconds: no more."""
        signal.setitimer(signal.ITIMER_REAL, seconds, interval)
