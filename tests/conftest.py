# SPDX-License-Identifier: MIT
"""For all tests."""
import signal

import pytest


@pytest.fixture(autouse=True)
def ctrl_c_works():
    """A shell's background job ignores SIGINT, and so would what the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
